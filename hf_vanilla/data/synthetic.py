"""Tasks that need no download: copying a sequence, and converting written dates to ISO 8601."""

import datetime
import random
from collections.abc import Iterable

import numpy as np
from datasets import Dataset

from ..models.checks import check_integer


# Two-digit years are unambiguous in this range: 50 to 99 are 1950 to 1999, 00 to 49 are 2000 to 2049.
FIRST_DAY = datetime.date(1950, 1, 1)
LAST_DAY = datetime.date(2049, 12, 31)
# The limit keeps rejection sampling fast: fewer than half of all texts are ever drawn.
MAX_DATES = 500_000

_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_SHORT_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_ROMAN_MONTHS = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ORDINAL_WORDS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
    "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth",
    "nineteenth", "twentieth", "twenty-first", "twenty-second", "twenty-third", "twenty-fourth", "twenty-fifth",
    "twenty-sixth", "twenty-seventh", "twenty-eighth", "twenty-ninth", "thirtieth", "thirty-first",
)  # fmt: skip

# No text is ambiguous: numbers with dots are day.month.year, with slashes or without separators year/month/day.
DATE_FORMATS = (
    "{month} {day}, {year}",
    "{month} {day} {year}",
    "{month} {ordinal}, {year}",
    "{month} the {ordinal}, {year}",
    "{month} the {ordinal_word}, {year}",
    "{short_month} {day}, {year}",
    "{short_month} {day}, '{short_year}",
    "{short_month}. {ordinal}, {year}",
    "{day} {month} {year}",
    "{day} {short_month} {year}",
    "{day} {short_month} {short_year}",
    "{day}. {month} {year}",
    "{day}-{short_month}-{year}",
    "{day:02}-{short_month}-{short_year}",
    "{ordinal} {month} {year}",
    "{ordinal} of {month} '{short_year}",
    "the {ordinal} of {month} {year}",
    "the {ordinal} of {short_month} {year}",
    "the {ordinal_word} of {month} {year}",
    "{weekday}, {day} {month} {year}",
    "{weekday}, {month} {ordinal}, {year}",
    "{weekday}, the {ordinal} of {month} {year}",
    "{short_weekday} {day} {short_month} {year}",
    "{short_weekday}, {short_month} {day}, '{short_year}",
    "{year}, {month} {ordinal}",
    "{year} {short_month} {day}",
    "{day:02}.{month_number:02}.{year}",
    "{day}.{month_number}.{year}",
    "{day}.{month_number}.{short_year}",
    "{day}.{roman_month}.{year}",
    "{year}/{month_number}/{day}",
    "{year}/{month_number:02}/{day:02}",
    "{year}{month_number:02}{day:02}",
    "{year}年{month_number}月{day}日",
)


def copy_task(num_examples: int, *, vocab_size: int = 11, length: int = 10, seed: int = 0) -> Dataset:
    """Draw random sequences for the copy task, a first test of a sequence-to-sequence model.

    A sequence is `length` ids from 1 to `vocab_size - 1`, the first of them 1; id 0 is padding. There is no end token,
    as the length is fixed. `labels` is the sequence from its second id on. So with `decoder_start_token_id=1` the
    decoder reads the first `length - 1` ids and predicts the last `length - 1`, and `generate` returns the source:

    ```python
    config = VanillaTransformerConfig(vocab_size=11, pad_token_id=0, eos_token_id=None, decoder_start_token_id=1)
    copied = model.generate(input_ids, max_new_tokens=length - 1)
    (copied == input_ids).all()
    ```

    All sequences have the same length, so `transformers.default_data_collator` makes batches without a tokenizer.

    Args:
        num_examples (`int`): Number of sequences, drawn independently, so some may be equal.
        vocab_size (`int`): Number of ids, padding included.
        length (`int`): Ids of a sequence.
        seed (`int`): Seed of the sequences.

    Returns:
        `Dataset` with `input_ids` and `attention_mask` of `length`, and `labels` of `length - 1` ids.

    Raises:
        ValueError: if `num_examples` or `seed` is negative, `vocab_size` is below 2 or `length` is below 2.

    Source: Rush 2018, The Annotated Transformer, "Synthetic Data" (vocabulary 11, length 10).
    """
    check_integer("num_examples", num_examples, 0)
    check_integer("seed", seed, 0)
    check_integer("vocab_size", vocab_size, 2)
    check_integer("length", length, 2)
    sequences = np.random.default_rng(seed).integers(1, vocab_size, size=(num_examples, length))
    sequences[:, :1] = 1
    return Dataset.from_dict(
        {
            "input_ids": sequences.tolist(),
            "attention_mask": np.ones_like(sequences).tolist(),
            "labels": sequences[:, 1:].tolist(),
        }
    )


def date_corpus(num_examples: int, *, seed: int = 0, exclude: Iterable[str] = ()) -> Dataset:
    """Draw dates in many written forms, each with its ISO 8601 form.

    `"March 3rd, 1998"`, `"3 Mar 98"`, `"Tuesday, the 3rd of March 1998"`, `"3.3.1998"`, `"1998/3/3"`,
    `"1998年3月3日"` and the like, some in lower or upper case, all mean `1998-03-03`. The dates are those of 1950 to
    2049. No text is ambiguous: dots separate day.month.year, slashes year/month/day, and two-digit years from 50 are
    of the 20th century, others of the 21st. No text occurs twice.

    A held-out set without the texts of the training set:

    ```python
    train = date_corpus(20_000)
    test = date_corpus(1_000, seed=1, exclude=train["source"])
    ```

    Args:
        num_examples (`int`): Number of pairs, at most 500,000 together with those of `exclude`.
        seed (`int`): Seed of the dates and their forms.
        exclude (`Iterable[str]`): Texts to leave out.

    Returns:
        `Dataset` with the string columns `source` and `target`.

    Raises:
        ValueError: if `num_examples` or `seed` is negative, or the limit is exceeded.
        TypeError: if `exclude` is a single string.
    """
    check_integer("num_examples", num_examples, 0)
    check_integer("seed", seed, 0)
    if isinstance(exclude, str):
        raise TypeError("`exclude` must be an iterable of strings, got a single string.")
    seen = set(exclude)
    if num_examples + len(seen) > MAX_DATES:
        raise ValueError(
            f"`num_examples` ({num_examples}) and the texts of `exclude` ({len(seen)}) must be at most {MAX_DATES} "
            "together; lower `num_examples`."
        )
    generator = random.Random(seed)
    days = (LAST_DAY - FIRST_DAY).days + 1
    sources: list[str] = []
    targets: list[str] = []
    while len(sources) < num_examples:
        date = FIRST_DAY + datetime.timedelta(days=generator.randrange(days))
        text = write_date(date, generator.choice(DATE_FORMATS))
        case = generator.randrange(8)
        text = text.lower() if case == 0 else text.upper() if case == 1 else text
        if text not in seen:
            seen.add(text)
            sources.append(text)
            targets.append(date.isoformat())
    return Dataset.from_dict({"source": sources, "target": targets})


def write_date(date: datetime.date, date_format: str) -> str:
    """Write a date in one of the formats of the corpus.

    Args:
        date (`datetime.date`): The date.
        date_format (`str`): One of `DATE_FORMATS`.

    Returns:
        `str`: the text.
    """
    weekday = _WEEKDAYS[date.weekday()]
    return date_format.format(
        day=date.day,
        ordinal=_ordinal(date.day),
        ordinal_word=_ORDINAL_WORDS[date.day - 1],
        month=_MONTHS[date.month - 1],
        short_month=_SHORT_MONTHS[date.month - 1],
        month_number=date.month,
        roman_month=_ROMAN_MONTHS[date.month - 1],
        year=date.year,
        short_year=f"{date.year % 100:02}",
        weekday=weekday,
        short_weekday=weekday[:3],
    )


def _ordinal(number: int) -> str:
    """Return the ordinal of a day: 1st, 2nd, 11th."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}th" if 11 <= number <= 13 else f"{number}{ending}"
