"""English text that comes with Python: the interpreter's help topics and the standard library's docstrings."""

import ast
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

from tqdm.auto import tqdm


MIN_DOCUMENT_LENGTH = 200  # characters


def python_documentation(limit: int | None = None) -> list[str]:
    """Return Python's help topics, and the docstrings of each module of its library as one document.

    Args:
        limit (`int`, *optional*): Number of documents, the longest ones; all by default.

    Returns:
        `list[str]`: the documents, longest first.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = sorted(path.relative_to(library) for path in library.glob("**/*.py"))
    modules = [path for path in modules if "site-packages" not in path.parts and "test" not in str(path)]
    texts = [topics[name] for name in sorted(topics)]
    texts += [_docstrings_of(library / path) for path in tqdm(modules, desc="reading docstrings", unit="file")]
    texts = [text for text in texts if len(text) >= MIN_DOCUMENT_LENGTH]
    return sorted(texts, key=len, reverse=True)[:limit]


def _docstrings_of(path: Path) -> str:
    """Collect the docstrings of one module."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))
