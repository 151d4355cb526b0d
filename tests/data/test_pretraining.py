"""Pairs and masks: statistics over 10,000 examples, inputs of the model, and reproducibility."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, DataCollatorForTokenClassification

from hf_vanilla.data import (
    ShiftedPositionsCollator,
    WholeWordMaskingCollator,
    build_masked_language_dataset,
    build_pretraining_dataset,
    mask_statically,
)
from hf_vanilla.data.tokenization import train_gpt_tokenizer, train_wordpiece_tokenizer


WORDS = [f"w{number}" for number in range(2500)]
LENGTH = 32


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece_tokenizer(WORDS * 3, 4000, show_progress=False)


def corpus(documents=600, seed=0):
    """Documents of one repeated word each: every token identifies its document."""
    generator = np.random.default_rng(seed)
    texts = []
    for number in range(documents):
        sentences = [" ".join([WORDS[number]] * generator.integers(3, 12)) for _ in range(generator.integers(1, 60))]
        texts.append("\n".join(sentences))
    return Dataset.from_dict({"text": texts})


@pytest.fixture(scope="module")
def pairs(tokenizer):
    dataset = build_pretraining_dataset(corpus(), tokenizer, max_length=LENGTH, repeats=3)
    assert len(dataset) > 10_000
    return dataset


def segments(row):
    """Tokens of A and of B, without the special ones."""
    columns = zip(row["input_ids"], row["token_type_ids"], row["special_tokens_mask"], strict=True)
    ordinary = [(token, segment) for token, segment, special in columns if not special]
    return [[token for token, segment in ordinary if segment == wanted] for wanted in (0, 1)]


def words_of(tokens, tokenizer):
    return set(tokenizer.decode(tokens).split())


def test_pair_has_the_inputs_of_the_model(pairs, tokenizer):
    for row in pairs.select(range(200)):
        first, second = segments(row)
        assert first
        assert second
        assert row["input_ids"] == [2, *first, 3, *second, 3]
        assert row["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
        assert row["special_tokens_mask"] == [1, *[0] * len(first), 1, *[0] * len(second), 1]


def test_random_segments_come_from_another_document(pairs, tokenizer):
    for row in pairs:
        first, second = segments(row)
        # a segment cut at its front may start in the middle of a word
        whole = [words & set(WORDS) for words in (words_of(first, tokenizer), words_of(second, tokenizer))]
        if not all(whole):
            continue
        assert [len(words) for words in whole] == [1, 1]
        assert (whole[0] == whole[1]) == (row["next_sentence_label"] == 0)


def test_half_of_the_pairs_are_random(pairs):
    # A document's last sentence, when it is left alone, always gets a random one: slightly more than half.
    assert 0.5 < np.mean(pairs["next_sentence_label"][:]) < 0.62


def test_a_tenth_of_the_pairs_is_short(pairs):
    lengths = np.array([len(row) for row in pairs["input_ids"]])
    assert lengths.max() == LENGTH
    assert lengths.min() >= 5
    assert 0.75 < (lengths == LENGTH).mean() < 0.97
    none = [len(row) for row in build_pairs_without_short_ones(pairs)]
    assert np.mean(np.array(none) == LENGTH) > (lengths == LENGTH).mean() + 0.04


def build_pairs_without_short_ones(pairs):
    tokenizer = train_wordpiece_tokenizer(WORDS * 3, 4000, show_progress=False)
    dataset = build_pretraining_dataset(corpus(), tokenizer, max_length=LENGTH, short_sequence_probability=0.0)
    return dataset["input_ids"]


def test_no_sentence_is_lost(tokenizer):
    documents = corpus(30)
    dataset = build_pretraining_dataset(documents, tokenizer, max_length=512, short_sequence_probability=0.0)
    used = np.zeros(30)
    for row in dataset:
        first, second = segments(row)
        kept = first if row["next_sentence_label"] else first + second
        (word,) = words_of(kept, tokenizer)
        used[WORDS.index(word)] += len(kept)
    expected = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in documents["text"]]
    assert used.tolist() == expected


def test_pairs_depend_on_the_seed_and_not_on_processes(tokenizer):
    documents = corpus(1100)  # more than one group
    build = lambda **options: build_pretraining_dataset(documents, tokenizer, max_length=LENGTH, **options)[:]  # noqa: E731
    expected = build(seed=1)
    assert build(seed=1, num_proc=2) == expected
    assert build(seed=2) != expected


def test_pairs_are_cached_until_something_changes(tmp_path, tokenizer):
    corpus(20).to_parquet(tmp_path / "train.parquet")
    documents = Dataset.from_parquet(str(tmp_path / "train.parquet"), cache_dir=str(tmp_path / "cache"))
    build = lambda used, **options: build_pretraining_dataset(documents, used, max_length=LENGTH, **options)  # noqa: E731
    first = build(tokenizer)
    tokenizer("use it", "and change its state", truncation=True, max_length=5, padding="max_length")
    assert build(tokenizer).cache_files == first.cache_files
    assert build(tokenizer, short_sequence_probability=0.5).cache_files != first.cache_files
    other = train_wordpiece_tokenizer(WORDS, 900, show_progress=False)
    assert build(other).cache_files != first.cache_files


def test_stream_has_the_same_pairs(tokenizer):
    documents = corpus(50)
    expected = build_pretraining_dataset(documents, tokenizer, max_length=LENGTH)
    stream = build_pretraining_dataset(documents.to_iterable_dataset(), tokenizer, max_length=LENGTH)
    assert list(stream) == list(expected)


def test_special_tokens_in_documents_are_plain_text(tokenizer):
    documents = Dataset.from_dict({"text": ["w1 [MASK] w2\nw3 [SEP] w4", "w5\nw6"]})
    for row in build_pretraining_dataset(documents, tokenizer, max_length=LENGTH):
        assert tokenizer.mask_token_id not in row["input_ids"]
        assert sum(row["special_tokens_mask"]) == row["input_ids"].count(3) + 1 == 3


def test_collator_of_transformers_masks_pairs(pairs, tokenizer):
    collator = DataCollatorForLanguageModeling(tokenizer, seed=0)
    rows = [{name: row[name] for name in row if name != "offset_mapping"} for row in pairs.select(range(500))]
    batch = collator(rows)
    assert batch["next_sentence_label"].tolist() == pairs["next_sentence_label"][:500]
    chosen = batch["labels"] != -100
    assert 0.14 < chosen.sum() / (batch["input_ids"] > 3).sum() < 0.16
    assert not (chosen & torch.isin(batch["labels"], torch.tensor([0, 2, 3]))).any()


def test_whole_words_are_masked(pairs, tokenizer):
    collator = WholeWordMaskingCollator(tokenizer, seed=0)
    rows = [dict(row) for row in pairs.select(range(300))]
    batch = collator(rows)
    is_inner = torch.tensor(
        [token.startswith("##") for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    )
    for number, row in enumerate(rows):
        original = torch.tensor(row["input_ids"])
        chosen = batch["labels"][number][: len(original)] != -100
        follows = is_inner[original] & ~torch.tensor(row["special_tokens_mask"]).bool().roll(1)
        follows[0] = False
        assert torch.equal(chosen[follows.nonzero()], chosen[follows.nonzero() - 1])


def test_whole_word_masking_names_missing_columns(pairs, tokenizer):
    rows = [{"input_ids": row["input_ids"]} for row in pairs.select(range(2))]
    with pytest.raises(ValueError, match=r"column `offset_mapping`; set `remove_unused_columns=False`"):
        WholeWordMaskingCollator(tokenizer)(rows)


def test_whole_word_masking_needs_pieces_inside_of_words():
    with pytest.raises(ValueError, match="must mark the pieces inside of words \\(##\\) for whole-word masking"):
        WholeWordMaskingCollator(train_gpt_tokenizer(["the cat sat on the mat"], 270, show_progress=False))


def test_documents_can_be_null(tokenizer):
    table = corpus(3)
    with_null = Dataset.from_dict({"text": [*table["text"][:], None]})
    for build in (build_pretraining_dataset, build_masked_language_dataset):
        assert build(with_null, tokenizer)["input_ids"][:] == build(table, tokenizer)["input_ids"][:]


def test_positions_are_shifted(pairs, tokenizer):
    inner = DataCollatorForLanguageModeling(tokenizer)
    rows = [{name: row[name] for name in row if name != "offset_mapping"} for row in pairs.select(range(2000))]
    for share in (0, 0.3, 1):
        torch.manual_seed(1)
        batch = ShiftedPositionsCollator(inner, share, max_positions=LENGTH + 5)(rows)
        positions = batch.pop("position_ids")
        starts = positions[:, :1]
        assert positions.equal(starts + torch.arange(LENGTH))
        assert starts.unique().tolist() == (list(range(6)) if share else [0])  # 0 is one of 6 shifts
        assert (starts > 0).float().mean() == pytest.approx(share * 5 / 6, abs=0.03)
        torch.manual_seed(1)
        expected = inner(rows)
        assert batch.keys() == expected.keys()
        assert all(expected[name].equal(batch[name]) for name in expected)
    exact = ShiftedPositionsCollator(inner, 1, max_positions=LENGTH)(rows)
    assert exact["position_ids"].equal(torch.arange(LENGTH).expand(2000, -1))


def test_shifts_out_of_range_are_refused(pairs, tokenizer):
    inner = DataCollatorForLanguageModeling(tokenizer)
    with pytest.raises(ValueError, match=r"`probability` must be from 0 to 1, got 1\.5; give the share"):
        ShiftedPositionsCollator(inner, 1.5, max_positions=64)
    rows = [{"input_ids": row["input_ids"]} for row in pairs.select(range(9))]
    with pytest.raises(ValueError, match=rf"`max_positions` \(9\) must be at least .* got {LENGTH} tokens"):
        ShiftedPositionsCollator(inner, 0.5, max_positions=9)(rows)


def test_static_masks_have_exact_counts(pairs, tokenizer):
    some = pairs.select(range(3000))
    masked = mask_statically(some, tokenizer, max_predictions=4)
    kept = changed = replaced = 0
    for before, row in zip(some, masked, strict=True):
        labels = np.array(row["labels"])
        original, now = np.array(before["input_ids"]), np.array(row["input_ids"])
        chosen = labels != -100
        assert chosen.sum() == min(
            4, max(1, round(len(now) * 0.15)), (np.array(row["special_tokens_mask"]) == 0).sum()
        )
        assert (labels[chosen] == original[chosen]).all()
        assert (now[~chosen] == original[~chosen]).all()
        assert not np.array(row["special_tokens_mask"])[chosen].any()
        replaced += (now[chosen] == tokenizer.mask_token_id).sum()
        kept += (now[chosen] == original[chosen]).sum()
        changed += chosen.sum()
    assert abs(replaced / changed - 0.8) < 0.02
    assert abs(kept / changed - 0.1) < 0.02
    names = ("input_ids", "token_type_ids", "labels", "next_sentence_label")
    rows = [{name: row[name] for name in names} for row in masked.select(range(5))]
    batch = DataCollatorForTokenClassification(tokenizer)(rows)
    assert batch["labels"].shape == batch["input_ids"].shape
    assert batch["next_sentence_label"].shape == (5,)


def test_segments_contain_all_tokens(tokenizer):
    documents = corpus(40)
    dataset = build_masked_language_dataset(documents, tokenizer, max_length=LENGTH)
    assert dataset.column_names == ["input_ids", "token_type_ids", "special_tokens_mask", "offset_mapping"]
    lengths = [len(row) for row in dataset["input_ids"]]
    assert max(lengths) <= LENGTH
    expected = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in documents["text"])
    assert sum(lengths) - 2 * len(lengths) == expected


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["w1\nw2"], {}, r"`documents` must be at least 2 .*got 1.*Separate documents with blank lines"),
        (["w1", "w2", "w3"], {}, r"all have only one"),
        (["w1\nw2", "w3"], {"max_length": 7}, r"`max_length` must be between 8 and .*\(512\), got 7"),
        (["w1\nw2", "w3"], {"max_length": 513}, r"`max_length` must be between 8 and .*\(512\), got 513"),
        (["w1\nw2", "w3"], {"short_sequence_probability": 1.5}, r"`short_sequence_probability` .*got 1.5"),
        (["w1\nw2", "w3"], {"repeats": 0}, r"`repeats` must be at least 1, got 0"),
    ],
    ids=["one-document", "single-sentences", "short", "long", "probability", "repeats"],
)
def test_bad_input_is_named(tokenizer, texts, options, message):
    with pytest.raises(ValueError, match=message):
        build_pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, **options)


def test_tokenizer_without_a_mask_is_rejected(tokenizer):
    tokenizer = train_wordpiece_tokenizer(WORDS, 900, show_progress=False)
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="`tokenizer` must have a `mask_token`"):
        build_pretraining_dataset(corpus(3), tokenizer)
