"""A small, barely trained model that reverses sequences, so that its beams differ and its sequences end."""

import torch

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


PAD, BOS, EOS = 0, 1, 2
VOCAB = 30


def reversal_batch(batch: int, vocab_size: int = VOCAB, longest: int = 6) -> dict[str, torch.Tensor]:
    """Draw sources of 1 to `longest` tokens and `</s>`, and the reversed sources."""
    words = torch.randint(3, vocab_size, (batch, longest))
    lengths = torch.randint(1, longest + 1, (batch,))
    source = torch.zeros(batch, longest + 1, dtype=torch.long)
    labels = torch.full((batch, longest + 1), -100)
    for row, length in enumerate(lengths.tolist()):
        source[row, : length + 1] = torch.cat((words[row, :length], torch.tensor([EOS])))
        labels[row, : length + 1] = torch.cat((words[row, :length].flip(0), torch.tensor([EOS])))
    return {"input_ids": source, "attention_mask": (source != PAD).long(), "labels": labels}


def trained_model(steps: int = 40, seed: int = 0, **config) -> VanillaTransformerForConditionalGeneration:
    """Train for a few steps: the model prefers some tokens to others, but is mostly wrong."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=VOCAB, d_model=16, d_ff=24, num_heads=4, d_k=3, d_v=5, encoder_layers=1, decoder_layers=3)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**sizes, "dropout": 0.0, **config}))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(**reversal_batch(32, model.config.vocab_size)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def sources(batch: int = 6, vocab_size: int = VOCAB) -> dict[str, torch.Tensor]:
    """Draw a padded batch of sources."""
    drawn = reversal_batch(batch, vocab_size)
    return {"input_ids": drawn["input_ids"], "attention_mask": drawn["attention_mask"]}
