"""Rules that hold for all source files, most of them because transformers or the Hub breaks without."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_vanilla"
FILES = sorted(PACKAGE.rglob("*.py"))
HUB_FILES = sorted((PACKAGE / "models").glob("*.py"))
HUB_ROOTS = {"torch", "transformers", "huggingface_hub"} | set(sys.stdlib_module_names)
LONGEST_FUNCTION = 60  # lines of code

# The other parts of the package that a part may import. Parts that are not listed may import all others.
BOTTOM = frozenset({"models"})
MIDDLE = frozenset({"data", "generation", "metrics", "precision", "visualization"})
ALLOWED_IMPORTS = {
    "models": frozenset(),
    "precision": frozenset(),
    "data": BOTTOM,
    "metrics": BOTTOM,
    "visualization": BOTTOM,
    "generation": BOTTOM | {"data", "precision"},
    "hub": BOTTOM | MIDDLE | {"registration"},
    "training": BOTTOM | MIDDLE | {"hub"},  # a training pushes
}


def names_of(files):
    return [path.relative_to(PACKAGE).as_posix() for path in files]


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_of(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def code_lines(source):
    """Line numbers that hold code: neither blank, nor a comment, nor (part of) a string that is a statement."""
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - strings


def imported_parts(path):
    """Top-level parts of hf_vanilla that a file imports, absolutely or relatively."""
    here = ("hf_vanilla", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            modules = [module] if module != "hf_vanilla" else [f"hf_vanilla.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            if module.startswith("hf_vanilla."):
                yield node.lineno, module.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=names_of(FILES))
def test_no_assert_and_no_print(path):
    # `python -O` takes assertions away; users silence log messages and not prints.
    bad = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print")
    ]
    assert not bad


def raised_and_documented(tree):
    """For each public function that documents its errors: its name, what it raises, and what its docstring names."""
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(parent if node.name == "__init__" else node) or ""
            if "\n" not in docstring or (node.name.startswith("_") and not node.name.startswith("__")):
                continue
            calls = [child.exc for child in ast.walk(node) if isinstance(child, ast.Raise) and child.exc is not None]
            names = {ast.unparse(call.func if isinstance(call, ast.Call) else call).split(".")[-1] for call in calls}
            section = docstring.partition("Raises:\n")[2].split("\n\n")[0]
            documented = set(re.findall(r"^ +(\w+):", section, flags=re.MULTILINE))
            yield node.name, {name for name in names if name.endswith(("Error", "Exception"))}, documented


@pytest.mark.parametrize("path", FILES, ids=names_of(FILES))
def test_docstrings_name_the_errors(path):
    assert [
        (name, sorted(raised - documented))
        for name, raised, documented in raised_and_documented(parsed(path))
        if raised - documented
    ] == []


@pytest.mark.parametrize("path", FILES, ids=names_of(FILES))
def test_functions_are_short(path):
    source = path.read_text(encoding="utf-8")
    lines = code_lines(source)
    lengths = {
        node.name: len(lines.intersection(range(node.lineno, node.end_lineno + 1)))
        for node in functions_of(ast.parse(source))
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


@pytest.mark.parametrize("path", FILES, ids=names_of(FILES))
def test_imports_within_the_package_point_downwards(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = ALLOWED_IMPORTS.get(part)
    if allowed is not None:
        assert [(line, other) for line, other in imported_parts(path) if other not in allowed | {part}] == []


@pytest.mark.parametrize("path", FILES, ids=names_of(FILES))
def test_nothing_imports_the_scripts(path):
    roots = {
        (node.module or "").split(".")[0] for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)
    } | {
        alias.name.split(".")[0]
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert "scripts" not in roots


@pytest.mark.parametrize("path", HUB_FILES, ids=names_of(HUB_FILES))
def test_hub_files_import_what_travels_with_them(path):
    # `save_pretrained` copies only what `from .name import X` names, and asks users to install every other import.
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= HUB_ROOTS, f"line {node.lineno}"
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in HUB_ROOTS, f"line {node.lineno}"
        elif isinstance(node, ast.ImportFrom):
            flat = node.level == 1 and node.module is not None and "." not in node.module
            assert flat, f"line {node.lineno}: only `from .name import X` is copied to the Hub"
            assert (path.parent / f"{node.module}.py").is_file(), f"line {node.lineno}"


@pytest.mark.parametrize("path", HUB_FILES, ids=names_of(HUB_FILES))
def test_hub_files_have_no_line_that_is_taken_for_an_import(path):
    # transformers finds relative imports with these two expressions, in docstrings too and not across line breaks.
    source = path.read_text(encoding="utf-8")
    found = set(re.findall(r"^\s*import\s+\.(\S+)\s*$", source, flags=re.MULTILINE))
    found |= set(re.findall(r"^\s*from\s+\.(\S+)\s+import", source, flags=re.MULTILINE))
    real = {node.module for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom) and node.level}
    assert found == real
    assert not re.search(r"^\s*from \.", "\n".join(docstrings(path)), flags=re.MULTILINE)


def docstrings(path):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(parsed(path)) if isinstance(node, documented)]


@pytest.mark.parametrize("path", HUB_FILES, ids=names_of(HUB_FILES))
def test_hub_files_keep_annotations_as_objects(path):
    # As strings they switch the validation of configs off and keep models from being registered.
    futures = [node for node in parsed(path).body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    assert "annotations" not in {alias.name for node in futures for alias in node.names}


@pytest.mark.parametrize("path", HUB_FILES, ids=names_of(HUB_FILES))
def test_initialisation_spares_loaded_weights(path):
    # `transformers.initialization` skips tensors that a checkpoint has filled, in-place methods do not.
    in_place = [
        (node.lineno, ast.unparse(node))
        for function in functions_of(parsed(path))
        if function.name == "_init_weights"
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.endswith("_")
        and not node.func.attr.startswith("_")
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "init")
    ]
    assert not in_place


def published_files():
    """Files that git knows or would add; all below the root where there is no git."""
    command = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    return [ROOT / name for name in run.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?<![\w.])/wor[k](?![\w-])",
        r"(?<![\w/-])share[d]/",
        r"pypi\.or[g]|pythonhosted\.or[g]|download\.pytorch\.or[g]",
    ],
    ids=["machine path", "folder of another tree", "package host"],
)
def test_no_file_names_places_that_others_do_not_have(pattern):
    found = {}
    for path in published_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if matches := re.findall(pattern, text):
            found[path.relative_to(ROOT).as_posix()] = matches
    assert found == {}


def test_the_rules_see_what_they_look_for():
    assert len(HUB_FILES) >= 4
    assert PACKAGE / "models" / "layers.py" in HUB_FILES
    assert ROOT / "pyproject.toml" in published_files()
    source = (
        'def f(\n    a,\n):\n    """Doc.\n\n    More.\n    """\n    # why\n    b = """x\n    y"""\n\n    return b\n'
    )
    assert code_lines(source) == {1, 2, 3, 9, 10, 12}
    documented = 'def f():\n    """A.\n\n    Raises:\n        TypeError: b.\n    """\n    raise ValueError("c")\n'
    assert list(raised_and_documented(ast.parse(documented))) == [("f", {"ValueError"}, {"TypeError"})]
    training = {part for path in FILES if path.parent.name == "training" for _, part in imported_parts(path)}
    assert training & MIDDLE


def test_names_of_test_files_are_unique():
    """pytest takes two files of one name in folders that are no packages for one module."""
    names = [path.name for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "conftest.py"]  # no module
    assert sorted(set(names)) == sorted(names)
