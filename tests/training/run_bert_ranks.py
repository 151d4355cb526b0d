"""One process of a distributed pre-training: trains with the stock trainer and collator, and saves its results.

Run by test_bert_distributed.py with `torchrun`, as `run_bert_ranks.py <folder>`; also imported by it to make the same
runs in one process.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from tiny_translation import Recorder, weights_of
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast, Trainer, TrainingArguments

from hf_vanilla import VanillaBertConfig, VanillaBertForMaskedLM, VanillaBertForPreTraining
from hf_vanilla.command_line.options import leave_process_group


MODELS = {"masked-lm": VanillaBertForMaskedLM, "pre-training": VanillaBertForPreTraining}
NUM_PAIRS = 24  # three updates of 8
SIZES = dict(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with 31 tokens."""
    from tokenizers import Tokenizer, models

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: number for number, word in enumerate([*special, *(f"word{number}" for number in range(26))])}
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    backend = Tokenizer(models.WordLevel(words, "[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **dict(zip(names, special, strict=True)))


def tiny_pairs() -> list[dict[str, Any]]:
    """Return pairs of different lengths."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for number in range(NUM_PAIRS):
        first = torch.randint(5, 31, (1 + number % 3,), generator=generator).tolist()
        second = torch.randint(5, 31, (2 + number % 5,), generator=generator).tolist()
        pairs.append(
            {
                "input_ids": [2, *first, 3, *second, 3],
                "token_type_ids": [0] * (len(first) + 2) + [1] * (len(second) + 1),
                "next_sentence_label": number % 2,
            }
        )
    return pairs


def train(kind: str, folder: Path, batch_size: int, accumulation: int = 1) -> dict[str, Any]:
    """Train with global batches that do not depend on the numbers of processes and accumulated batches.

    The stock collator draws masks for each batch. Masking all tokens avoids this randomness.
    """
    arguments = TrainingArguments(
        str(folder / kind),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        learning_rate=0.01,
        adam_epsilon=1e-3,  # gradients of key biases are rounding errors, which would become full steps
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        use_cpu=True,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    torch.manual_seed(0)
    model = MODELS[kind](
        VanillaBertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2)
    )
    collator = DataCollatorForLanguageModeling(
        tiny_tokenizer(), mlm_probability=1.0, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    recorder = Recorder()
    trainer = Trainer(model, arguments, collator, train_dataset=tiny_pairs(), callbacks=[recorder])
    trainer.train()
    return {"gradients": recorder.gradients, "losses": recorder.losses, "weights": weights_of(trainer)}


def main() -> None:
    """Make all runs, and save the results of this process to a file."""
    folder = Path(sys.argv[1])
    seen: dict[str, Any] = {kind: train(kind, folder, batch_size=4) for kind in MODELS}
    seen["world_size"] = torch.distributed.get_world_size()
    torch.save(seen, folder / f"rank-{torch.distributed.get_rank()}.pt")
    leave_process_group()


if __name__ == "__main__":
    main()
