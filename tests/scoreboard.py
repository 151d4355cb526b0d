"""The scoreboard: for each fault what is promised, the tests that hold it, and what transformers' own classes do.

Tests name their faults by the marker `promise`. As a program, it runs them and writes `scoreboard.json`,
`scoreboard.md` and the table of invariances in the README of the models: `make scoreboard`. Arguments go to pytest, so
that `-k disk` renews a part of the results; machine and versions are those of the last run of all tests. `--stock`
also tries the faults on transformers' own classes.
"""

import ast
import json
import platform
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple


TESTS = Path(__file__).parent
RECORD, TABLE = TESTS / "scoreboard.json", TESTS / "scoreboard.md"
README = TESTS.parent / "hf_vanilla" / "models" / "README.md"
VERSIONS = ("hf_vanilla", "torch", "transformers", "huggingface_hub", "safetensors")
BEGIN, END = "<!-- invariances -->\n", "<!-- end of invariances -->\n"


class Row(NamedTuple):
    """A fault's group, its promise, what transformers does (unless stock_faults.py tries it), and what is missing."""

    group: str
    promise: str
    stock: str = ""
    missing: str = ""


RUNS, INPUT, FILES, HUB = "Training runs", "Input", "Hostile files", "The Hub"
ROWS = {
    "killed inside a save": Row(RUNS, "the newest complete checkpoint is resumed, to the same bits"),
    "file missing": Row(RUNS, "found, named, and an earlier checkpoint is resumed; refused if there is none"),
    "file cut short": Row(RUNS, "found, named, and an earlier checkpoint is resumed; refused if there is none"),
    "flipped bit": Row(RUNS, "found by its hash, named, and an earlier checkpoint is resumed"),
    "tensor missing": Row(RUNS, "found and named; never resumed from, never published"),
    "disk full": Row(
        RUNS,
        "one line that names the file; earlier checkpoints stay whole; on request, the training continues",
        "RuntimeError; the half checkpoint stays, and is the one that is resumed",
    ),
    "folder not writable": Row(RUNS, "one line before any work", "PermissionError at the first save"),
    "two runs in one folder": Row(RUNS, "the second one is refused; the lock of a killed run is no obstacle"),
    "SIGTERM or Ctrl-C": Row(
        RUNS, "saved within the grace, exit codes 143 and 130; a second signal ends at once; resumed to the same bits"
    ),
    "process killed": Row(
        RUNS,
        "the job restarts within 60 s, also on two machines, and ends with the same bits",
        "torchrun restarts the script, which has to resume by itself",
    ),
    "process 0 killed in a save": Row(RUNS, "as a kill of the whole job", "as a kill inside a save"),
    "other processes or batches": Row(RUNS, "refused, as other rows would be repeated and left out"),
    "NaN": Row(RUNS, "stopped, skipped or rolled back, as chosen; the rows are named; never saved"),
    "no labels": Row(RUNS, "loss 0 and gradients 0"),
    "divergence": Row(RUNS, "on request, stopped by Marian's rule", "the training continues"),
    "other config, tokenizer or data": Row(RUNS, "refused unless forced; other versions are named"),
    "kills at random": Row(
        RUNS,
        "the same bits each time; 200 kills are on record, in `soak.json`",
        "as a kill inside a save",
    ),
    "bad rows and lost shards": Row(
        RUNS, "refused, or left out and counted; failed reads are repeated", "an error of `datasets`"
    ),
    "id outside the vocabulary": Row(INPUT, "ValueError with position, id and size of the vocabulary"),
    "row of padding": Row(INPUT, "finite, and the other rows do not change"),
    "empty batch or sentence": Row(INPUT, "empty outputs; an empty translation"),
    "too long": Row(
        INPUT, "ValueError for learned positions; sinusoids have no end; texts are cut, and that is counted"
    ),
    "mask of another shape": Row(INPUT, "ValueError"),
    "generation past the positions": Row(INPUT, "refused before it begins, or ends there", "IndexError"),
    "odd text": Row(INPUT, "as many outputs as inputs; what can't be read is named with its line", "not tried"),
    "special tokens in a text": Row(INPUT, "plain text in translations, special in BERT's, as documented", "special"),
    "options of a search": Row(INPUT, "ValueError or TypeError with the option's name", "not tried"),
    "nonsense in a config": Row(INPUT, "refused with the field's name"),
    "anything at random": Row(INPUT, "a result without NaN, or ValueError or TypeError", "IndexError, RuntimeError"),
    "other ways to compute": Row(
        INPUT,
        "the same numbers, whatever the batch, padding, kernel or number of processes",
        "not tried",
    ),
    "pickle": Row(FILES, "never run", "never run: `weights_only`"),
    "config that names code": Row(FILES, "no request, nothing run", "no request, nothing run, from 5.5 on"),
    "hostile weights": Row(FILES, "what is renamed, extra, NaN, of another type or elsewhere is not published"),
    "absurd sizes": Row(FILES, "refused by arithmetic, before they are built or read", "not tried"),
    "hostile text": Row(FILES, "one printable line in messages, plain text in cards", "printed as it is"),
    "token of the Hub": Row(FILES, "in no file, card or message; sent in headers only"),
    "error of the Hub": Row(HUB, "repeated as the Hub asks; one commit", "a failed commit is not repeated"),
    "connection lost": Row(HUB, "the repository is compared; one commit", "a second commit may follow"),
    "killed while pushing": Row(HUB, "the next push sends the rest; one commit", "finished files are not sent again"),
    "broken download": Row(
        HUB, "completed; a wrong hash is found when asked; one revision, no mixture", "sizes are compared"
    ),
    "two pushes at once": Row(HUB, "the other's commit is never overwritten", "the last one overwrites"),
    "offline": Row(HUB, "said at once, not repeated", "as here"),
    "Hub down in training": Row(HUB, "the training ends well, and says what was not sent", "an error at the end"),
    "export to CTranslate2": Row(HUB, "the same translations, or refused", "converters for its own models"),
}


def faults_of(nodes):
    """Return the faults that `pytest.mark.promise` names in a list of expressions."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise"]
    return [argument.value for call in calls for argument in call.args]


def marked_tests():
    """Return the faults of every marked test, by the test's path and name."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        everywhere = [node.value for node in tree.body if isinstance(node, ast.Assign)]
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            if faults := faults_of([*node.decorator_list, *everywhere]):
                found[f"{path.relative_to(TESTS).as_posix()}::{node.name}"] = faults
    return found


class Recorder:
    """A plugin of pytest that keeps the outcome of every test, and the differences that tests of invariance saw."""

    def __init__(self):
        self.outcomes = defaultdict(set)
        self.seen = {}

    def pytest_runtest_logreport(self, report):
        """Keep what a test reports; its cases count as one test."""
        test = report.nodeid.partition("[")[0].removeprefix("tests/")
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[test].add(report.outcome)
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "invariance":
                what, family, tolerance, seen = value
                cells = self.seen.setdefault(what, {})
                cells[family] = [tolerance, max(seen, cells.get(family, [0, 0.0])[1])]

    def results(self):
        """Return one outcome for each test: a failure before all, and a skip only if no case ran."""
        order = ("failed", "passed", "skipped")
        return {test: next(each for each in order if each in found) for test, found in self.outcomes.items()}


def machine():
    """Name the kind of this machine, without its name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        cpu = next(line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.machine()
    return f"{cpu}, {platform.system()}, Python {platform.python_version()}"


def state_of(row, outcomes):
    """Say whether a promise holds, and what is missing."""
    if "failed" in outcomes:
        return "**fails**"
    skipped = outcomes.count("skipped")
    parts = [f"holds, {skipped} of {len(outcomes)} not run" if skipped else "holds"] if outcomes else []
    if outcomes and skipped == len(outcomes):
        parts = ["not run"]
    return "; ".join(parts + [f"open: {row.missing}"] * bool(row.missing or not outcomes))


def scoreboard(record):
    """Return the text of scoreboard.md."""
    marks = marked_tests()
    versions = ", ".join(f"{name} {number}" for name, number in sorted(record["versions"].items()))
    lines = [
        "# Faults and what is promised",
        "",
        "`make scoreboard` writes this file: it runs the tests that are marked with `promise`. A promise holds if all",
        "its tests passed. What transformers' own `Trainer` and BERT do is in italics where `stock_faults.py` tried",
        "it; the rest was tried by hand, or is from the source of 5.23.",
        "",
        f"{record['machine']}; {versions}.",
    ]
    for group in dict.fromkeys(row.group for row in ROWS.values()):
        lines += ["", f"## {group}", "", "| fault | promise | transformers | state | tests |", "|---|---|---|---|---|"]
        for fault, row in ROWS.items():
            if row.group == group:
                tests = [test for test, faults in marks.items() if fault in faults]
                state = state_of(row, [record["tests"].get(test, "skipped") for test in tests])
                stock = f"*{record['stock'][fault]}*" if fault in record["stock"] else row.stock
                names = "<br>".join(f"[{each.partition('::')[2]}]({each.partition('::')[0]})" for each in tests)
                lines.append(f"| {fault} | {row.promise} | {stock} | {state} | {names} |")
    return "\n".join(lines) + "\n"


def invariances(record):
    """Return the table of invariances for the README of the models."""
    seen = record["invariances"]
    families = ("encoder-decoder", "BERT", "GPT", "ViT")
    lines = [f"| what changes | tolerance | {' | '.join(families)} |", "|---|---|---|---|---|---|"]
    for what in sorted(seen):
        (tolerance,) = {cell[0] for cell in seen[what].values()}
        cells = [f"{seen[what][family][1]:.1e}" if family in seen[what] else "–" for family in families]
        lines.append(f"| {what} | {tolerance or 'same bits'} | {' | '.join(cells).replace('0.0e+00', '0')} |")
    return "\n".join(lines) + f"\n\nSeen on {record['machine']}, torch {record['versions']['torch']}.\n"


def with_invariances(text, record):
    """Return the README of the models with a new table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + invariances(record) + END + rest.partition(END)[2]


def main():
    """Run the marked tests, keep earlier results of those not run, and write record and tables if any has run."""
    import pytest

    arguments = [each for each in sys.argv[1:] if each != "--stock"]
    tests = [] if any(Path(each).exists() for each in arguments) else [str(TESTS)]
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"tests": {}, "invariances": {}, "stock": {}}
    recorder = Recorder()
    code = pytest.main([*tests, "-m", "promise", "--no-showlocals", *arguments], plugins=[recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not recorder.outcomes:
        return int(code) or 1
    if "--stock" in sys.argv:
        import stock_faults

        record["stock"] = stock_faults.run()
    marks = marked_tests()
    results = {**record["tests"], **recorder.results()}
    for what, cells in recorder.seen.items():
        record["invariances"].setdefault(what, {}).update(cells)
    record["tests"] = {test: results.get(test, "skipped") for test in marks}
    if recorder.outcomes.keys() >= marks.keys() or "machine" not in record:
        record |= {"machine": machine(), "versions": {name: version(name) for name in VERSIONS}}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    TABLE.write_text(scoreboard(record), encoding="utf-8")
    README.write_text(with_invariances(README.read_text(encoding="utf-8"), record), encoding="utf-8")
    return int(code != pytest.ExitCode.OK or "failed" in record["tests"].values())


if __name__ == "__main__":
    sys.exit(main())
