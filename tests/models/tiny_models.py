"""Small models and one batch for all tests of this folder. Sizes differ, so that a swapped axis fails."""

import torch
from torch import nn

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


PAD, BOS, EOS = 0, 1, 2
VOCAB = 13

# batch 2, src_len 5, tgt_len 7; the second row of each is padded
SOURCE = torch.tensor([[3, 4, 5, 6, 2], [7, 8, 2, 0, 0]])
SOURCE_MASK = (SOURCE != PAD).long()
LABELS = torch.tensor([[5, 6, 7, 8, 9, 10, 2], [5, 11, 2, -100, -100, -100, -100]])
TARGET = torch.tensor([[1, 5, 6, 7, 8, 9, 10], [1, 5, 11, 2, 0, 0, 0]])
BATCH = {"input_ids": SOURCE, "attention_mask": SOURCE_MASK, "labels": LABELS}


def tiny_config(**overrides) -> VanillaTransformerConfig:
    """Build a config of sizes that all differ; dropout is as in the paper."""
    sizes = dict(vocab_size=VOCAB, d_model=16, d_ff=24, num_heads=4, d_k=3, d_v=5, encoder_layers=2, decoder_layers=3)
    return VanillaTransformerConfig(**{**sizes, **overrides})


def tiny_model(seed: int = 0, **overrides) -> VanillaTransformerForConditionalGeneration:
    """Build a model in evaluation mode whose weights, biases and norms depend on the seed only."""
    torch.manual_seed(seed)
    attn_implementation = overrides.pop("attn_implementation", "sdpa")
    model = VanillaTransformerForConditionalGeneration._from_config(
        tiny_config(**overrides), attn_implementation=attn_implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collect the gradient of every parameter by name; a missing one is an error."""
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerances) -> None:
    """Compare two dictionaries of tensors, and name the one that differs."""
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerances
        )
