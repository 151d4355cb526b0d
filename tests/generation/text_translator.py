"""A small translator of text, in a folder as users have it: it copies the few texts of its training."""

import torch
from tiny_translator import PAD
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.data.tokenization import train_tokenizer


SENTENCES = ["ein mann rennt .", "größe, 世界 und 12 hüte", "eine 😀 katze"]
KNOWN = [*SENTENCES, "x", "eine katze rennt .", "ein mann und eine katze", "12"]
VOCAB = 275


def text_tokenizer() -> PreTrainedTokenizerBase:
    """Train a tokenizer of 275 entries."""
    return train_tokenizer(SENTENCES * 3, VOCAB, show_progress=False)


def text_model(steps: int = 60, **config) -> VanillaTransformerForConditionalGeneration:
    """Train a model that copies `KNOWN`."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, d_model=32, d_ff=48, num_heads=4, encoder_layers=1, decoder_layers=2, dropout=0.0)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**sizes, **config}))
    encoded = [torch.tensor(ids) for ids in text_tokenizer()(KNOWN)["input_ids"]]
    source = pad_sequence(encoded, batch_first=True, padding_value=PAD)
    labels = pad_sequence(encoded, batch_first=True, padding_value=-100)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(source, attention_mask=(source != PAD).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def save_translator(folder, **config) -> str:
    """Save model and tokenizer, and return the folder's name."""
    text_model(**config).save_pretrained(folder)
    text_tokenizer().save_pretrained(folder)
    return str(folder)
