import sys

import pytest
import sacrebleu

from hf_vanilla.metrics import bleu, comet_score, corpus_scores


REFERENCES = ["a b c d e f", "the cat sat on the mat", "g h i j", "we like to read books", "x y z"] * 4
GOOD = ["a b c d e f", "the cat sat on a mat", "g h i j", "we like to read", "x y"] * 4
BAD = ["a b d c", "cat mat the", "g j", "read we books to", "z"] * 4


def test_scores_and_signatures_are_sacrebleus():
    scores = corpus_scores(GOOD, REFERENCES, metrics=["bleu", "chrf", "chrf++", "ter"], tokenize="none")
    assert scores["bleu"] == round(sacrebleu.corpus_bleu(GOOD, [REFERENCES], tokenize="none", force=True).score, 2)
    assert scores["chrf"] == round(sacrebleu.corpus_chrf(GOOD, [REFERENCES]).score, 2)
    assert scores["chrf++"] == round(sacrebleu.corpus_chrf(GOOD, [REFERENCES], word_order=2).score, 2)
    assert scores["ter"] == round(sacrebleu.corpus_ter(GOOD, [REFERENCES]).score, 2)
    assert "nw:2" in scores["chrf++_signature"]
    assert not any(key.endswith(("mean", "p_value")) for key in scores)


def test_ter_ignores_case_as_sacrebleus_does():
    assert corpus_scores([text.upper() for text in REFERENCES], REFERENCES, metrics=["ter"])["ter"] == 0


def test_equal_translations_are_no_difference():
    scores = corpus_scores(GOOD, REFERENCES, metrics=["chrf"], bootstrap_samples=20, baseline=list(GOOD))
    assert scores["chrf_p_value"] == 1


def test_a_baseline_is_compared_by_paired_bootstrap():
    scores = corpus_scores(GOOD, REFERENCES, metrics=["chrf"], bootstrap_samples=50, baseline=BAD)
    assert scores["chrf"] == corpus_scores(GOOD, REFERENCES)["chrf"]
    assert scores["baseline_chrf"] == corpus_scores(BAD, REFERENCES)["chrf"]
    assert scores["chrf_p_value"] == pytest.approx(1 / 51, abs=1e-4)  # none of 50 samples has so large a difference
    alone = corpus_scores(GOOD, REFERENCES, metrics=["chrf"], bootstrap_samples=50)
    assert abs(alone["chrf_mean"] - alone["chrf"]) < alone["chrf_interval"]
    assert "bs:50|seed:12345" in alone["chrf_signature"]
    assert scores["chrf_signature"] == alone["chrf_signature"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["rouge"]}, "`metrics` must be among bleu, .* got 'rouge'"),
        ({"baseline": BAD}, "`bootstrap_samples` must be at least 2, got 0"),
        ({"baseline": BAD, "bootstrap_samples": 1}, "`bootstrap_samples` must be at least 2, got 1"),
        ({"bootstrap_samples": 1}, "`bootstrap_samples` must be 0, for none, or at least 2, got 1"),
        ({"bootstrap_samples": -1}, "`bootstrap_samples` must be 0, for none, or at least 2, got -1"),
        ({"baseline": BAD[1:], "bootstrap_samples": 9}, "`baseline` must be as many as `references` .20., got 19"),
        ({"tokenize": "words"}, "`tokenize` must be one of 13a, .* ja-mecab, .* got 'words'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        corpus_scores(GOOD, REFERENCES, **options)


def test_missing_packages_are_named(monkeypatch):
    def fails(**settings):
        raise RuntimeError("pip install sacrebleu[ja]")

    monkeypatch.setattr(bleu, "BLEU", fails)
    with pytest.raises(ImportError, match=r'ja-mecab needs .* pip install "sacrebleu\[ja\]"'):
        corpus_scores(GOOD, REFERENCES, tokenize="ja-mecab")
    monkeypatch.delitem(sys.modules, "comet", raising=False)
    with pytest.raises(ImportError, match="pip install unbabel-comet"):
        comet_score(["x"], ["y"], ["z"])
