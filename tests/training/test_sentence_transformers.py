"""sentence-transformers takes a BERT of ours: its vectors, its trainer and its folders."""

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from hf_vanilla import VanillaBertConfig, VanillaBertModel
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer
from hf_vanilla.generation.features import extract_features


QUESTIONS = ["a cat sat", "the dog runs fast", "old book"]
ANSWERS = ["cats sit in the park", "a dog ran", "books of old"]


def test_encodes_trains_and_reloads(tmp_path):
    tokenizer = train_wordpiece_tokenizer((QUESTIONS + ANSWERS) * 3, 80, show_progress=False)
    config = VanillaBertConfig(
        vocab_size=len(tokenizer), hidden_size=12, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20
    )
    bert = VanillaBertModel(config).eval()
    bert.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")

    model = SentenceTransformer(str(tmp_path / "bert"), device="cpu")
    expected = torch.from_numpy(np.stack(extract_features(bert, tokenizer, QUESTIONS, pooling="mean")))
    before = model.encode(QUESTIONS, convert_to_tensor=True)
    torch.testing.assert_close(before, expected, rtol=1e-5, atol=1e-6)  # other batches

    rows = Dataset.from_dict({"anchor": QUESTIONS * 4, "positive": ANSWERS * 4})
    arguments = SentenceTransformerTrainingArguments(
        str(tmp_path / "run"),
        max_steps=12,
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=MultipleNegativesRankingLoss(model)).train()
    likeness = model.similarity(model.encode(QUESTIONS), model.encode(ANSWERS))
    assert likeness.argmax(1).tolist() == [0, 1, 2]

    model.save_pretrained(str(tmp_path / "trained"))
    again = SentenceTransformer(str(tmp_path / "trained"), device="cpu")
    torch.testing.assert_close(again.encode(ANSWERS), model.encode(ANSWERS), rtol=0, atol=0)
