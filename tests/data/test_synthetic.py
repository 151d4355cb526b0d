import datetime
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import default_data_collator

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.data import synthetic
from hf_vanilla.data.synthetic import copy_task, date_corpus


DAYS = (datetime.date(2049, 12, 31) - datetime.date(1950, 1, 1)).days + 1


def written(date: datetime.date) -> list[str]:
    return [synthetic.write_date(date, date_format) for date_format in synthetic.DATE_FORMATS]


def test_copy_task_is_that_of_the_annotated_transformer() -> None:
    examples = copy_task(600, seed=3)
    assert examples.column_names == ["input_ids", "attention_mask", "labels"]
    assert len(examples) == 600
    assert set(map(len, examples["input_ids"])) == {10}
    assert {ids[0] for ids in examples["input_ids"]} == {1}
    assert {index for ids in examples["input_ids"] for index in ids} == set(range(1, 11))
    assert {mask for row in examples["attention_mask"] for mask in row} == {1}


def test_start_token_and_labels_form_the_source() -> None:
    for example in copy_task(20, vocab_size=7, length=5):
        assert [1, *example["labels"]] == example["input_ids"]


def test_generate_returns_the_copied_sequence() -> None:
    config = VanillaTransformerConfig(
        vocab_size=7, d_model=8, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1,
    )  # fmt: skip
    model = VanillaTransformerForConditionalGeneration(config).eval()
    batch = default_data_collator(list(copy_task(3, vocab_size=7, length=5)))
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    assert decoder_input_ids.tolist() == batch["input_ids"][:, :-1].tolist()
    copied = model.generate(batch["input_ids"], max_new_tokens=4)
    assert copied.shape == batch["input_ids"].shape
    assert copied[:, 0].tolist() == [1, 1, 1]


def test_copy_task_depends_on_the_seed_alone() -> None:
    assert copy_task(5, seed=1)["input_ids"][:] == copy_task(5, seed=1)["input_ids"][:]
    assert copy_task(5, seed=1)["input_ids"][:] != copy_task(5, seed=2)["input_ids"][:]


def test_formats_of_one_date() -> None:
    assert written(datetime.date(1998, 3, 3)) == [
        "March 3, 1998",
        "March 3 1998",
        "March 3rd, 1998",
        "March the 3rd, 1998",
        "March the third, 1998",
        "Mar 3, 1998",
        "Mar 3, '98",
        "Mar. 3rd, 1998",
        "3 March 1998",
        "3 Mar 1998",
        "3 Mar 98",
        "3. March 1998",
        "3-Mar-1998",
        "03-Mar-98",
        "3rd March 1998",
        "3rd of March '98",
        "the 3rd of March 1998",
        "the 3rd of Mar 1998",
        "the third of March 1998",
        "Tuesday, 3 March 1998",
        "Tuesday, March 3rd, 1998",
        "Tuesday, the 3rd of March 1998",
        "Tue 3 Mar 1998",
        "Tue, Mar 3, '98",
        "1998, March 3rd",
        "1998 Mar 3",
        "03.03.1998",
        "3.3.1998",
        "3.3.98",
        "3.III.1998",
        "1998/3/3",
        "1998/03/03",
        "19980303",
        "1998年3月3日",
    ]


@pytest.mark.parametrize(
    ("date", "texts"),
    [
        ("2012-10-11", {"11th October 2012", "the eleventh of October 2012", "11.10.12", "11.X.2012", "20121011"}),
        ("2049-12-31", {"December 31st, 2049", "December the thirty-first, 2049", "31 Dec 49", "Fri 31 Dec 2049"}),
        ("1950-01-02", {"2nd January 1950", "Monday, January 2nd, 1950", "02-Jan-50", "1950/1/2"}),
        ("2000-02-29", {"29 Feb 00", "Feb 29, '00", "29.2.00", "29. February 2000"}),
        ("1977-08-22", {"22nd August 1977", "the twenty-second of August 1977", "22.VIII.1977", "1977年8月22日"}),
        ("2013-06-13", {"13th June 2013", "the thirteenth of June 2013"}),
        ("2023-05-23", {"23rd May 2023", "May. 23rd, 2023"}),
        ("1971-09-21", {"21st September 1971", "Sep 21, 1971"}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_formats_of_other_dates(date: str, texts: set[str]) -> None:
    assert texts <= set(written(datetime.date.fromisoformat(date)))


@settings(max_examples=300, deadline=None, database=None)
@given(first=st.dates(synthetic.FIRST_DAY, synthetic.LAST_DAY), data=st.data())
def test_texts_of_different_dates_differ(first: datetime.date, data: st.DataObject) -> None:
    # Dates whose parts look alike are where numerals could be mixed up.
    parts = sorted({first.day, first.month, first.year % 100, 1, 12} & set(range(1, 13)))
    years = [1900 + part if part >= 50 else 2000 + part for part in (first.day, first.month, first.year % 100)]
    second = datetime.date(
        data.draw(st.sampled_from(years)), data.draw(st.sampled_from(parts)), data.draw(st.sampled_from(parts))
    )
    if first != second:
        assert not {text.lower() for text in written(first)} & {text.lower() for text in written(second)}


@pytest.mark.slow
def test_no_text_of_any_date_is_ambiguous() -> None:
    meaning: dict[str, datetime.date] = {}
    for offset in range(DAYS):
        date = synthetic.FIRST_DAY + datetime.timedelta(days=offset)
        for text in written(date):
            for variant in (text, text.lower(), text.upper()):
                assert meaning.setdefault(variant, date) == date
    assert len(meaning) > 2 * synthetic.MAX_DATES


def test_date_corpus_is_varied_and_correct() -> None:
    corpus = date_corpus(3000, seed=5)
    assert corpus.column_names == ["source", "target"]
    assert len(set(corpus["source"])) == 3000
    for example in corpus:
        date = datetime.date.fromisoformat(example["target"])
        assert example["target"] == date.isoformat()
        assert example["source"].lower() in {text.lower() for text in written(date)}
    years = {target[:4] for target in corpus["target"]}
    assert years == {str(year) for year in range(1950, 2050)}
    shapes = {re.sub(r"\d+", "9", source) for source in corpus["source"]}
    assert {"9.9.9", "9/9/9", "9", "9年9月9日"} <= shapes
    assert any(source.islower() for source in corpus["source"])
    assert any(source.isupper() for source in corpus["source"])


def test_held_out_dates_share_no_text() -> None:
    train = date_corpus(2000, seed=0)
    test = date_corpus(2000, seed=0, exclude=train["source"])
    assert not set(train["source"]) & set(test["source"])
    assert len(set(test["source"])) == 2000


def test_date_corpus_depends_on_the_seed_alone() -> None:
    assert date_corpus(50, seed=1).to_list() == date_corpus(50, seed=1).to_list()
    assert date_corpus(50, seed=1).to_list() != date_corpus(50, seed=2).to_list()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: copy_task(-1), ValueError, "`num_examples` must be at least 0, got -1"),
        (lambda: copy_task(1, seed=-2), ValueError, "`seed` must be at least 0, got -2"),
        (lambda: copy_task(1, vocab_size=1), ValueError, "`vocab_size` must be at least 2, got 1"),
        (lambda: copy_task(1, length=1), ValueError, "`length` must be at least 2, got 1"),
        (lambda: date_corpus(-1), ValueError, "`num_examples` must be at least 0, got -1"),
        (lambda: date_corpus(1, seed=-2), ValueError, "`seed` must be at least 0, got -2"),
        (lambda: date_corpus(1, exclude="1998"), TypeError, "`exclude` must be an iterable of strings, got a single"),
        (
            lambda: date_corpus(499_999, exclude=["a", "b"]),
            ValueError,
            r"`num_examples` \(499999\) and the texts of `exclude` \(2\) must be at most 500000 together",
        ),
    ],
    ids=["number", "seed", "vocabulary", "length", "date_number", "date_seed", "string", "too_many"],
)
def test_bad_input_is_named(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_zero_examples_give_an_empty_dataset() -> None:
    assert len(copy_task(0)) == len(date_corpus(0)) == 0
