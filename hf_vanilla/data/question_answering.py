"""Question answering: reading questions from files, tokenizing them into windows, and decoding answers."""

import json
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..models.answering import MAX_ANSWER_LENGTH, N_BEST, Answer, best_answers, tokenize_windows
from .files import check_text, existing_path, iterate_lines, quoted, read_json_objects, read_parquet, suffix_of


# Categories of Unicode, of letters which tokenizers may drop: controls, format marks, unassigned and private letters,
# combining marks, white space. They also drop the mark of bytes that could not be read.
WITHOUT_TOKENS = ("Cc", "Cf", "Cn", "Co", "Mn", "Zl", "Zp", "Zs")
REPLACEMENT = "\ufffd"
QUESTION_COLUMNS = ("id", "question", "context", "answers")


def load_questions(
    source: str | os.PathLike[str] | Dataset,
    columns: Mapping[str, str | None] | None = None,
    where: str | None = None,
) -> Dataset:
    """Load questions in one of SQuAD's forms, and check that every answer is in its context.

    - The official JSON file, `{"data": [article, ...]}`, or one article per line:
      `{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [{"text": ...,
      "answer_start": ...}]}]}]}`.
    - One question per row, as on the Hub: `id`, `question`, `context` and `answers`, which is
      `{"text": [...], "answer_start": [...]}`. Without an `id`, the numbers of the rows are the ids.

    Args:
        source (`str` or `Dataset`): A `.json`, `.jsonl` or `.parquet` file; the first two may end in `.gz`. Or a
            dataset with one question per row.
        columns (`Mapping[str, str | None]`, *optional*): The columns of such rows by `id_column`, `question_column`,
            `context_column` and `answers_column`, where they have other names than these.
        where (`str`, *optional*): Name of a dataset, for messages.

    Returns:
        `Dataset`: with `id`, `question`, `context` and `answers` as on the Hub. An unanswerable question has no
        answers.

    Raises:
        ValueError: if the file has another format, has no question, an id occurs twice, or an answer is not in its
            context at its `answer_start`; the question is named.
        TypeError: if id, question or context is not a string.
        FileNotFoundError: if there is no such file.
    """
    name_of_source = (where or "the dataset") if isinstance(source, Dataset) else existing_path(source, "path")
    given = {name: (columns or {}).get(f"{name}_column") for name in QUESTION_COLUMNS}
    found: dict[str, list[Any]] = {name: [] for name in QUESTION_COLUMNS}
    known: set[str] = set()
    for number, (place, fields) in enumerate(_read_questions(source, name_of_source), start=1):
        row = _question_of_row(fields, given, number, place)
        if row["id"] in known:
            raise ValueError(f"{place}: the ids of questions must be unique, but {quoted(row['id'])} occurs twice.")
        known.add(row["id"])
        _check_answers(row, place)
        for name in QUESTION_COLUMNS:
            found[name].append(row[name])
    if not known:
        raise ValueError(f"{name_of_source} must have at least one question, but has none.")
    return Dataset.from_dict(found)


def tokenize_questions(
    questions: Dataset, tokenizer: PreTrainedTokenizerBase, *, max_length: int = 384, doc_stride: int = 128
) -> Dataset:
    """Tokenize each question with its context; long contexts become overlapping windows.

    Args:
        questions (`Dataset`): As [`load_questions`] returns them.
        tokenizer (`PreTrainedTokenizerBase`): A fast tokenizer.
        max_length (`int`): Most tokens of question and window.
        doc_stride (`int`): Tokens that neighbouring windows share, as transformers' `stride`. (In the authors' code it
            is the distance between the starts of windows.)

    Returns:
        `Dataset`: a row for each window: the model's inputs; `start_positions` and `end_positions` of the first
        answer's tokens, both 0 (`[CLS]`) if the window does not have the whole answer; `example`, the index of its
        question; `offset_mapping`, the characters of each token of the context, -1 for all other tokens.

    Raises:
        ValueError: if a question and the overlap leave no room for the context; the question is named.

    Source: Devlin et al. 2018, 4.2 and 4.3.
    """
    columns = tokenize_windows(
        questions["question"][:],
        questions["context"][:],
        tokenizer,
        max_length=max_length,
        doc_stride=doc_stride,
        names=questions["id"][:],
    )
    answers = questions["answers"][:]
    offsets = [np.asarray(spans, np.int32) for spans in columns.pop("offset_mapping")]
    positions = [
        _answer_positions(answers[example], spans) for example, spans in zip(columns["example"], offsets, strict=True)
    ]
    return Dataset.from_dict(
        {
            **columns,
            "start_positions": [start for start, _ in positions],
            "end_positions": [end for _, end in positions],
            "offset_mapping": offsets,
        }
    )


def find_answers(
    questions: Dataset,
    windows: Dataset,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    *,
    n_best: int = N_BEST,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    with_no_answer: bool = False,
    no_answer_threshold: float = 0.0,
) -> dict[str, list[Answer]]:
    """Find the best answers to each question over all windows of its context.

    Args:
        questions (`Dataset`): The questions.
        windows (`Dataset`): Their windows, as [`tokenize_questions`] returns them.
        start_logits (`np.ndarray` of shape `(windows, length)`): For each token, that the answer starts with it.
            Padding after the end of a window is ignored.
        end_logits (`np.ndarray` of shape `(windows, length)`): The same for the end of the answer.
        n_best (`int`): Most answers to a question.
        max_answer_length (`int`): Most tokens of an answer.
        with_no_answer (`bool`): Whether "no answer" is a possible answer. Its score is that of `[CLS]` in the window
            where it is lowest.
        no_answer_threshold (`float`): How much higher than the best answer's score that of "no answer" must be for it
            to come first.

    Returns:
        `dict[str, list[Answer]]`: for each question's id at least one answer, best first.

    Raises:
        ValueError: if there are not as many logits as windows, or a limit is below 1.

    Source: Devlin et al. 2018, 4.2 and 4.3.
    """
    for name, logits in (("start_logits", start_logits), ("end_logits", end_logits)):
        if len(logits) != len(windows):
            raise ValueError(f"`{name}` must have a row for each of the {len(windows)} windows, got {len(logits)}.")
    of_each: list[list[int]] = [[] for _ in range(len(questions))]
    for window, example in enumerate(windows["example"][:]):
        of_each[example].append(window)
    spans = windows.select_columns(["offset_mapping"]).with_format("numpy")
    return {
        identity: best_answers(
            context,
            ((start_logits[window], end_logits[window], spans[window]["offset_mapping"]) for window in numbers),
            n_best=n_best,
            max_answer_length=max_answer_length,
            with_no_answer=with_no_answer,
            no_answer_threshold=no_answer_threshold,
        )
        for identity, context, numbers in zip(questions["id"][:], questions["context"][:], of_each, strict=True)
    }


def _question_of_row(
    fields: Mapping[str, Any], given: Mapping[str, str | None], number: int, place: str
) -> dict[str, Any]:
    """Return `id`, `question`, `context` and `answers` of a row."""
    row = {}
    for name, column in given.items():
        row[name] = fields.get(column or name)
        if name == "id" and column is None and "id" not in fields:
            row[name] = str(number)
        if row[name] is None:
            raise ValueError(
                f"{place}: a question must have {', '.join(QUESTION_COLUMNS)}; {column or name!r} is missing. There "
                f"is {', '.join(map(repr, fields))}; --{name}_column names another column."
            )
        if name != "answers":
            check_text(row[name], f"{place}: `{name}_column`")
    return row


def _read_questions(source: str | os.PathLike[str] | Dataset, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, question) of any form."""
    table = source if isinstance(source, Dataset) else None
    suffix = suffix_of(path)
    if table is None and suffix not in (".json", ".jsonl", ".parquet"):
        raise ValueError(f"{path} must end in .json, .jsonl (or these and .gz) or .parquet.")
    if table is None and suffix == ".parquet":
        table = read_parquet(path)
    if table is not None:
        for number, row in enumerate(table, start=1):
            yield f"{path}, row {number}", row
        return
    for where, row in _read_official_file(path) if suffix == ".json" else _read_objects(path):
        if "paragraphs" not in row:
            yield where, row
            continue
        try:
            questions = _questions_of(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{where}: an article must have `paragraphs`, each with `context` and `qas`, and each of those with "
                f"`id`, `question` and `answers`, as in SQuAD's files; {type(error).__name__}: {error}."
            ) from None
        yield from ((f"{where}, question {quoted(question['id'])}", question) for question in questions)


def _questions_of(article: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the questions of an article, one row each."""
    return [
        {
            "id": question["id"],
            "question": question["question"],
            "context": paragraph["context"],
            "answers": {name: [answer[name] for answer in question["answers"]] for name in ("text", "answer_start")},
        }
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def _read_objects(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for _, where, row in read_json_objects(path):
        yield where, row


def _read_official_file(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the articles of `{"data": [...]}`; a .json file may also be like a .jsonl one."""
    try:
        whole = json.loads("".join(iterate_lines(path)))
    except (ValueError, RecursionError):  # the other reader names the line
        whole = None
    if not isinstance(whole, dict) or not isinstance(whole.get("data"), list):
        yield from _read_objects(path)
        return
    for number, article in enumerate(whole["data"], start=1):
        if not isinstance(article, dict):
            raise ValueError(f"{path}, article {number}: must be a JSON object, got {type(article).__name__}.")
        yield f"{path}, article {number}", article


def _check_answers(row: Mapping[str, Any], where: str) -> None:
    """Raise if an answer is not in the context at its `answer_start`."""
    answers = row["answers"]
    texts, starts = (answers.get(name) if isinstance(answers, dict) else None for name in ("text", "answer_start"))
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise ValueError(
            f"{where}: `answers` must have two lists, `text` and as many numbers in `answer_start`; got "
            f"{quoted(answers)}."
        )
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or not isinstance(start, int):
            raise ValueError(
                f"{where}: an answer must have a string as `text` and a whole number as `answer_start`, got "
                f"{quoted(text)} and {quoted(start)}."
            )
        there = row["context"][max(start, 0) : start + len(text)]
        if not text or there != text:
            raise ValueError(
                f"{where}: an answer must be in its context at `answer_start`, but {quoted(text)} is not "
                f"at {start}; there is {quoted(there)}."
            )


def _answer_positions(answers: Mapping[str, Sequence[Any]], spans: np.ndarray) -> tuple[int, int]:
    """Return the first and last token of the first answer, or (0, 0) if the window does not have all of it."""
    if not answers["text"]:
        return 0, 0
    text = answers["text"][0]
    # These letters may have no token, so at the edge of a context no window would have all of " Ben".
    kept = [
        number
        for number, letter in enumerate(text)
        if letter != REPLACEMENT and unicodedata.category(letter) not in WITHOUT_TOKENS
    ]
    first, last = (kept[0], kept[-1]) if kept else (0, len(text) - 1)
    start, end = (answers["answer_start"][0] + place for place in (first, last + 1))
    tokens = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < end) & (spans[:, 0] >= 0))
    context = np.flatnonzero(spans[:, 0] >= 0)
    if len(tokens) == 0 or spans[context[0], 0] > start or spans[context[-1], 1] < end:
        return 0, 0
    return int(tokens[0]), int(tokens[-1])
