"""The scoreboard names exactly the marked tests, and its tables are those of the record."""

import json

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
