"""Small BERTs, ours and transformers' own, and one batch. Sizes differ, so that a swapped axis fails."""

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

import hf_vanilla


VOCAB, LENGTH = 13, 7
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=20,
    max_position_embeddings=11,
    initializer_range=0.3,
)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

# batch 2, length 7; the second row is padded, and a pair
IDS = torch.tensor([[2, 5, 6, 7, 8, 9, 3], [2, 10, 3, 11, 3, 0, 0]])
MASK = (IDS != 0).long()
SEGMENTS = torch.tensor([[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0]])
TEXT = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": SEGMENTS}
MASKED_LABELS = torch.tensor([[-100, 5, -100, 12, -100, -100, -100], [-100, -100, -100, 4, -100, -100, -100]])
# 2 questions with 3 choices each
CHOICES = {name: torch.stack((tensor, tensor.roll(1, 1), tensor.roll(2, 1)), dim=1) for name, tensor in TEXT.items()}

# Our class, transformers' class, extra fields of the config, inputs with labels. One entry for each task.
TASKS = {
    "model": (hf_vanilla.VanillaBertModel, BertModel, {}, TEXT),
    "pre-training": (
        hf_vanilla.VanillaBertForPreTraining,
        BertForPreTraining,
        {},
        {**TEXT, "labels": MASKED_LABELS, "next_sentence_label": torch.tensor([1, 0])},
    ),
    "masked-lm": (hf_vanilla.VanillaBertForMaskedLM, BertForMaskedLM, {}, {**TEXT, "labels": MASKED_LABELS}),
    "next-sentence": (
        hf_vanilla.VanillaBertForNextSentencePrediction,
        BertForNextSentencePrediction,
        {},
        {**TEXT, "labels": torch.tensor([1, 0])},
    ),
    "classes": (
        hf_vanilla.VanillaBertForSequenceClassification,
        BertForSequenceClassification,
        {"num_labels": 5},
        {**TEXT, "labels": torch.tensor([4, 1])},
    ),
    "regression": (
        hf_vanilla.VanillaBertForSequenceClassification,
        BertForSequenceClassification,
        {"num_labels": 1},
        {**TEXT, "labels": torch.tensor([0.5, -2.0])},
    ),
    "multi-label": (
        hf_vanilla.VanillaBertForSequenceClassification,
        BertForSequenceClassification,
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        {**TEXT, "labels": torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])},
    ),
    "tokens": (
        hf_vanilla.VanillaBertForTokenClassification,
        BertForTokenClassification,
        {"num_labels": 5},
        {**TEXT, "labels": torch.tensor([[-100, 1, 2, 3, 4, 0, -100], [-100, 4, -100, 1, -100, -100, -100]])},
    ),
    "answers": (
        hf_vanilla.VanillaBertForQuestionAnswering,
        BertForQuestionAnswering,
        {},
        {**TEXT, "start_positions": torch.tensor([3, 99]), "end_positions": torch.tensor([5, 1])},
    ),
    "choices": (
        hf_vanilla.VanillaBertForMultipleChoice,
        BertForMultipleChoice,
        {},
        {**CHOICES, "labels": torch.tensor([2, 0])},
    ),
}


def tiny_bert(task: str = "pre-training", seed: int = 0, attn_implementation: str = "sdpa", **overrides):
    """Build one of our models, in evaluation mode, with biases and norms that are not trivial."""
    model_class, _, fields, _ = TASKS[task]
    config = hf_vanilla.VanillaBertConfig(**{**SIZES, **fields, **overrides})
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation=attn_implementation)
    return perturbed(model)


def native_bert(task: str = "pre-training", seed: int = 0, attn_implementation: str = "eager", **overrides):
    """Build transformers' own model for the task."""
    _, model_class, fields, _ = TASKS[task]
    torch.manual_seed(seed)
    model = model_class._from_config(
        BertConfig(**{**SIZES, **fields, **overrides}), attn_implementation=attn_implementation
    )
    return perturbed(model)


def perturbed(model):
    """Move biases and norms away from 0 and 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
