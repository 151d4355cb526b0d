"""Check that each link between the pages of a folder leads somewhere; `make docs` runs this on the API reference."""

import re
import sys
from pathlib import Path


def broken_links(folder):
    """Return the links of each page whose page or anchor does not exist."""
    scripts = re.compile("<script.*?</script>", flags=re.DOTALL)
    pages = {path.resolve(): scripts.sub("", path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        for link in sorted(set(re.findall(r'\bhref="(?!https?:|mailto:|data:)([^"]*)"', text))):
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            # What a class inherits from transformers has no anchor of its own: its class must have one.
            if target not in pages or (anchor and not {anchor, anchor.rpartition(".")[0]} & anchors[target]):
                broken.append(f"{path.name}: {link}")
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    sys.exit("\n".join(found) and "Broken links:\n" + "\n".join(found))
