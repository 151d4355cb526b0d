#!/usr/bin/env python
r"""Pre-train BERT, from raw documents to a model that the Auto classes load: masked tokens and next sentences.

Plain text has blank lines between documents; in .jsonl, .csv and .parquet files each row is one:

    python scripts/pretrain_bert.py \
        --train_files encyclopedia.jsonl.gz novels.txt --validation_files held_out.jsonl.gz \
        --preset mini --vocab_size 16000 --max_tokens_per_batch 16384 --max_steps 20000 --warmup_steps 1000 \
        --precision fastest --output_dir runs/bert

A dataset of the Hub: --dataset_name wikimedia/wikipedia --dataset_config_name 20231101.simple --validation_share 0.01.
Further pre-training of any BERT on text of your domain: --model_name_or_path google-bert/bert-base-uncased.

Nine tenths of the updates have sequences of 128 tokens, the last tenth of 512, as in the paper. In a short run a small
model learns more than word frequencies sooner if it starts with even shorter ones: --phase_lengths 32 128 512
--phase_shares 0.15 0.75 0.1. It learns the positions of the last phase in few updates only with help: --mixed_phases 2
with --shifted_positions 0.25. --muon --weight_decay 0.1 and --initial_embeddings examples save a small model many
updates. Validation has the length of each phase. The optimizer is the paper's by default.

Run the same command again to resume an interrupted run; other data or another model is refused. A JSON or YAML file of
options can come first; options after it replace its own. The paper's settings are in files that need no path:

    python scripts/pretrain_bert.py bert_base.yaml --output_dir runs/bert

Several devices:

    torchrun --nproc_per_node 2 scripts/pretrain_bert.py --train_files encyclopedia.jsonl.gz ...
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("pretrain_bert")

import logging
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, DataCollatorForLanguageModeling, set_seed

from hf_vanilla import VanillaBertConfig, VanillaBertForMaskedLM, VanillaBertForPreTraining
from hf_vanilla.command_line.checks import (
    check_files_exist,
    check_models,
    check_output_dir,
    check_unused,
    explained_loading,
    explained_model_loading,
)
from hf_vanilla.command_line.options import parse_arguments, run, set_up_logging
from hf_vanilla.command_line.splits import DatasetArguments, load_document_splits
from hf_vanilla.data import (
    ShiftedPositionsCollator,
    WholeWordMaskingCollator,
    build_masked_language_dataset,
    build_pretraining_dataset,
    mask_statically,
)
from hf_vanilla.data.tokenization import train_wordpiece_tokenizer
from hf_vanilla.metrics import PretrainingMetrics
from hf_vanilla.models.checks import check_heads
from hf_vanilla.training import (
    Phase,
    PretrainingTrainer,
    VanillaTrainingArguments,
    WarmupWarning,
    begin_run,
    folder_of_tokenizer,
    initialize_from_examples,
    lock_run_folder,
    main_process_first,
    plan_phases,
    resume_hint_on_interrupt,
    save_final_model,
    save_metrics,
    train_to_end,
)


logger = logging.getLogger("pretrain_bert")

MODEL_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
REGULARISATION = ("hidden_dropout_prob", "attention_probs_dropout_prob")


@dataclass
class ModelArguments:
    """The model and tokenizer to train."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Train this BERT with its tokenizer (folder or Hub name) instead of a new one."},
    )
    preset: str = field(
        default="base", metadata={"help": "Size to start from: base, large, tiny, mini, small, medium, L-6_H-256, ..."}
    )
    hidden_size: int | None = field(
        default=None, metadata={"help": "Width of the model. Default: the preset's, also below."}
    )
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Number of layers."})
    num_attention_heads: int | None = field(default=None, metadata={"help": "Number of attention heads."})
    intermediate_size: int | None = field(default=None, metadata={"help": "Inner width of the feed-forward networks."})
    hidden_dropout_prob: float | None = field(default=None, metadata={"help": "Dropout rate; the paper's is 0.1."})
    attention_probs_dropout_prob: float | None = field(
        default=None, metadata={"help": "Dropout rate of attention weights; the paper's is 0.1."}
    )
    initial_embeddings: Literal["random", "examples"] = field(
        default="random",
        metadata={
            "help": "How the embeddings of a new model start: random, as in the paper, or from the examples: tokens "
            "from their neighbours, positions as sinusoids. A small model then learns much faster at first."
        },
    )
    no_next_sentence_prediction: bool = field(default=False, metadata={"help": "Train on masked tokens only."})
    tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "Use this tokenizer (folder or Hub name) instead of training one."}
    )
    vocab_size: int = field(default=30522, metadata={"help": "Size of the vocabulary to train."})
    cased: bool = field(default=False, metadata={"help": "Keep case and accents in the vocabulary to train."})
    alphabet_size: int = field(
        default=1000, metadata={"help": "Different characters in the vocabulary to train; 6000 or more for Chinese."}
    )

    def __post_init__(self):
        if self.preset not in VanillaBertConfig.preset_names():
            names = ", ".join(VanillaBertConfig.preset_names())
            raise ValueError(f"`preset` must be one of {names}; got {self.preset!r}.")


@dataclass
class DataArguments(DatasetArguments):
    """The documents, and how to make examples of them."""

    train_files: list[str] | None = field(
        default=None, metadata={"help": "Documents: .json(l), .csv, .tsv or plain text, also as .gz; .parquet."}
    )
    validation_files: list[str] | None = field(default=None, metadata={"help": "The same for validation."})
    text_column: str | None = field(
        default=None, metadata={"help": "Column of the text. Default: text, content or document."}
    )
    phase_lengths: list[int] = field(
        default_factory=lambda: [128, 512], metadata={"help": "Tokens of an example in each phase."}
    )
    phase_shares: list[float] = field(
        default_factory=lambda: [0.9, 0.1], metadata={"help": "Share of the updates of each phase."}
    )
    phase_learning_rates: list[float] | None = field(
        default=None,
        metadata={
            "help": "Peak learning rate of each phase, from which it falls towards 0 at the end of the run, in place "
            "of learning_rate. Default: one schedule over all phases."
        },
    )
    phase_warmup_steps: list[int] | None = field(
        default=None,
        metadata={
            "help": "Updates from the start of each phase to its peak learning rate, in place of warmup_steps; with "
            "phase_learning_rates."
        },
    )
    mixed_phases: int = field(
        default=0,
        metadata={"help": "Mix the updates of the last so many phases, in place of one phase after another."},
    )
    new_positions: Literal["random", "repeat", "interpolate"] = field(
        default="random",
        metadata={
            "help": "How embeddings of positions start that no earlier phase had: random, as in the paper, or as the "
            "learned ones, repeated or stretched."
        },
    )
    shifted_positions: float = field(
        default=0.0,
        metadata={
            "help": "Share of the training examples whose positions start at a random place (Kiyono et al. 2021): "
            "late positions are then learned from short examples, too."
        },
    )
    validation_lengths: list[int] | None = field(
        default=None,
        metadata={
            "help": "Tokens of an example in validation, each length apart. Default: those of the phases; with "
            "load_best_model_at_end that of the largest.",
            "aliases": ["--validation_length"],
        },
    )
    repeats: int = field(default=1, metadata={"help": "Passes over the documents, each with other random pairs."})
    short_sequence_probability: float = field(default=0.1, metadata={"help": "Share of examples that are shorter."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of tokens to predict."})
    whole_word_mask: bool = field(default=False, metadata={"help": "Mask whole words instead of single word pieces."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that build examples."})


@dataclass
class PretrainingArguments(VanillaTrainingArguments):
    """Training arguments; the defaults are the paper's optimizer and schedule (A.2)."""

    output_dir: str | None = field(default=None, metadata={"help": "Folder of the checkpoints and the final model."})
    max_tokens_per_batch: int | None = field(
        default=16384, metadata={"help": "Size of a batch of one device in tokens, padding included."}
    )
    max_steps: int = field(default=1_000_000, metadata={"help": "Number of updates, over all phases."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    warmup_steps: float = field(
        default=10_000,
        metadata={"help": "Updates over which the learning rate grows; at most about a third of max_steps."},
    )
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay, except for biases and norms."})
    logging_steps: float = field(default=50, metadata={"help": "Log the loss every this many updates."})
    adam_epsilon: float = field(default=1e-6, metadata={"help": "Adam's epsilon (the authors' code)."})
    teacher_forcing_ratio: float = field(default=1.0, init=False)  # of translators, as the next
    consistency_weight: float = field(default=0.0, init=False)

    def __post_init__(self):
        if self.output_dir is None:
            raise ValueError("`output_dir` is missing; give a folder for the model, as in --output_dir runs/bert.")
        super().__post_init__()


def check_phases(data_args: DataArguments) -> None:
    """Check the phases before the examples are built."""
    if len(data_args.phase_lengths) != len(data_args.phase_shares):
        raise ValueError(
            f"`phase_lengths` ({data_args.phase_lengths}) and `phase_shares` ({data_args.phase_shares}) must be "
            "equal in number."
        )
    for name in ("phase_learning_rates", "phase_warmup_steps"):
        given = getattr(data_args, name)
        if (given is None) != (data_args.phase_learning_rates is None):
            raise ValueError("`phase_learning_rates` and `phase_warmup_steps` go together; give both or neither.")
        if given is not None and len(given) != len(data_args.phase_lengths):
            raise ValueError(f"`{name}` ({given}) must have a number for each of {data_args.phase_lengths}.")
    if not 0 < data_args.mlm_probability < 1:
        raise ValueError(f"`mlm_probability` must be above 0 and below 1, got {data_args.mlm_probability}.")
    for name in ("shifted_positions", "short_sequence_probability"):
        if not 0 <= getattr(data_args, name) <= 1:
            raise ValueError(f"`{name}` must be from 0 to 1, got {getattr(data_args, name)}.")
    if data_args.repeats < 1:
        raise ValueError(f"`repeats` must be at least 1, got {data_args.repeats}.")
    if abs(sum(data_args.phase_shares) - 1) > 1e-6:
        raise ValueError(f"`phase_shares` must add up to 1, got {data_args.phase_shares}.")


def longest_of(data_args: DataArguments) -> int:
    """Return the tokens of the longest examples, in training or validation."""
    return max(*data_args.phase_lengths, *(data_args.validation_lengths or ()))


def get_tokenizer(arguments: ModelArguments, documents, longest: int, output_dir: Path, saved_in: Path | None):
    """Load or train the tokenizer, and save it."""
    path = saved_in or arguments.tokenizer_name_or_path or arguments.model_name_or_path
    if path is not None:
        option = "tokenizer_name_or_path" if arguments.tokenizer_name_or_path else "model_name_or_path"
        with explained_loading(option, path):
            tokenizer = AutoTokenizer.from_pretrained(path)
    else:
        logger.info("Counting words for the vocabulary.")
        tokenizer = train_wordpiece_tokenizer(
            (row["text"] for row in documents),
            arguments.vocab_size,
            lowercase=not arguments.cased,
            alphabet_size=arguments.alphabet_size,
            model_max_length=max(longest, VanillaBertConfig.max_position_embeddings),
        )
    if saved_in != output_dir:
        tokenizer.save_pretrained(output_dir)
    return tokenizer


def adapt_to_phases(model_args: ModelArguments, data_args: DataArguments, training_args: PretrainingArguments) -> None:
    """Check the options of the phases together with those of model and trainer, and set what follows from them."""
    check_phases(data_args)
    if model_args.initial_embeddings != "random" and model_args.model_name_or_path is not None:
        raise ValueError(
            f"`initial_embeddings` ({model_args.initial_embeddings}) is for a new model, but `model_name_or_path` has "
            "learned its own; leave one of the two out."
        )
    if data_args.new_positions != "random" and model_args.model_name_or_path is not None:
        raise ValueError(
            f"`new_positions` ({data_args.new_positions}) is for a new model, but that of `model_name_or_path` "
            "has learned its positions; leave one of the two out."
        )
    for name in ("repeats", "short_sequence_probability"):
        given = getattr(data_args, name)
        if model_args.no_next_sentence_prediction and given != getattr(DataArguments, name):
            raise ValueError(
                f"`{name}` ({given}) is for pairs of segments, not for `no_next_sentence_prediction`; leave one out."
            )
    if data_args.new_positions != "random" and data_args.shifted_positions > 0:
        raise ValueError(
            f"`new_positions` ({data_args.new_positions}) would replace what `shifted_positions` "
            f"({data_args.shifted_positions}) has taught the positions of the next phase; leave one of the two out."
        )
    if data_args.phase_learning_rates is not None and data_args.phase_warmup_steps is not None:
        training_args.learning_rate = data_args.phase_learning_rates[0]
        training_args.warmup_steps = data_args.phase_warmup_steps[0]
    phases = [Phase(Dataset.from_dict({}), **settings) for _, settings in phases_of(data_args)]
    plan_phases(phases, training_args, data_args.mixed_phases)  # checks them before the examples are built
    lengths = data_args.validation_lengths
    if training_args.load_best_model_at_end:
        if lengths is None:
            lengths = [data_args.phase_lengths[data_args.phase_shares.index(max(data_args.phase_shares))]]
        if len(lengths) > 1:
            raise ValueError(
                f"`validation_lengths` must be one length for `early_stopping_patience` and `load_best_model_at_end`, "
                f"got {lengths}."
            )
    data_args.validation_lengths = lengths or sorted({length for length, _ in phases_of(data_args)})


def phases_of(data_args: DataArguments) -> list[tuple[int, dict[str, Any]]]:
    """Return the length of each phase that has updates, and its share and learning rate."""
    settings: list[dict[str, Any]] = [{"share": share} for share in data_args.phase_shares]
    if data_args.phase_learning_rates is not None and data_args.phase_warmup_steps is not None:
        rates = zip(data_args.phase_learning_rates, data_args.phase_warmup_steps, strict=True)
        for each, (rate, warmup) in zip(settings, rates, strict=True):
            each |= {"learning_rate": rate, "warmup_steps": warmup}
    phases = zip(data_args.phase_lengths, settings, strict=True)
    return [(length, each) for length, each in phases if each["share"] > 0]


def build_examples(model_args: ModelArguments, data_args: DataArguments, corpora, tokenizer, seed: int):
    """Build the examples of each phase, and validation examples with fixed masks, of each length."""

    def build(documents, length: int):
        if model_args.no_next_sentence_prediction:
            return build_masked_language_dataset(
                documents, tokenizer, max_length=length, num_proc=data_args.preprocessing_num_workers
            )
        return build_pretraining_dataset(
            documents,
            tokenizer,
            max_length=length,
            short_sequence_probability=data_args.short_sequence_probability,
            repeats=data_args.repeats,
            seed=seed,
            num_proc=data_args.preprocessing_num_workers,
        )

    phases = [Phase(build(corpora["train"], length), **settings) for length, settings in phases_of(data_args)]
    if "validation" not in corpora:
        return phases, None
    held_out = {
        f"{length}_tokens": mask_statically(
            build(corpora["validation"], length),
            tokenizer,
            probability=data_args.mlm_probability,
            max_predictions=math.ceil(data_args.mlm_probability * length),
        ).remove_columns(["special_tokens_mask", "offset_mapping"])
        for length in data_args.validation_lengths or ()
    }
    return phases, held_out if len(held_out) > 1 else next(iter(held_out.values()), None)


def prepare_data(
    model_args: ModelArguments, data_args: DataArguments, training_args, output_dir: Path, saved_in: Path | None
):
    """Make examples from the documents: phases, validation examples and the tokenizer."""
    corpora = load_document_splits(data_args, on_bad_record=training_args.on_bad_record)
    tokenizer = get_tokenizer(model_args, corpora["train"], longest_of(data_args), output_dir, saved_in)
    return *build_examples(model_args, data_args, corpora, tokenizer, training_args.seed), tokenizer


def plan(model_args: ModelArguments, data_args: DataArguments, training_args, output_dir: Path):
    """Return what `estimate.py` measures: config, examples and share of the updates of each phase."""
    check_phases(data_args)
    phases, _, tokenizer = prepare_data(model_args, data_args, training_args, output_dir, None)
    config = get_model(model_args, tokenizer, longest_of(data_args)).config
    return [(config, phase.dataset, phase.share) for phase in phases]


def given_fields(arguments: ModelArguments) -> dict:
    """Return the config fields that are set by options."""
    given = {name: getattr(arguments, name) for name in MODEL_SIZES + REGULARISATION}
    return {name: value for name, value in given.items() if value is not None}


def check_model(arguments: ModelArguments, longest: int) -> None:
    """Check sizes and positions before the data is read."""
    path = arguments.model_name_or_path
    if path is not None or arguments.tokenizer_name_or_path is not None:
        check_unused(arguments, ("cased", "alphabet_size"))
    if path is None:
        check_heads(VanillaBertConfig.preset(arguments.preset, **given_fields(arguments)))  # and the sizes
        return
    with explained_loading("model_name_or_path", path):
        positions = AutoConfig.from_pretrained(path).max_position_embeddings
    if longest > positions:
        raise ValueError(
            f"`phase_lengths` and `validation_lengths` must be at most {positions}, the positions of {path}; "
            f"got {longest}."
        )


def get_model(arguments: ModelArguments, tokenizer, longest: int):
    """Load a trained model, or build a new one for the tokenizer."""
    model_class = VanillaBertForMaskedLM if arguments.no_next_sentence_prediction else VanillaBertForPreTraining
    given = given_fields(arguments)
    if arguments.model_name_or_path is not None:
        fixed = sorted(given.keys() - set(REGULARISATION))
        if fixed:
            raise ValueError(f"`{fixed[0]}` can't be changed in a trained model (`model_name_or_path`); leave it out.")
        with explained_model_loading("model_name_or_path", arguments.model_name_or_path):
            model = model_class.from_pretrained(arguments.model_name_or_path, **given)
        if len(tokenizer) > model.config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens, but the model `{arguments.model_name_or_path}` only "
                f"{model.config.vocab_size}; give the model's own tokenizer."
            )
        return model
    positions = max(longest, VanillaBertConfig.max_position_embeddings)
    config = VanillaBertConfig.preset(
        arguments.preset,
        **given,
        vocab_size=len(tokenizer),
        max_position_embeddings=positions,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model_class(config)


def main() -> None:
    """Check the options, lock the folder of the run, and train."""
    model_args, data_args, training_args = parse_arguments(
        ModelArguments, DataArguments, PretrainingArguments, description=__doc__
    )
    set_up_logging(training_args)
    adapt_to_phases(model_args, data_args, training_args)
    check_output_dir(training_args.output_dir)
    check_models(
        model_name_or_path=model_args.model_name_or_path, tokenizer_name_or_path=model_args.tokenizer_name_or_path
    )
    check_files_exist(train_files=data_args.train_files, validation_files=data_args.validation_files)
    check_model(model_args, longest_of(data_args))
    with lock_run_folder(training_args.output_dir, is_main_process=training_args.should_save):
        train(model_args, data_args, training_args)


def train(model_args: ModelArguments, data_args: DataArguments, training_args: PretrainingArguments) -> None:
    """Pre-train a model from documents, in four steps."""
    set_seed(training_args.seed)
    output_dir = Path(str(training_args.output_dir))
    checkpoint, is_finished = begin_run(training_args, model_args, data_args)
    if is_finished:
        return

    # 1. documents -> tokenizer -> examples; the first process does the work, the others read its cache
    with main_process_first(training_args):
        saved_in = folder_of_tokenizer(checkpoint) if checkpoint is not None else None
        if training_args.process_index > 0:
            saved_in = output_dir
        phases, held_out, tokenizer = prepare_data(model_args, data_args, training_args, output_dir, saved_in)
    for phase, (length, _) in zip(phases, phases_of(data_args), strict=True):
        logger.info(f"{len(phase.dataset):,} examples of up to {length} tokens")

    # 2. model and trainer
    model = get_model(model_args, tokenizer, longest_of(data_args))
    logger.info(f"{model.num_parameters():,} parameters, vocabulary {model.config.vocab_size:,}")
    if model_args.initial_embeddings == "examples" and checkpoint is None:
        initialize_from_examples(model, phases[-1].dataset, training_args.seed)
    metrics = PretrainingMetrics()
    if data_args.whole_word_mask:
        training_args.remove_unused_columns = False
        collator: Any = WholeWordMaskingCollator(tokenizer, data_args.mlm_probability)
    else:
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=data_args.mlm_probability)
    if data_args.shifted_positions > 0:
        collator = ShiftedPositionsCollator(
            collator, data_args.shifted_positions, model.config.max_position_embeddings
        )
    trainer = PretrainingTrainer(
        model,
        training_args,
        collator,
        phases=phases,
        eval_dataset=held_out,
        processing_class=tokenizer,
        compute_metrics=metrics,
        callbacks=[WarmupWarning()],
        mixed_phases=data_args.mixed_phases,
        new_positions=data_args.new_positions,
        preprocess_logits_for_metrics=metrics.preprocess_logits,
    )

    # 3. training, from the last checkpoint if there is one
    with resume_hint_on_interrupt(output_dir):
        train_to_end(trainer, checkpoint)

    # 4. the final model: evaluated, saved
    if held_out is not None:
        measured = trainer.evaluate()
        trainer.log_metrics("eval", measured)
        save_metrics(trainer, "eval", measured)
    save_final_model(trainer)
    logger.info(f"The model is in {output_dir}. To fine-tune it, give this folder as --model_name_or_path.")


if __name__ == "__main__":
    sys.exit(run(main))
