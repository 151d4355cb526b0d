import json
import math
import os
import subprocess
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest
import sacrebleu

from hf_vanilla.metrics import Bleu, bleu


HYPOTHESES = ["The Cat sat on the mat .", "A dog , barking", "nothing alike here", "", "Zwei Männer stehen am Herd ."]
REFERENCES = [
    "the cat sat on a mat .",
    "A dog , barking loudly",
    "something else",
    "not empty",
    "Zwei Männer stehen am Herd .",
]


def test_bleu_precisions_by_hand():
    result = Bleu().compute(predictions=["a b c d e"], references=["a b c d f"], tokenize="none")
    assert result["counts"] == [4, 3, 2, 1]
    assert result["totals"] == [5, 4, 3, 2]
    assert result["precisions"] == pytest.approx([80, 75, 200 / 3, 50])
    assert result["score"] == pytest.approx(100 * 0.2**0.25)
    assert (result["bp"], result["sys_len"], result["ref_len"]) == (1.0, 5, 5)


def test_arrays_of_texts_are_scored():
    result = Bleu().compute(predictions=np.array(["a b c d", "e f"]), references=np.array(["a b c d", "e f"]))
    assert result["score"] == pytest.approx(100)


def test_brevity_penalty_by_hand():
    result = Bleu().compute(predictions=["a b c d"], references=["a b c d e"], tokenize="none")
    assert result["bp"] == pytest.approx(math.exp(1 - 5 / 4))
    assert result["score"] == pytest.approx(100 * math.exp(-0.25))


def test_clipping_by_hand():
    result = Bleu().compute(predictions=["the the the the"], references=["the cat the mat"], tokenize="none")
    assert result["counts"][0] == 2


@pytest.mark.parametrize(
    ("tokenize", "hypothesis", "sys_len"),
    [
        ("13a", "Hello, world! 3.5 a-b", 6),
        ("none", "Hello, world! 3.5 a-b", 4),
        ("char", "Hello, you", 9),
        ("intl", "«Hello» you-all", 6),
        ("zh", "我爱你 OK。", 5),
    ],
)
def test_bleu_tokenizers(tokenize, hypothesis, sys_len):
    result = Bleu().compute(predictions=[hypothesis], references=[hypothesis], tokenize=tokenize)
    assert result["sys_len"] == result["ref_len"] == sys_len
    assert result["score"] == pytest.approx(100)
    assert f"tok:{tokenize}|" in result["signature"]


def test_bleu_ignores_case():
    settings = {"predictions": ["THE CAT SAT DOWN"], "references": ["the cat sat down"], "tokenize": "none"}
    assert Bleu().compute(**settings)["score"] == 0
    result = Bleu().compute(**settings, lowercase=True)
    assert result["score"] == pytest.approx(100)
    assert "case:lc|" in result["signature"]


def test_bleu_equals_sacrebleu_for_any_number_of_references():
    references = [[REFERENCES[0], HYPOTHESES[0]], [REFERENCES[1]], REFERENCES[2:4], ["nothing"], [REFERENCES[4]]]
    streams = [[texts[0] for texts in references], [texts[1] if len(texts) > 1 else None for texts in references]]
    ours = Bleu().compute(predictions=HYPOTHESES, references=references)
    theirs = sacrebleu.corpus_bleu(HYPOTHESES, streams)
    assert (ours["score"], ours["precisions"], ours["bp"]) == (theirs.score, theirs.precisions, theirs.bp)
    assert (ours["sys_len"], ours["ref_len"]) == (theirs.sys_len, theirs.ref_len)
    assert ours["signature"].startswith("nrefs:var|")


def test_bleu_equals_the_sacrebleu_command_on_tokenized_lower_case(tmp_path):
    hypotheses, references = HYPOTHESES * 30, REFERENCES * 30
    (tmp_path / "hypotheses").write_text("\n".join(hypotheses) + "\n", encoding="utf-8")
    (tmp_path / "references").write_text("\n".join(references) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", "hypotheses", "-w", "6"]
    command += ["--tokenize", "none", "--lowercase", "--metrics", "bleu"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    theirs = json.loads(run.stdout)
    ours = Bleu().compute(predictions=hypotheses, references=references, tokenize="none", lowercase=True)
    assert theirs["score"] == pytest.approx(ours["score"], abs=1e-6)
    assert theirs["signature"] == ours["signature"]


def test_bleu_does_not_warn_of_expected_tokenized_text(caplog):
    caplog.set_level("WARNING", logger="sacrebleu")
    sentences = ["A sentence ."] * 120
    Bleu().compute(predictions=sentences, references=sentences, tokenize="none")
    assert "forgot to detokenize" not in caplog.text
    Bleu().compute(predictions=sentences, references=sentences)
    assert "forgot to detokenize" in caplog.text


def test_added_examples_are_scored_together_and_once():
    metric = Bleu()
    metric.add(prediction=HYPOTHESES[0], reference=REFERENCES[0])
    metric.add_batch(predictions=HYPOTHESES[1:3], references=[[text] for text in REFERENCES[1:3]])
    assert len(metric) == 3
    together = metric.compute(predictions=HYPOTHESES[3:], references=REFERENCES[3:])
    assert together == Bleu().compute(predictions=HYPOTHESES, references=REFERENCES)
    assert len(metric) == 0
    assert metric.compute(predictions=["a b c d"], references=["a b c d"])["sys_len"] == 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"predictions": [], "references": []},
            ValueError,
            "`predictions` must have at least one hypothesis, got none",
        ),
        ({}, ValueError, "`predictions` must have .* got none"),
        ({"predictions": ["a"], "references": ["a", "b"]}, ValueError, "equal in number, got 1 and 2"),
        ({"predictions": [], "references": ["a", "b"]}, ValueError, "equal in number, got 0 and 2"),
        (
            {"predictions": ["a"], "references": [[]]},
            ValueError,
            "a reference for every .* none at index 0",
        ),
        ({"predictions": ["a"]}, TypeError, "`references` must be a list of strings .* got NoneType"),
        ({"predictions": "a", "references": ["a"]}, TypeError, "`predictions` must be a list of strings, got str"),
        ({"predictions": ["a"], "references": "a"}, TypeError, "`references` must be a list of strings .* got str"),
        (
            {"predictions": ["a", 7], "references": ["a", "b"]},
            TypeError,
            "must be strings, got int at index 1",
        ),
        ({"predictions": ["a"], "references": [["a", None]]}, TypeError, "`references` must be .* at index 0"),
        (
            {"predictions": ["a"], "references": ["a"], "tokenize": "words"},
            ValueError,
            "`tokenize` must be one of 13a, zh, none, char, intl, ja-mecab, .* got 'words'",
        ),
    ],
)
def test_bleu_names_bad_input(arguments, error, message):
    metric = Bleu()
    with pytest.raises(error, match=message):
        metric.compute(**arguments)
    assert metric.compute(predictions=["a b c d"], references=["a b c d"])["sys_len"] == 4


def test_bleu_writes_no_file(tmp_path):
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    metric = Bleu(cache_dir=str(not_a_folder))
    metric.add_batch(predictions=HYPOTHESES, references=REFERENCES)
    assert metric.compute()["sys_len"] == 20
    assert list(tmp_path.iterdir()) == [not_a_folder]


def test_bleu_loads_through_evaluate():
    metric = evaluate.load(str(Path(bleu.__file__)))
    assert metric.name == "bleu"
    result = metric.compute(predictions=HYPOTHESES, references=REFERENCES)
    assert result == Bleu().compute(predictions=HYPOTHESES, references=REFERENCES)
    assert not list(Path(evaluate.config.HF_METRICS_CACHE).glob("bleu/**/*.arrow*"))


TWO_PROCESSES = """
import sys
from hf_vanilla.metrics import Bleu
rank, cache_dir = int(sys.argv[1]), sys.argv[2]
alone = Bleu()
alone.add(prediction="a b c d", reference="a b c d")
print("holds an example", flush=True)
input()
print(alone.compute()["sys_len"])
shared = Bleu(num_process=2, process_id=rank, experiment_id="test", cache_dir=cache_dir)
result = shared.compute(predictions=["a b c d e"] * (rank + 1), references=["a b c d f"] * (rank + 1))
print(result and result["sys_len"])
"""


def test_two_processes_score_alone_and_together(tmp_path):
    home, exchange = tmp_path / "home", tmp_path / "exchange"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(rank), str(exchange)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HOME": str(home)},
        )
        for rank in range(2)
    ]
    assert [process.stdout.readline() for process in processes] == ["holds an example\n"] * 2
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[0] for process in processes] == ["4\n15\n", "4\nNone\n"]
    assert not list(tmp_path.glob("**/*.arrow"))
    assert not (home / "metrics").exists()
