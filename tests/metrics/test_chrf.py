import pytest
import sacrebleu

from hf_vanilla.metrics import ChrF


HYPOTHESES = ["The cat sat on the mat.", "我爱你", "", "Grüße aus Wien"]
REFERENCES = ["the cat sits on a mat.", "我很爱你", "not empty", "Gruß aus Wien"]


@pytest.mark.parametrize(("beta", "score"), [(1, 200 / 3), (2, 100 * 2.5 / 4.5)])
def test_chrf_by_hand(beta, score):
    # Single characters: all 2 of the hypothesis match, and they are 2 of 4 in the reference.
    result = ChrF().compute(predictions=["ab"], references=["abcd"], char_order=1, beta=beta)
    assert result["score"] == pytest.approx(score)
    assert (result["char_order"], result["word_order"], result["beta"]) == (1, 0, beta)


def test_words_count_in_chrf_plus_plus():
    # "dc" has the reference's characters and not its words: the mean of 1 (characters) and 0 (words).
    result = ChrF().compute(predictions=["d c"], references=["dc"], char_order=1, word_order=1)
    assert result["score"] == pytest.approx(50)


@pytest.mark.parametrize("word_order", [0, 2], ids=["chrF", "chrF++"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_chrf_equals_sacrebleu(word_order, lowercase):
    references = [[text, hypothesis.upper()] for text, hypothesis in zip(REFERENCES, HYPOTHESES, strict=True)]
    ours = ChrF().compute(predictions=HYPOTHESES, references=references, word_order=word_order, lowercase=lowercase)
    theirs = sacrebleu.metrics.CHRF(word_order=word_order, lowercase=lowercase)
    assert ours["score"] == theirs.corpus_score(HYPOTHESES, list(zip(*references, strict=True))).score
    assert ours["signature"] == str(theirs.get_signature())


def test_single_reference_can_be_a_string():
    ours = ChrF().compute(predictions=HYPOTHESES, references=REFERENCES)
    assert ours == ChrF().compute(predictions=HYPOTHESES, references=[[text] for text in REFERENCES])
    assert ours["score"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"word_order": -1}, "`word_order` must be at least 0, got -1"),
        ({"char_order": 0}, "`char_order` must be at least 1, got 0"),
        ({"beta": 0}, "`beta` must be at least 1, got 0"),
    ],
)
def test_chrf_names_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ChrF().compute(predictions=["a"], references=["a"], **settings)


def test_chrf_names_unequal_numbers():
    with pytest.raises(ValueError, match="equal in number, got 2 and 1"):
        ChrF().compute(predictions=["a", "b"], references=["a"])
