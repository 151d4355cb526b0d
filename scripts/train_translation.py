#!/usr/bin/env python
r"""Train an encoder-decoder Transformer to translate, from raw parallel text to a model that the Auto classes load.

Two text files, line N of one being the translation of line N of the other:

    python scripts/train_translation.py \
        --train_source_file train.en --train_target_file train.de \
        --validation_source_file val.en --validation_target_file val.de \
        --vocab_size 10000 --max_tokens_per_batch 4096 --max_steps 10000 --warmup_steps 3000 \
        --precision fastest --output_dir runs/en-de

A dataset of the Hub: --dataset_name wmt/wmt14 --dataset_config_name de-en --source_column en --target_column de.
A JSON, CSV or Parquet file: --train_file train.jsonl --source_column en --target_column de.

The optimizer and schedule are the paper's by default. Run the same command again to resume an interrupted run.
A JSON or YAML file of options can come first; options after it replace its own. The paper's settings on WMT 2014 are
in files that need no path:

    python scripts/train_translation.py transformer_base.yaml --output_dir runs/base

Several devices:

    torchrun --nproc_per_node 2 scripts/train_translation.py --train_source_file train.en ...
"""

from hf_vanilla_cli import answer_early, command_of_script


if __name__ == "__main__":  # before the slow imports
    answer_early("train_translation")

import logging
import math
import shutil
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.command_line.checks import (
    check_files_exist,
    check_models,
    check_output_dir,
    check_unused,
    explained_loading,
    explained_model_loading,
)
from hf_vanilla.command_line.options import parse_arguments, run, set_up_logging
from hf_vanilla.command_line.splits import DatasetArguments, check_streaming, hold_out_validation, load_hub_splits
from hf_vanilla.data import load_parallel_dataset, tokenize_parallel_dataset
from hf_vanilla.data.files import is_full_disk
from hf_vanilla.data.parallel import pairs_of_table
from hf_vanilla.data.tokenization import train_tokenizer
from hf_vanilla.metrics import TranslationMetrics
from hf_vanilla.metrics.bleu import check_tokenize
from hf_vanilla.models.text_batches import DEFAULT_MAX_LENGTH, TARGET_TOKENIZER, load_tokenizers
from hf_vanilla.training import (
    VanillaTrainer,
    VanillaTrainingArguments,
    VerifiedCheckpointTrainer,
    WarmupWarning,
    add_early_stopping,
    add_policies,
    average_checkpoints,
    begin_run,
    folder_of_tokenizer,
    last_checkpoints,
    lock_run_folder,
    main_process_first,
    noam_learning_rate,
    paper_optimizers,
    resume_hint_on_interrupt,
    save_final_model,
    save_metrics,
    train_to_end,
)


logger = logging.getLogger("train_translation")

MODEL_SIZES = ("d_model", "d_ff", "num_heads", "d_k", "d_v", "encoder_layers", "decoder_layers")
MODEL_CHOICES = ("norm_position", "position_type")
REGULARISATION = ("dropout", "label_smoothing", "label_smoothing_type")


@dataclass
class ModelArguments:
    """The model and tokenizer to train."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Train this model with its tokenizer (folder or Hub name) instead of a new one."},
    )
    preset: str = field(default="base", metadata={"help": "Row of the paper's Table 3 to start from: base, big, ..."})
    d_model: int | None = field(
        default=None, metadata={"help": "Width of the model. Default: the preset's, also below."}
    )
    d_ff: int | None = field(default=None, metadata={"help": "Inner width of the feed-forward networks."})
    num_heads: int | None = field(default=None, metadata={"help": "Number of attention heads."})
    d_k: int | None = field(default=None, metadata={"help": "Width of a head's keys. Default: d_model / num_heads."})
    d_v: int | None = field(default=None, metadata={"help": "Width of a head's values. Default: d_model / num_heads."})
    encoder_layers: int | None = field(default=None, metadata={"help": "Number of encoder layers."})
    decoder_layers: int | None = field(default=None, metadata={"help": "Number of decoder layers."})
    dropout: float | None = field(default=None, metadata={"help": "Dropout rate where the paper has dropout."})
    norm_position: Literal["post", "pre"] | None = field(default=None, metadata={"help": "post (the paper) or pre."})
    position_type: Literal["sinusoidal", "sinusoidal_split", "sinusoidal_t2t", "learned"] | None = field(
        default=None, metadata={"help": "How positions are encoded; sinusoidal is the paper's."}
    )
    label_smoothing: float | None = field(
        default=None, metadata={"help": "Probability taken from the true token (0 to 1)."}
    )
    label_smoothing_type: Literal["uniform", "t2t", "annotated"] | None = field(
        default=None, metadata={"help": "What it is spread over: all tokens, all others, or all others but padding."}
    )
    tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "Use this tokenizer (folder or Hub name) instead of training one."}
    )
    vocab_size: int = field(
        default=37000, metadata={"help": "Size of the vocabulary to train (of each, if separate)."}
    )
    tokenizer_algorithm: Literal["bpe", "unigram"] = field(
        default="bpe", metadata={"help": "bpe (the paper) or unigram."}
    )
    lowercase: bool = field(default=False, metadata={"help": "Lower-case all text before tokenization."})
    separate_vocabularies: bool = field(
        default=False,
        metadata={"help": "One vocabulary per language instead of a joint one (Chinese and English, say)."},
    )

    def __post_init__(self):
        if self.preset not in VanillaTransformerConfig.preset_names():
            names = ", ".join(VanillaTransformerConfig.preset_names())
            raise ValueError(f"`preset` must be one of {names}; got {self.preset!r}.")


@dataclass
class DataArguments(DatasetArguments):
    """The sentence pairs."""

    train_file: str | None = field(
        default=None, metadata={"help": "A .json(l), .csv or .tsv file, also as .gz, or .parquet."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "The same for validation."})
    source_column: str = field(default="source", metadata={"help": "Column of the source, or its language code."})
    target_column: str = field(default="target", metadata={"help": "Column of the target, or its language code."})
    train_source_file: str | None = field(
        default=None, metadata={"help": "Text file with one source sentence per line."}
    )
    train_target_file: str | None = field(default=None, metadata={"help": "Its translations, line by line."})
    validation_source_file: str | None = field(default=None, metadata={"help": "The same for validation."})
    validation_target_file: str | None = field(default=None, metadata={"help": "The same for validation."})
    max_source_length: int = field(
        default=256, metadata={"help": "Longest source in tokens; longer ones are truncated."}
    )
    max_target_length: int = field(
        default=256, metadata={"help": "Longest target in tokens; longer ones are truncated."}
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read while training, for text larger than the disk; needs max_steps."}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenize. Default: this one."}
    )
    bleu_tokenize: Literal[
        "13a", "zh", "none", "char", "intl", "ja-mecab", "ko-mecab", "flores101", "flores200", "spBLEU-1K"
    ] = field(
        default="13a",
        metadata={"help": "sacreBLEU's tokenizer for validation; some need a package, which is named then."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_tokenize(self.bleu_tokenize)
        if self.source_column == self.target_column:
            raise ValueError(f"`source_column` and `target_column` must differ, both are {self.source_column!r}.")
        names = [f"{split}_{side}file" for split in ("train", "validation") for side in ("", "source_", "target_")]
        given = [name for name in names if getattr(self, name) is not None]
        if self.dataset_name is not None and given:
            raise ValueError(f"Pass either `dataset_name` or `{given[0]}`.")


@dataclass
class TranslationTrainingArguments(VanillaTrainingArguments):
    """Training arguments; the defaults are the paper's optimizer and schedule (section 5.3)."""

    output_dir: str | None = field(default=None, metadata={"help": "Folder of the checkpoints and the final model."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate. Default: d_model^-0.5 * warmup_steps^-0.5, the paper's."}
    )
    lr_scheduler_type: str = field(default="inverse_sqrt", metadata={"help": "inverse_sqrt (the paper), linear, ..."})
    warmup_steps: float = field(
        default=4000,
        metadata={"help": "Updates over which the learning rate grows; in a short run about a third of max_steps."},
    )
    adam_beta2: float = field(default=0.98, metadata={"help": "Adam's second decay rate."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Adam's epsilon."})
    max_grad_norm: float = field(
        default=0.0, metadata={"help": "Clip gradients at this norm; 0 does not (the paper)."}
    )
    logging_steps: float = field(default=50, metadata={"help": "Log the loss every this many updates."})
    predict_with_generate: bool = field(default=True, metadata={"help": "Measure BLEU and chrF in validation."})
    average_last: int = field(
        default=0, metadata={"help": "Average this many last checkpoints into the final model (the paper: 5 or 20)."}
    )

    def __post_init__(self):
        if self.output_dir is None:
            raise ValueError("`output_dir` is missing; give a folder for the model, as in --output_dir runs/en-de.")
        self._given_learning_rate = self.learning_rate
        self.learning_rate = 1.0 if self.learning_rate is None else self.learning_rate
        super().__post_init__()
        self.learning_rate = self._given_learning_rate  # `set_paper_learning_rate` sets what was not given
        self._check_average()

    def _check_average(self) -> None:
        """Check early that there will be enough checkpoints to average."""
        if self.average_last < 0:
            raise ValueError(f"`average_last` must not be negative, got {self.average_last}.")
        if self.average_last > 0 and self.save_strategy in ("no", "best"):
            raise ValueError(
                f"`average_last` ({self.average_last}) needs checkpoints of all intervals; give `save_strategy` as "
                f"steps or epoch, got {SaveStrategy(self.save_strategy).value}."
            )
        if self.average_last > 0 and self.load_best_model_at_end:  # which early stopping sets
            name = "early_stopping_patience" if self.early_stopping_patience > 0 else "load_best_model_at_end"
            raise ValueError(
                f"`average_last` can't be combined with `{name}`: one takes the last checkpoints, the "
                f"other the best; leave one out. {command_of_script('average_checkpoints')} --best averages the best."
            )
        if self.save_total_limit is not None and self.save_total_limit < self.average_last:
            raise ValueError(
                f"`save_total_limit` ({self.save_total_limit}) must be at least `average_last` ({self.average_last}): "
                "older checkpoints are deleted while training."
            )
        # The last step saves too.
        if self.save_strategy == "steps" and 0 < self.max_steps <= (self.average_last - 1) * self.save_steps:
            raise ValueError(
                f"`average_last` ({self.average_last}) checkpoints every `save_steps` ({self.save_steps}) need more "
                f"than `max_steps` ({self.max_steps}): save more often or average fewer."
            )

    def set_paper_learning_rate(self, d_model: int) -> None:
        """Set the paper's peak learning rate unless one was given."""
        if self._given_learning_rate is not None:
            return
        if self.warmup_steps < 1:
            raise ValueError(
                f"`warmup_steps` ({self.warmup_steps}) must be a number of steps for the paper's learning rate; or "
                "give a `learning_rate`."
            )
        self.learning_rate = noam_learning_rate(int(self.warmup_steps), d_model, int(self.warmup_steps))


class EnoughCheckpoints(TrainerCallback):
    """Raises if a run will have too few checkpoints for `average_last`, now that its length is known."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Count the checkpoints that will be saved."""
        by_epochs = args.save_strategy == SaveStrategy.EPOCH
        count = state.num_train_epochs if by_epochs else math.ceil(state.max_steps / max(1, state.save_steps))
        if count < args.average_last:
            raise ValueError(
                f"`average_last` ({args.average_last}) checkpoints can't be averaged: this run of {state.max_steps} "
                f"updates saves {count} (`save_strategy`, `save_steps`). Save more often, or average fewer."
            )


class SaveTargetTokenizer(TrainerCallback):
    """Saves the target's tokenizer in every checkpoint; the trainer saves only the source's."""

    def __init__(self, target_tokenizer):
        self.target_tokenizer = target_tokenizer

    def on_save(self, args, state, control, **kwargs) -> None:
        """Save it in the checkpoint that the trainer has just saved, unless the disk is full."""
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not state.is_world_process_zero or not checkpoint.is_dir():
            return
        try:
            self.target_tokenizer.save_pretrained(checkpoint / TARGET_TOKENIZER)
        except Exception as error:
            if not is_full_disk(error):
                raise
            shutil.rmtree(checkpoint)
            if args.on_disk_full == "stop":
                raise
            logger.warning(f"The disk is full: {checkpoint} is removed, since the target's tokenizer is missing.")


def load_data(arguments: DataArguments, on_bad_record: str = "stop"):
    """Load the pairs as `train` and, if given, `validation`, with columns `source` and `target`."""
    data_files = {}
    for split in ("train", "validation"):
        file = getattr(arguments, f"{split}_file")
        pair = (getattr(arguments, f"{split}_source_file"), getattr(arguments, f"{split}_target_file"))
        if (pair[0] is None) != (pair[1] is None):
            raise ValueError(f"Pass both of `{split}_source_file` and `{split}_target_file`, or neither; got {pair}.")
        if file is not None and pair[0] is not None:
            raise ValueError(f"Pass either `{split}_file` or `{split}_source_file` and `{split}_target_file`.")
        if file is not None or pair[0] is not None:
            data_files[split] = file if file is not None else pair
    names = [f"{split}_{side}file" for split in ("train", "validation") for side in ("", "source_", "target_")]
    check_files_exist(**{name: getattr(arguments, name) for name in names})
    if arguments.dataset_name is None and "train" not in data_files:
        raise ValueError("There is no text to train on; pass `train_file`, or a source and a target file.")
    columns, streaming = (arguments.source_column, arguments.target_column), arguments.streaming
    if arguments.dataset_name is None:
        splits = load_parallel_dataset(
            data_files=data_files or None,
            source_column=columns[0],
            target_column=columns[1],
            streaming=streaming,
            on_bad_record=on_bad_record,
        )
    else:
        tables = load_hub_splits(arguments, streaming=streaming)
        name = arguments.dataset_name
        splits = {
            split: pairs_of_table(table, columns, f"{name} ({split})", on_bad_record)
            for split, table in tables.items()
        }
    splits = hold_out_validation(splits, arguments.validation_share)
    if isinstance(splits.get("validation"), IterableDataset):  # which is read several times
        splits["validation"] = Dataset.from_list(list(splits["validation"]))
    return IterableDatasetDict(splits) if streaming else DatasetDict(splits)


def get_tokenizers(arguments: ModelArguments, pairs, output_dir: Path, saved_in: Path | None):
    """Load or train the tokenizers of source and target, and save them; a joint one is returned twice."""
    path = saved_in or arguments.tokenizer_name_or_path or arguments.model_name_or_path
    if path is not None:
        option = "tokenizer_name_or_path" if arguments.tokenizer_name_or_path else "model_name_or_path"
        with explained_loading(option, path):
            tokenizer, target_tokenizer = load_tokenizers(path)
    else:
        tokenizer, target_tokenizer = train_tokenizers(arguments, pairs)
    if saved_in != output_dir:
        save_tokenizers(tokenizer, target_tokenizer, output_dir)
    return tokenizer, target_tokenizer


def save_tokenizers(tokenizer, target_tokenizer, output_dir: Path) -> None:
    """Save them where `load_tokenizers` finds them, in place of those of a run that was started before."""
    tokenizer.save_pretrained(output_dir)
    if target_tokenizer is not tokenizer:
        target_tokenizer.save_pretrained(output_dir / TARGET_TOKENIZER)
    elif (output_dir / TARGET_TOKENIZER).exists():
        shutil.rmtree(output_dir / TARGET_TOKENIZER)


def train_tokenizers(arguments: ModelArguments, pairs):
    """Train one tokenizer on both sides (the paper's joint vocabulary) or one for each."""

    def texts(*columns):
        return (row[column] for row in pairs for column in columns)

    max_positions = VanillaTransformerConfig.max_position_embeddings
    train = partial(
        train_tokenizer,
        vocab_size=arguments.vocab_size,
        algorithm=arguments.tokenizer_algorithm,
        lowercase=arguments.lowercase,
        model_max_length=DEFAULT_MAX_LENGTH if arguments.position_type != "learned" else max_positions,
    )
    if arguments.separate_vocabularies:
        return train(texts("source")), train(texts("target"))
    joint = train(texts("source", "target"))
    return joint, joint


def given_fields(arguments: ModelArguments) -> dict:
    """Return the config fields that are set by options."""
    given = {name: getattr(arguments, name) for name in MODEL_SIZES + MODEL_CHOICES + REGULARISATION}
    return {name: value for name, value in given.items() if value is not None}


def check_model(model_args: ModelArguments, data_args: DataArguments) -> None:
    """Check sizes and positions before the data is read, and that no option would be left without effect."""
    path = model_args.model_name_or_path
    if path is not None or model_args.tokenizer_name_or_path is not None:
        check_unused(model_args, ("tokenizer_algorithm", "lowercase", "separate_vocabularies"))
    if path is not None:
        return
    config = VanillaTransformerConfig.preset(model_args.preset, **given_fields(model_args))  # checks the sizes
    for name in ("max_source_length", "max_target_length"):
        limit, given = config.max_position_embeddings, getattr(data_args, name)
        if config.position_type == "learned" and given > limit:
            raise ValueError(f"`{name}` ({given}) must be at most {limit}, the learned positions of the model.")


def get_model(arguments: ModelArguments, tokenizer, target_tokenizer):
    """Load a trained model, or build a new one for the tokenizers."""
    given = given_fields(arguments)
    if arguments.model_name_or_path is not None:
        fixed = sorted(given.keys() - set(REGULARISATION))
        if fixed:
            raise ValueError(f"`{fixed[0]}` can't be changed in a trained model (`model_name_or_path`); leave it out.")
        with explained_model_loading("model_name_or_path", arguments.model_name_or_path):
            return AutoModelForSeq2SeqLM.from_pretrained(arguments.model_name_or_path, **given)
    is_joint = target_tokenizer is tokenizer
    config = VanillaTransformerConfig.preset(
        arguments.preset,
        **given,
        vocab_size=len(target_tokenizer),
        source_vocab_size=None if is_joint else len(tokenizer),
        share_encoder_decoder_embeddings=is_joint,
        pad_token_id=target_tokenizer.pad_token_id,
        bos_token_id=target_tokenizer.bos_token_id,
        eos_token_id=target_tokenizer.eos_token_id,
    )
    return VanillaTransformerForConditionalGeneration(config)


def prepare_data(
    model_args: ModelArguments, data_args: DataArguments, on_bad_record: str, output_dir: Path, saved_in: Path | None
):
    """Make token ids from the text: the data, and the tokenizers of source and target."""
    data = load_data(data_args, on_bad_record)
    tokenizer, target_tokenizer = get_tokenizers(model_args, data["train"], output_dir, saved_in)
    data = tokenize_parallel_dataset(
        data,
        tokenizer,
        target_tokenizer,
        max_source_length=data_args.max_source_length,
        max_target_length=data_args.max_target_length,
        num_proc=data_args.preprocessing_num_workers,
    )
    return data, tokenizer, target_tokenizer


def plan(model_args: ModelArguments, data_args: DataArguments, training_args, output_dir: Path):
    """Return what `estimate.py` measures: config, examples and share of the updates of each phase."""
    data, *tokenizers = prepare_data(model_args, data_args, training_args.on_bad_record, output_dir, None)
    return [(get_model(model_args, *tokenizers).config, data["train"], 1.0)]


class VerifiedSeq2SeqTrainer(VerifiedCheckpointTrainer, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with its own batches, and with verified checkpoints and pushes."""


def build_trainer(model, tokenizer, target_tokenizer, data, training_args, bleu_tokenize: str) -> Seq2SeqTrainer:
    """Make a trainer with stock batches, or `VanillaTrainer` if an option needs it."""
    kwargs = {
        "model": model,
        "args": training_args,
        "train_dataset": data["train"],
        "eval_dataset": data.get("validation"),
        "processing_class": tokenizer,
        "data_collator": DataCollatorForSeq2Seq(tokenizer, model=model),
        "callbacks": [WarmupWarning(), EnoughCheckpoints()],
    }
    if target_tokenizer is not tokenizer:
        kwargs["callbacks"].append(SaveTargetTokenizer(target_tokenizer))
    wanted = (training_args.metric_for_best_model or "").removeprefix("eval_")
    if wanted in ("bleu", "chrf") and not training_args.predict_with_generate:
        raise ValueError(f"`metric_for_best_model` {wanted} needs `predict_with_generate`, which is off.")
    if training_args.predict_with_generate and "validation" in data:
        kwargs["compute_metrics"] = TranslationMetrics(
            target_tokenizer, tokenize=bleu_tokenize, num_examples=len(data["validation"])
        )
    changes_loss = training_args.teacher_forcing_ratio < 1 or training_args.consistency_weight > 0
    if training_args.max_tokens_per_batch is not None or changes_loss or training_args.muon:
        return VanillaTrainer(**kwargs)
    if training_args.lr_scheduler_type == "inverse_sqrt":
        kwargs["optimizers"] = paper_optimizers(model.to(training_args.device), training_args)
    trainer = VerifiedSeq2SeqTrainer(**kwargs)
    add_policies(trainer)
    add_early_stopping(trainer)
    return trainer


def use_average_of_last(trainer: Seq2SeqTrainer, count: int) -> None:
    """Replace the trained weights by the mean of the last `count` checkpoints (Vaswani et al. 2017, 6.1)."""
    folder = Path(trainer.args.output_dir) / "averaged"
    with main_process_first(trainer.args):
        if trainer.is_world_process_zero():
            last = last_checkpoints(trainer.args.output_dir, count, until=trainer.state.global_step)
            average_checkpoints(last, folder, overwrite=True)
    averaged = type(trainer.model).from_pretrained(folder)
    trainer.model.load_state_dict(averaged.state_dict())


def main() -> None:
    """Check the options, lock the folder of the run, and train."""
    model_args, data_args, training_args = parse_arguments(
        ModelArguments, DataArguments, TranslationTrainingArguments, description=__doc__
    )
    set_up_logging(training_args)
    check_streaming(data_args, training_args)
    if data_args.streaming and training_args.max_tokens_per_batch is None:
        raise ValueError(
            "`streaming` needs `max_tokens_per_batch`, by which the stream is mixed, batched and resumed."
        )
    check_output_dir(training_args.output_dir)
    check_models(
        model_name_or_path=model_args.model_name_or_path, tokenizer_name_or_path=model_args.tokenizer_name_or_path
    )
    check_model(model_args, data_args)
    with lock_run_folder(training_args.output_dir, is_main_process=training_args.should_save):
        train(model_args, data_args, training_args)


def train(model_args: ModelArguments, data_args: DataArguments, training_args: TranslationTrainingArguments) -> None:
    """Train a model from raw text, in four steps."""
    set_seed(training_args.seed)
    output_dir = Path(str(training_args.output_dir))
    checkpoint, is_finished = begin_run(training_args, model_args, data_args)
    if is_finished:
        return

    # 1. text -> tokenizers -> token ids; the first process does the work, the others read its cache
    with main_process_first(training_args):
        saved_in = folder_of_tokenizer(checkpoint) if checkpoint is not None else None
        if training_args.process_index > 0:
            saved_in = output_dir
        data, tokenizer, target_tokenizer = prepare_data(
            model_args, data_args, training_args.on_bad_record, output_dir, saved_in
        )

    # 2. model and trainer
    model = get_model(model_args, tokenizer, target_tokenizer)
    training_args.set_paper_learning_rate(model.config.d_model)
    logger.info(f"{model.num_parameters():,} parameters, vocabulary {model.config.vocab_size:,}")
    trainer = build_trainer(model, tokenizer, target_tokenizer, data, training_args, data_args.bleu_tokenize)

    # 3. training, from the last checkpoint if there is one
    with resume_hint_on_interrupt(output_dir):
        train_to_end(trainer, checkpoint)

    # 4. the final model: averaged with --average_last, evaluated, saved
    if training_args.average_last > 0:
        use_average_of_last(trainer, training_args.average_last)
    if "validation" in data:
        metrics = trainer.evaluate()
        metrics["eval_perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
        trainer.log_metrics("eval", metrics)
        save_metrics(trainer, "eval", metrics)
    save_final_model(trainer)
    logger.info(f"The model is in {output_dir}. To translate: {command_of_script('translate')} --model {output_dir}")


if __name__ == "__main__":
    sys.exit(run(main))
