import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.metrics import Bleu, ChrF, TranslationMetrics


PAD, START, END, UNKNOWN = range(4)
WORDS = ["a", "b", "c", "d", "e", "f", "G"]
GENERATED = np.array(
    [
        [START, 4, 5, 6, 7, END, PAD, PAD],
        [START, 8, 9, 4, 5, 10, END, PAD],
        [START, END, PAD, PAD, PAD, PAD, PAD, PAD],
    ]
)
TEXTS = ["a b c d", "e f a b G", ""]
LABELS = np.array([[4, 5, 6, 7, END, -100], [8, 9, 4, 5, 6, END], [4, END, -100, -100, -100, -100]])
REFERENCES = ["a b c d", "e f a b c", "a"]


@pytest.fixture
def tokenizer():
    vocab = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def expected(texts=TEXTS, references=REFERENCES, gen_len=3.0, word_order=0, lowercase=False, **settings):
    bleu = Bleu().compute(predictions=texts, references=references, lowercase=lowercase, **settings)
    chrf = ChrF().compute(predictions=texts, references=references, word_order=word_order, lowercase=lowercase)
    return {"bleu": bleu["score"], "chrf": chrf["score"], "gen_len": gen_len}


def test_scores_decoded_text(tokenizer):
    scores = TranslationMetrics(tokenizer)(EvalPrediction(predictions=GENERATED, label_ids=LABELS))
    assert scores == expected()
    assert 0 < scores["bleu"] < 100


@pytest.mark.parametrize(
    "filled_up",
    [
        np.where(GENERATED == PAD, -100, GENERATED),
        np.pad(GENERATED, ((0, 0), (0, 3)), constant_values=-100),
        (GENERATED, np.zeros((3, 2, 5), dtype=np.float32)),
        torch.from_numpy(GENERATED),
    ],
    ids=["-100 for padding", "-100 behind padding", "tuple", "tensor"],
)
def test_padding_and_form_of_predictions_do_not_matter(tokenizer, filled_up):
    scores = TranslationMetrics(tokenizer)(EvalPrediction(predictions=filled_up, label_ids=LABELS))
    assert scores == expected()


def test_arrays_gathered_from_ranks_of_different_lengths(tokenizer):
    # The trainer fills the shorter arrays of each rank up with -100, in predictions and labels.
    gathered = np.concatenate([GENERATED, np.full((1, 8), -100)])
    gathered[3, :5] = [START, 4, 5, 6, END]
    labels = np.concatenate([np.pad(LABELS, ((0, 0), (0, 2)), constant_values=-100), np.full((1, 8), -100)])
    labels[3] = [4, 5, 6, 7, 8, 9, 10, END]
    scores = TranslationMetrics(tokenizer)(EvalPrediction(predictions=gathered, label_ids=labels))
    assert scores == expected([*TEXTS, "a b c"], [*REFERENCES, "a b c d e f G"], gen_len=12 / 4)


def test_settings_reach_the_scores(tokenizer):
    prediction = EvalPrediction(predictions=GENERATED[1:2], label_ids=np.array([[8, 9, 4, 5, 10, END]]))
    metrics = TranslationMetrics(tokenizer, tokenize="char", lowercase=True, word_order=2)
    assert metrics(prediction) == expected(
        ["e f a b G"], ["e f a b g"], gen_len=5.0, tokenize="char", lowercase=True, word_order=2
    )


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (np.zeros((3, 8, 11), dtype=np.float32), LABELS, r"`predictions` .* got float32 of shape \(3, 8, 11\)"),
        (GENERATED.astype(np.float32), LABELS, r"`predictions` .* set `predict_with_generate=True`"),
        (GENERATED, None, "`label_ids` must be token ids, got None"),
        (GENERATED, LABELS[0], r"`label_ids` .* got int64 of shape \(6,\)"),
        (GENERATED, LABELS[:2], "equal number, got 3 and 2"),
    ],
    ids=["logits", "floats", "no labels", "one row", "counts differ"],
)
def test_bad_input(tokenizer, predictions, labels, message):
    with pytest.raises(ValueError, match=message):
        TranslationMetrics(tokenizer)(EvalPrediction(predictions=predictions, label_ids=labels))


def test_tokenizer_without_padding(tokenizer):
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="`tokenizer` must have a pad token"):
        TranslationMetrics(tokenizer)


def test_in_the_stock_trainer(tokenizer, tmp_path):
    config = VanillaTransformerConfig(
        vocab_size=11, d_model=16, d_ff=20, num_heads=4, encoder_layers=1, decoder_layers=1
    )
    model = VanillaTransformerForConditionalGeneration(config).eval()
    sources = [[4, 5, END], [6, 7, 8, 9, END], [5, END]]
    generated = [model.generate(torch.tensor([source]), max_length=7)[0, 1:].tolist() for source in sources]
    labels = [[*generated[0], END], [6, 7, END], generated[2][:4]]  # right, wrong and cut short
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            str(tmp_path),
            predict_with_generate=True,
            generation_max_length=7,
            per_device_eval_batch_size=2,
            use_cpu=True,
        ),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        eval_dataset=Dataset.from_dict({"input_ids": sources, "labels": labels}),
        compute_metrics=TranslationMetrics(tokenizer),
    )
    metrics = trainer.evaluate()
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in generated]
    references = [tokenizer.decode(ids, skip_special_tokens=True) for ids in labels]
    lengths = [len([token for token in ids if token not in (PAD, START, END)]) for ids in generated]
    scores = {name: metrics[f"eval_{name}"] for name in ("bleu", "chrf", "gen_len")}
    assert scores == expected(texts, references, gen_len=sum(lengths) / 3)
    assert 10 < scores["bleu"] < 95
