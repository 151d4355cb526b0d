"""The scoreboard names exactly the marked tests, and its tables are those of the record."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest
import scoreboard


RECORD = json.loads(scoreboard.RECORD.read_text(encoding="utf-8"))
AGAIN = "run `make scoreboard`, with OPTIONS='-k NAME' for the tests that are new"


def test_record_names_the_marked_tests_and_none_has_failed():
    marks = scoreboard.marked_tests()
    assert RECORD["tests"].keys() == marks.keys(), AGAIN
    assert {fault for faults in marks.values() for fault in faults} <= scoreboard.ROWS.keys()
    assert all(row.stock or fault in RECORD["stock"] for fault, row in scoreboard.ROWS.items())
    assert [test for test, outcome in RECORD["tests"].items() if outcome == "failed"] == []


def test_tables_are_those_of_the_record():
    assert scoreboard.TABLE.read_text(encoding="utf-8") == scoreboard.scoreboard(RECORD), AGAIN
    text = scoreboard.README.read_text(encoding="utf-8")
    assert scoreboard.with_invariances(text, RECORD) == text, AGAIN


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        (["passed", "failed"], "**fails**"),
        (["passed", "skipped"], "holds, 1 of 2 not run; open: a gap"),
        (["skipped"], "not run; open: a gap"),
        ([], "open: a gap"),
    ],
)
def test_state_tells_gaps_and_failures(outcomes, state):
    assert scoreboard.state_of(scoreboard.Row("group", "promise", missing="a gap"), outcomes) == state


def test_versions_are_those_of_the_last_run_of_all_tests(tmp_path):
    for name in ("tests", "hf_vanilla/models"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(scoreboard.__file__, tmp_path / "tests")
    (tmp_path / "hf_vanilla" / "models" / "README.md").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = promise(faults)\n")
    test = "@pytest.mark.promise('pickle')\ndef test_{}(): pass\n"
    (tmp_path / "tests" / "test_some.py").write_text("import pytest\n" + test.format("one") + test.format("two"))
    earlier = {"invariances": {}, "machine": "another", "stock": {}, "tests": {}, "versions": {"torch": "1.0"}}
    (tmp_path / "tests" / "scoreboard.json").write_text(json.dumps(earlier))

    def record_after(code, *options):
        command = [sys.executable, str(tmp_path / "tests" / "scoreboard.py"), "-p", "no:cacheprovider", *options]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == code
        return json.loads((tmp_path / "tests" / "scoreboard.json").read_text())

    assert record_after(5, "-k", "thre") == earlier  # no test has run
    partial = {"test_some.py::test_one": "passed", "test_some.py::test_two": "skipped"}
    assert record_after(0, "-k", "one") == {**earlier, "tests": partial}
    assert record_after(0)["versions"] == {name: version(name) for name in scoreboard.VERSIONS}
