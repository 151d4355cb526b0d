"""Python's own documentation: which modules it is from."""

from hf_vanilla.data import python_documentation


def test_modules_are_chosen_by_their_place_in_the_library(tmp_path, monkeypatch):
    """The folder of the library itself may have any name."""
    library = tmp_path / "latest" / "site-packages"
    for name in ("words.py", "test/words.py", "site-packages/words.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f'"""{name} says: {"one more word, " * 20}"""\n')
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    found = [text.partition(" says: ")[0] for text in python_documentation() if "one more word, one" in text]
    assert found == ["words.py"]
