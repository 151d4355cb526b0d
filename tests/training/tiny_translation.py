"""A model, a tokenizer and pairs small enough for a training run in a fraction of a second."""

from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Trainer, TrainerCallback, set_seed

from hf_vanilla.models import varlen_attention
from hf_vanilla.models.configuration_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla.models.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


VOCAB_SIZE = 29
END = 2


def tiny_config(**changes: Any) -> VanillaTransformerConfig:
    """Return a config whose sizes all differ, without dropout."""
    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 16, "d_ff": 24, "num_heads": 4, "encoder_layers": 1}
    return VanillaTransformerConfig(**{**sizes, "decoder_layers": 2, "dropout": 0.0, **changes})


def tiny_model(**changes: Any) -> VanillaTransformerForConditionalGeneration:
    """Return a model with fixed weights."""
    set_seed(11)
    return VanillaTransformerForConditionalGeneration(tiny_config(**changes))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of numbers, for padding."""
    special = ("<pad>", "<s>", "</s>", "<unk>")
    vocab = {token: index for index, token in enumerate((*special, *map(str, range(4, VOCAB_SIZE))))}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="<unk>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def tiny_pairs(num_pairs: int = 45, *, seed: int = 5) -> Dataset:
    """Return pairs of 2 to 9 source and target tokens, with a column that the model does not take."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(num_pairs):
        source = [*generator.integers(4, VOCAB_SIZE, generator.integers(1, 9)).tolist(), END]
        target = [*generator.integers(4, VOCAB_SIZE, generator.integers(1, 9)).tolist(), END]
        row = {"input_ids": source, "attention_mask": [1] * len(source), "labels": target, "source": str(index)}
        rows.append(row)
    return Dataset.from_list(rows)


def tiny_collator(model: torch.nn.Module) -> DataCollatorForSeq2Seq:
    """Return the collator for the stock trainer."""
    return DataCollatorForSeq2Seq(tiny_tokenizer(), model=model)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of the weights of a trainer's model."""
    assert trainer.model is not None
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


class Recorder(TrainerCallback):
    """Records the learning rate of each update, the logged losses and the gradients of the first update."""

    def __init__(self) -> None:
        self.learning_rates: list[float] = []
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.learning_rates.append(kwargs["optimizer"].param_groups[0]["lr"])
        if not self.gradients:
            parameters = kwargs["model"].named_parameters()
            self.gradients = {name.removeprefix("module."): each.grad.clone() for name, each in parameters}

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


class Poison(TrainerCallback):
    """Sets weights to nan after an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step == self.step:
            next(model.parameters()).data[3] = torch.nan


def step_without_values(trainer: Trainer, monkeypatch: Any) -> dict[str, Any]:
    """Run a step for a GPU on "meta", where asking for a value is an error; return the batch, which has values."""
    with monkeypatch.context() as patched:
        patched.setattr(varlen_attention, "VARLEN_DEVICES", ("cpu",))
        batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.to("meta").train()
    trainer.compute_loss(trainer.model, send_to_device(batch, "meta")).backward()
    return batch
