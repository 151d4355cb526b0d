#!/usr/bin/env python
r"""Continue texts with a causal language model.

Examples:
  one prompt, its continuation printed as it is made:
    python scripts/generate.py --model runs/gpt --prompt "The old house by the sea"
  three samples of each line of a file, computed together:
    python scripts/generate.py --model runs/gpt --input prompts.txt --num_return_sequences 3 --seed 1
  the most likely continuation, by beam search:
    echo "The capital of France is" | python scripts/generate.py --model runs/gpt --num_beams 4 --max_new_tokens 20

Without --prompt, each line of --input, by default standard input, is a prompt. An empty prompt starts a new text.
The output has the prompts with their continuations, under a line "--- prompt.sample ---" where there are several.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("generate")

import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed
from transformers.utils import logging

import hf_vanilla  # noqa: F401  (registers the models)
from hf_vanilla.command_line.checks import check_device, check_models, explained_model_loading
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data.files import STANDARD_STREAM, read_lines


MAX_NEW_TOKENS = 100  # by default


@dataclass
class GenerateArguments:
    """Prompts, model and how to choose tokens."""

    model: str = field(metadata={"help": "Folder of a trained model, or its name on the Hub."})
    prompt: list[str] | None = field(default=None, metadata={"help": "One prompt or several, instead of --input."})
    input: str | None = field(
        default=None,
        metadata={"help": "Text file with a prompt on each line, also .gz; - is standard input. Default: -."},
    )
    max_new_tokens: int | None = field(
        default=None,
        metadata={"help": "Most tokens to add to a prompt. Default: 100, or fewer if the model has fewer positions."},
    )
    greedy: bool = field(default=False, metadata={"help": "Take the most likely token each time instead of sampling."})
    num_beams: int = field(default=1, metadata={"help": "Beams of a search, which does not sample; 1 is none."})
    temperature: float | None = field(
        default=None, metadata={"help": "Below 1 sampling prefers likely tokens more, above less. Default: 1."}
    )
    top_k: int | None = field(
        default=None, metadata={"help": "Sample from so many of the most likely tokens; 0 is all. Default: 0."}
    )
    top_p: float | None = field(
        default=None,
        metadata={"help": "Sample from the most likely tokens that together have this probability. Default: 0.9."},
    )
    repetition_penalty: float = field(
        default=1.0, metadata={"help": "Above 1, tokens that are already in the text are less likely."}
    )
    num_return_sequences: int = field(default=1, metadata={"help": "Texts for each prompt."})
    batch_size: int = field(default=16, metadata={"help": "Prompts that are continued together."})
    seed: int = field(default=0, metadata={"help": "Seed of the samples."})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "Type of the weights; auto is the type they were saved in."}
    )
    device: str = field(
        default="auto",
        metadata={"help": "Where to run: cpu, cuda, cuda:1 ..., or auto, an accelerator if there is one."},
    )

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_beams", "num_return_sequences", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if self.prompt is not None and self.input is not None:
            raise ValueError("`input` must be left out where `prompt` is given, got both.")
        for name in ("temperature", "top_k", "top_p"):
            if getattr(self, name) is not None and not self.samples:
                raise ValueError(
                    f"`{name}` has no effect without sampling, which --greedy and --num_beams turn off; leave it out."
                )
        self.temperature = 1.0 if self.temperature is None else self.temperature
        self.top_k = 0 if self.top_k is None else self.top_k
        self.top_p = 0.9 if self.top_p is None else self.top_p
        if not self.temperature > 0 or not self.repetition_penalty > 0:
            raise ValueError("`temperature` and `repetition_penalty` must be positive; --greedy is temperature 0.")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"`top_k` must be 0 or more and `top_p` in (0, 1], got {self.top_k} and {self.top_p}.")
        if self.num_return_sequences > self.num_beams and not self.samples:
            raise ValueError(
                f"`num_return_sequences` ({self.num_return_sequences}) must be at most `num_beams` ({self.num_beams}) "
                "without sampling."
            )
        check_device(self.device)

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        return not self.greedy and self.num_beams == 1

    def search_options(self) -> dict[str, Any]:
        """Return the arguments of `generate`."""
        options: dict[str, Any] = {
            "num_beams": self.num_beams,
            "num_return_sequences": self.num_return_sequences,
            "repetition_penalty": self.repetition_penalty,
            "do_sample": self.samples,
        }
        if self.samples:
            options.update(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        return options


def load(arguments: GenerateArguments):
    """Load the model, and its tokenizer with padding at the left, where it does not come between prompt and text."""
    device = arguments.device
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cpu" if accelerator is None else accelerator.type
    with explained_model_loading("model", arguments.model):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).to(device).eval()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token  # masked, so any token will do
    return model, tokenizer


def encode(prompts: list[str], model, tokenizer, max_new_tokens: int | None) -> tuple[list[list[int]], int]:
    """Tokenize prompts, and check that they leave room for the new tokens, as many as can be by default."""
    encoded = tokenizer(prompts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    limit = getattr(model.config, "max_position_embeddings", None)
    for number, ids in enumerate(encoded, start=1):
        if not ids:
            if tokenizer.bos_token_id is None:
                raise ValueError(
                    f"Prompt {number} is empty, but the model has no token that starts a text; give a word."
                )
            ids.append(tokenizer.bos_token_id)
        wanted = max_new_tokens or 1
        if limit is not None and len(ids) + wanted > limit + 1:
            raise ValueError(
                f"`max_new_tokens` ({wanted}) and the {len(ids)} tokens of prompt {number} must be at most "
                f"{limit + 1} together, the model's positions and 1; lower --max_new_tokens, or shorten the prompt."
            )
    if max_new_tokens is None:
        room = MAX_NEW_TOKENS if limit is None else limit + 1 - max(map(len, encoded))
        max_new_tokens = min(MAX_NEW_TOKENS, room)
    return encoded, max_new_tokens


def generate(prompts: list[str], arguments: GenerateArguments) -> None:
    """Continue the prompts, and print them with what was added."""
    model, tokenizer = load(arguments)
    encoded, max_new_tokens = encode(prompts, model, tokenizer, arguments.max_new_tokens)
    set_seed(arguments.seed)
    options = {"max_new_tokens": max_new_tokens, **arguments.search_options()}
    if len(prompts) == arguments.num_return_sequences == arguments.num_beams == 1:
        options["streamer"] = TextStreamer(tokenizer, skip_special_tokens=True)
    for start in range(0, len(encoded), arguments.batch_size):
        batch = tokenizer.pad({"input_ids": encoded[start : start + arguments.batch_size]}, return_tensors="pt")
        outputs = model.generate(**batch.to(model.device), pad_token_id=tokenizer.pad_token_id, **options)
        if "streamer" in options:
            return
        for index, ids in enumerate(outputs):
            prompt, sample = divmod(index, arguments.num_return_sequences)
            sys.stdout.write(f"--- {start + prompt + 1}.{sample + 1} ---\n" if len(encoded) * len(outputs) > 1 else "")
            sys.stdout.write(tokenizer.decode(ids, skip_special_tokens=True) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Read the prompts and continue them."""
    (arguments,) = parse_arguments(GenerateArguments, description=__doc__)
    logging.set_verbosity_error()
    check_models(model=arguments.model)
    prompts = arguments.prompt
    if prompts is None:
        prompts = read_lines(STANDARD_STREAM if arguments.input is None else arguments.input)
    if not prompts:
        raise ValueError("`input` must have at least one line, a prompt, but is empty.")
    generate(prompts, arguments)


if __name__ == "__main__":
    sys.exit(run(main))
