#!/usr/bin/env python
r"""Pre-train GPT, from raw documents to a model that the Auto classes load: the next token of running text.

Plain text has blank lines between documents; in .jsonl, .csv and .parquet files each row is one:

    python scripts/pretrain_gpt.py \
        --train_files encyclopedia.jsonl.gz novels.txt --validation_files held_out.jsonl.gz \
        --preset mini --vocab_size 8000 --block_length 256 --per_device_train_batch_size 16 --learning_rate 1e-3 \
        --max_steps 10000 --warmup_steps 500 --output_dir runs/gpt

A dataset of the Hub: --dataset_name wikimedia/wikipedia --dataset_config_name 20231101.simple; with --streaming it is
read during the training. Further pre-training of any GPT on text of your domain: --model_name_or_path
openai-community/openai-gpt, or gpt2.

The documents, joined by the end-of-text token, are cut into blocks of --block_length tokens without padding;
--separate_documents starts a new block with each. The optimizer is the paper's by default. Run the same command again
to resume an interrupted run; other data or another model is refused. A JSON or YAML file of options can come first;
options after it replace its own. The paper's settings are in a file that needs no path:

    python scripts/pretrain_gpt.py gpt.yaml --train_files books.jsonl.gz --output_dir runs/gpt

Several devices:

    torchrun --nproc_per_node 2 scripts/pretrain_gpt.py --train_files encyclopedia.jsonl.gz ...
"""

from hf_vanilla_cli import answer_early, command_of_script


if __name__ == "__main__":  # before the slow imports
    answer_early("pretrain_gpt")

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, set_seed

from hf_vanilla import VanillaGptConfig, VanillaGptForCausalLM
from hf_vanilla.command_line.checks import (
    check_files_exist,
    check_models,
    check_output_dir,
    explained_loading,
    explained_model_loading,
)
from hf_vanilla.command_line.options import parse_arguments, run, set_up_logging
from hf_vanilla.command_line.splits import DatasetArguments, check_streaming, load_document_splits
from hf_vanilla.data import build_blocks, collate_blocks
from hf_vanilla.data.tokenization import train_gpt_tokenizer
from hf_vanilla.metrics import evaluate_documents
from hf_vanilla.models.checks import check_heads
from hf_vanilla.training import (
    GPT_RECIPE,
    VanillaTrainer,
    VanillaTrainingArguments,
    WarmupWarning,
    begin_run,
    folder_of_tokenizer,
    lock_run_folder,
    main_process_first,
    resume_hint_on_interrupt,
    save_final_model,
    save_metrics,
    train_to_end,
)


logger = logging.getLogger("pretrain_gpt")

MODEL_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "norm_position")
REGULARISATION = ("hidden_dropout_prob", "attention_probs_dropout_prob")


@dataclass
class ModelArguments:
    """The model and tokenizer to train."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Train this GPT with its tokenizer (folder or Hub name) instead of a new one."},
    )
    preset: str = field(
        default="gpt1", metadata={"help": f"Size to start from: {', '.join(VanillaGptConfig.preset_names())}."}
    )
    hidden_size: int | None = field(
        default=None, metadata={"help": "Width of the model. Default: the preset's, also below."}
    )
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Number of layers."})
    num_attention_heads: int | None = field(default=None, metadata={"help": "Number of attention heads."})
    intermediate_size: int | None = field(default=None, metadata={"help": "Inner width of the feed-forward networks."})
    norm_position: Literal["post", "pre"] | None = field(
        default=None, metadata={"help": "Place of the LayerNorms: post is GPT's, pre GPT-2's."}
    )
    hidden_dropout_prob: float | None = field(default=None, metadata={"help": "Dropout rate; the paper's is 0.1."})
    attention_probs_dropout_prob: float | None = field(
        default=None, metadata={"help": "Dropout rate of attention weights; the paper's is 0.1."}
    )
    tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "Use this tokenizer (folder or Hub name) instead of training one."}
    )
    vocab_size: int = field(default=40000, metadata={"help": "Size of the vocabulary to train."})

    def __post_init__(self):
        if self.preset not in VanillaGptConfig.preset_names():
            names = ", ".join(VanillaGptConfig.preset_names())
            raise ValueError(f"`preset` must be one of {names}; got {self.preset!r}.")


@dataclass
class DataArguments(DatasetArguments):
    """The documents, and how to cut them into blocks."""

    train_files: list[str] | None = field(
        default=None, metadata={"help": "Documents: .json(l), .csv, .tsv or plain text, also as .gz; .parquet."}
    )
    validation_files: list[str] | None = field(default=None, metadata={"help": "The same for validation."})
    text_column: str | None = field(
        default=None, metadata={"help": "Column of the text. Default: text, content or document."}
    )
    block_length: int = field(default=512, metadata={"help": "Tokens of a block; a new model has as many positions."})
    separate_documents: bool = field(
        default=False, metadata={"help": "Start a new block with each document; its last one is padded."}
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read and cut the documents during the training; needs max_steps."}
    )
    shuffle_buffer: int | None = field(default=None, metadata={"help": "Earlier name of stream_buffer."})
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenize. Default: this one."}
    )


@dataclass
class PretrainingArguments(VanillaTrainingArguments):
    """Training arguments; the defaults are the paper's optimizer and schedule (4.1)."""

    output_dir: str | None = field(default=None, metadata={"help": "Folder of the checkpoints and the final model."})
    per_device_train_batch_size: int = field(
        default=GPT_RECIPE["per_device_train_batch_size"], metadata={"help": "Blocks of a batch of one device."}
    )
    num_train_epochs: float = field(
        default=GPT_RECIPE["num_train_epochs"], metadata={"help": "Passes over the blocks, unless max_steps is given."}
    )
    learning_rate: float = field(default=GPT_RECIPE["learning_rate"], metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(
        default=GPT_RECIPE["lr_scheduler_type"], metadata={"help": "Schedule after the warm-up; cosine ends at 0."}
    )
    warmup_steps: float = field(
        default=GPT_RECIPE["warmup_steps"],
        metadata={"help": "Updates over which the learning rate grows; at most about a third of all."},
    )
    weight_decay: float = field(
        default=GPT_RECIPE["weight_decay"], metadata={"help": "Weight decay, except for biases and norms."}
    )
    logging_steps: float = field(default=50, metadata={"help": "Log the loss every this many updates."})
    max_tokens_per_batch: int | None = field(
        default=None,
        metadata={
            "help": "Size of a batch of one device in tokens, in place of per_device_train_batch_size, such as for "
            "blocks of a stream with --separate_documents."
        },
    )
    teacher_forcing_ratio: float = field(default=1.0, init=False)  # of translators, as the next
    consistency_weight: float = field(default=0.0, init=False)

    def __post_init__(self):
        if self.output_dir is None:
            raise ValueError("`output_dir` is missing; give a folder for the model, as in --output_dir runs/gpt.")
        super().__post_init__()


def get_tokenizer(arguments: ModelArguments, documents, block_length: int, output_dir: Path, saved_in: Path | None):
    """Load or train the tokenizer, and save it."""
    path = saved_in or arguments.tokenizer_name_or_path or arguments.model_name_or_path
    if path is not None:
        option = "tokenizer_name_or_path" if arguments.tokenizer_name_or_path else "model_name_or_path"
        with explained_loading(option, path):
            tokenizer = AutoTokenizer.from_pretrained(path)
    else:
        logger.info("Learning the subwords of the vocabulary.")
        tokenizer = train_gpt_tokenizer(
            (row["text"] for row in documents), arguments.vocab_size, model_max_length=block_length
        )
    if saved_in != output_dir:
        tokenizer.save_pretrained(output_dir)
    return tokenizer


def build_examples(arguments: DataArguments, corpora, tokenizer):
    """Cut training and validation documents into blocks, and return the collator of both."""
    settings: dict[str, Any] = {
        "block_length": arguments.block_length,
        "across_documents": not arguments.separate_documents,
        "keep_short": arguments.separate_documents,
    }
    workers = arguments.preprocessing_num_workers
    blocks = {
        name: build_blocks(documents, tokenizer, num_proc=workers, **settings) for name, documents in corpora.items()
    }
    if not arguments.separate_documents:
        return blocks, collate_blocks
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        raise ValueError(
            "`separate_documents` needs a tokenizer with a `pad_token` other than the end-of-text token, whose end of "
            "a document is learnt; leave it out, or give another tokenizer."
        )
    return blocks, DataCollatorForLanguageModeling(tokenizer, mlm=False)


def plan_streaming(arguments: DataArguments, training_args: PretrainingArguments) -> None:
    """Let the trainer shuffle and batch a stream, by tokens, as it can resume after several passes."""
    if not arguments.streaming:
        return
    if arguments.shuffle_buffer is not None:
        training_args.stream_buffer = arguments.shuffle_buffer
    if training_args.max_tokens_per_batch is None:
        training_args.max_tokens_per_batch = training_args.per_device_train_batch_size * arguments.block_length


def given_fields(arguments: ModelArguments) -> dict:
    """Return the config fields that are set by options."""
    given = {name: getattr(arguments, name) for name in MODEL_SIZES + REGULARISATION}
    return {name: value for name, value in given.items() if value is not None}


def check_model(arguments: ModelArguments, block_length: int) -> None:
    """Check sizes and positions before the data is read."""
    given = given_fields(arguments)
    path = arguments.model_name_or_path
    if path is None:
        check_heads(VanillaGptConfig.preset(arguments.preset, **given, max_position_embeddings=block_length))
        return
    fixed = sorted(given.keys() - set(REGULARISATION))
    if fixed:
        raise ValueError(f"`{fixed[0]}` can't be changed in a trained model (`model_name_or_path`); leave it out.")
    with explained_loading("model_name_or_path", path):
        positions = AutoConfig.from_pretrained(path).max_position_embeddings
    if block_length > positions:
        raise ValueError(
            f"`block_length` ({block_length}) must be at most {positions}, the positions of the model {path}."
        )


def get_model(arguments: ModelArguments, tokenizer, block_length: int):
    """Load a trained model, or build a new one for the tokenizer."""
    given = given_fields(arguments)
    path = arguments.model_name_or_path
    if path is not None:
        with explained_model_loading("model_name_or_path", path):
            model = AutoModelForCausalLM.from_pretrained(path, **given)
        if len(tokenizer) > model.config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens, but the model `{path}` only {model.config.vocab_size}; "
                "give the model's own tokenizer."
            )
        return model
    config = VanillaGptConfig.preset(
        arguments.preset,
        **given,
        vocab_size=len(tokenizer),
        max_position_embeddings=block_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return VanillaGptForCausalLM(config)


def main() -> None:
    """Check the options, lock the folder of the run, and train."""
    model_args, data_args, training_args = parse_arguments(
        ModelArguments, DataArguments, PretrainingArguments, description=__doc__
    )
    set_up_logging(training_args)
    check_streaming(data_args, training_args)
    plan_streaming(data_args, training_args)
    check_output_dir(training_args.output_dir)
    check_models(
        model_name_or_path=model_args.model_name_or_path, tokenizer_name_or_path=model_args.tokenizer_name_or_path
    )
    check_files_exist(train_files=data_args.train_files, validation_files=data_args.validation_files)
    check_model(model_args, data_args.block_length)
    with lock_run_folder(training_args.output_dir, is_main_process=training_args.should_save):
        train(model_args, data_args, training_args)


def train(model_args: ModelArguments, data_args: DataArguments, training_args: PretrainingArguments) -> None:
    """Pre-train a model from documents, in four steps."""
    set_seed(training_args.seed)
    output_dir = Path(str(training_args.output_dir))
    checkpoint, is_finished = begin_run(training_args, model_args, data_args)
    if is_finished:
        return

    # 1. documents -> tokenizer -> blocks; the first process does the work, the others read its cache
    with main_process_first(training_args):
        corpora = load_document_splits(
            data_args, streaming=data_args.streaming, on_bad_record=training_args.on_bad_record
        )
        saved_in = folder_of_tokenizer(checkpoint) if checkpoint is not None else None
        if training_args.process_index > 0:
            saved_in = output_dir
        tokenizer = get_tokenizer(model_args, corpora["train"], data_args.block_length, output_dir, saved_in)
        blocks, collator = build_examples(data_args, corpora, tokenizer)

    # 2. model and trainer
    model = get_model(model_args, tokenizer, data_args.block_length)
    logger.info(f"{model.num_parameters():,} parameters, vocabulary {model.config.vocab_size:,}")
    trainer = VanillaTrainer(
        model,
        training_args,
        collator,
        train_dataset=blocks["train"],
        eval_dataset=blocks.get("validation"),
        processing_class=tokenizer,
        callbacks=[WarmupWarning()],
    )

    # 3. training, from the last checkpoint if there is one
    with resume_hint_on_interrupt(output_dir):
        train_to_end(trainer, checkpoint)

    # 4. the final model: evaluated on whole documents, saved
    if "validation" in corpora:
        measured = trainer.evaluate()
        model.eval()
        scores = evaluate_documents(
            model, tokenizer, corpora["validation"]["text"][:], context_length=data_args.block_length
        )
        measured.update({f"eval_{name}": value for name, value in scores.items()})
        trainer.log_metrics("eval", measured)
        save_metrics(trainer, "eval", measured)
    save_final_model(trainer)
    logger.info(
        f"The model is in {output_dir}. It continues a text: {command_of_script('generate')} --model {output_dir}"
    )


if __name__ == "__main__":
    sys.exit(run(main))
