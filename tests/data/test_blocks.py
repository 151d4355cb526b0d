"""Blocks of running text: their tokens, across and within documents, as table and as stream, and as batches."""

import itertools

import pytest
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

from hf_vanilla.data import build_blocks, collate_blocks
from hf_vanilla.data.tokenization import train_gpt_tokenizer


TEXTS = ["the cat sat on the mat", "a <|endoftext|> b", "dogs\n\nbark at the cat"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_gpt_tokenizer(TEXTS, 280, show_progress=False)


@pytest.fixture(params=["table", "stream"])
def documents(request):
    table = Dataset.from_dict({"text": TEXTS, "id": [3, 4, 5]})
    return table if request.param == "table" else table.to_iterable_dataset()


def tokens_of(text, tokenizer):
    return [tokenizer.eos_token_id, *tokenizer(text, split_special_tokens=True)["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize("keep_short", [False, True])
@pytest.mark.parametrize("across_documents", [True, False], ids=["across", "separate"])
def test_blocks_are_the_text_cut(documents, tokenizer, across_documents, keep_short):
    blocks = build_blocks(
        documents, tokenizer, block_length=7, across_documents=across_documents, keep_short=keep_short
    )
    assert type(blocks) is type(documents)
    pieces = [tokens_of(text, tokenizer) for text in TEXTS]
    if across_documents:
        pieces = [[*pieces[0], *pieces[1][1:], *pieces[2][1:]]]
    expected = [piece[start : start + 7] for piece in pieces for start in range(0, len(piece), 7)]
    expected = [block for block in expected if len(block) == 7 or (keep_short and len(block) > 1)]
    assert len({len(block) for block in expected}) == 1 + keep_short
    for _ in range(2):  # a stream is read again in every epoch
        assert [row["input_ids"] for row in blocks] == expected


def test_stream_of_several_shards_is_whole_in_workers(tokenizer):
    stream = Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(num_shards=3)
    for some in (stream, stream.take(2)):
        expected = build_blocks(Dataset.from_list(list(some)), tokenizer, block_length=7)["input_ids"][:]
        loaded = DataLoader(build_blocks(some, tokenizer, block_length=7), batch_size=None, num_workers=2)
        assert [list(row["input_ids"]) for row in loaded] == expected


def test_table_is_cached_until_a_setting_changes(tmp_path, tokenizer):
    Dataset.from_dict({"text": TEXTS}).to_parquet(tmp_path / "a.parquet")
    table = Dataset.from_parquet(str(tmp_path / "a.parquet"), cache_dir=str(tmp_path))
    first, again, other = (build_blocks(table, tokenizer, block_length=length) for length in (7, 7, 5))
    tokenizer(TEXTS, padding=True, truncation=True)  # changes the tokenizer's state
    assert first.cache_files == again.cache_files == build_blocks(table, tokenizer, block_length=7).cache_files
    assert other.cache_files != first.cache_files
    assert len(other[0]["input_ids"]) == 5


def test_collators_label_every_token(tokenizer):
    rows = list(build_blocks(Dataset.from_dict({"text": TEXTS}), tokenizer, block_length=7))
    stock = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    batch = collate_blocks(rows)
    assert batch.keys() == {"input_ids", "labels"}
    assert all(batch[name].equal(stock[name]) for name in batch)
    assert (batch["labels"] == tokenizer.eos_token_id).any()  # the end of a text is learnt
    with pytest.raises(ValueError, match=r"`examples` must be blocks of one length, got lengths from 3 to 7; use"):
        collate_blocks([*rows, {"input_ids": [1, 2, 3]}])


def test_documents_of_special_tokens_stay_text(tokenizer):
    blocks = build_blocks(Dataset.from_dict({"text": TEXTS[1:2]}), tokenizer, keep_short=True)
    ids = list(itertools.chain.from_iterable(row["input_ids"] for row in blocks))
    assert ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(ids[1:-1]) == TEXTS[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_length": 1}, r"`block_length` must be between 2 and .* \(512\), got 1"),
        ({"block_length": 513}, "got 513"),
        ({"block_length": 500}, r"`documents` must fill at least one block of `block_length` \(500\) tokens"),
    ],
)
def test_bad_settings_are_named(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        build_blocks(Dataset.from_dict({"text": TEXTS}), tokenizer, **options)


def test_what_does_not_fit_is_refused(tokenizer):
    stream = IterableDataset.from_generator(lambda: iter([{"text": "a"}]))
    with pytest.raises(ValueError, match="`num_proc` is not for streaming data"):
        build_blocks(stream, tokenizer, num_proc=2)
    without_end = train_gpt_tokenizer(TEXTS, 260, show_progress=False)
    without_end.eos_token = None
    with pytest.raises(ValueError, match="`tokenizer` must have an `eos_token`"):
        build_blocks(stream, without_end)
