"""Small GPTs, ours and transformers' own, and one batch. Sizes differ, so that a swapped axis fails."""

import torch
import transformers
from tiny_berts import perturbed

import hf_vanilla


VOCAB, LENGTH = 13, 7
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=17,
    initializer_range=0.3,
    pad_token_id=0,
    eos_token_id=2,
)

# batch 2, length 7; the second row is padded
IDS = torch.tensor([[2, 5, 6, 7, 8, 9, 3], [2, 10, 3, 11, 3, 0, 0]])
MASK = (IDS != 0).long()
TEXT = {"input_ids": IDS, "attention_mask": MASK}
LEFT = {name: torch.stack((rows[0], rows[1].roll(2))) for name, rows in TEXT.items()}
LABELS = IDS.masked_fill(IDS == 0, -100)
# 2 questions with 3 choices each
CHOICES = {name: torch.stack((rows, rows.flip(0), rows.roll(1, 0)), dim=1) for name, rows in TEXT.items()}

# Our class, extra fields of the config, inputs with labels. One entry for each task.
TASKS = {
    "text": (hf_vanilla.VanillaGptForCausalLM, {}, {**TEXT, "labels": LABELS}),
    "classes": (
        hf_vanilla.VanillaGptForSequenceClassification,
        {"num_labels": 5},
        {**TEXT, "labels": torch.tensor([4, 1])},
    ),
    "regression": (
        hf_vanilla.VanillaGptForSequenceClassification,
        {"num_labels": 1},
        {**TEXT, "labels": torch.tensor([0.5, -2.0])},
    ),
    "multi-label": (
        hf_vanilla.VanillaGptForSequenceClassification,
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        {**TEXT, "labels": torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])},
    ),
    "choices": (hf_vanilla.VanillaGptForMultipleChoice, {}, {**CHOICES, "labels": torch.tensor([2, 0])}),
}
# For each place of the norm, transformers' prefix and config class, and a field that only it has.
NATIVE = {
    "post": ("OpenAIGPT", transformers.OpenAIGPTConfig, {"afn": "gelu"}),
    "pre": ("GPT2", transformers.GPT2Config, {"n_inner": 20, "bos_token_id": 1}),
}


def tiny_gpt(task: str = "text", seed: int = 0, attn_implementation: str = "sdpa", **overrides):
    """Build one of our models, in evaluation mode, with biases and norms that are not trivial."""
    model_class, fields, _ = TASKS[task]
    config = hf_vanilla.VanillaGptConfig(**{**SIZES, **fields, **overrides})
    torch.manual_seed(seed)
    return perturbed(model_class._from_config(config, attn_implementation=attn_implementation))


def native_config(norm_position: str, **overrides):
    """Build transformers' own config, of odd sizes."""
    sizes = dict(vocab_size=VOCAB, n_positions=17, n_embd=12, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=2)
    rates = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.3)
    _, config_class, fields = NATIVE[norm_position]
    return config_class(**{**sizes, **rates, **fields, **overrides})


def native_gpt(norm_position: str, head: str = "LMHeadModel", **overrides):
    """Build transformers' own model."""
    torch.manual_seed(0)
    model_class = getattr(transformers, NATIVE[norm_position][0] + head)
    return perturbed(model_class(native_config(norm_position, **overrides)))
