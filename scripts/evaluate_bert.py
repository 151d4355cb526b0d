#!/usr/bin/env python
r"""Evaluate a pre-trained BERT on unseen documents: masked tokens and next sentences.

    python scripts/evaluate_bert.py --model runs/bert --files held_out.jsonl.gz other.txt --results_file results.json

Each file is evaluated separately. The documents are packed into pairs as in pre-training; 15 % of the tokens, which
--seed decides, are masked. A model without a next-sentence head is evaluated on masked tokens only, of single segments
as it was pre-trained on. The losses of models with different vocabularies can't be compared. With --max_length 128 512
each file is evaluated with examples of both lengths. --by_position 8 adds the loss of each 8 positions in a row to the
results, which `scripts/plot.py position-losses --results results.json` draws.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("evaluate_bert")

import json
import math
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AutoModelForPreTraining,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    EvalPrediction,
)
from transformers.utils import logging

import hf_vanilla  # noqa: F401  (registers the models)
from hf_vanilla.command_line.checks import check_files_exist, check_models, check_results_file, explained_model_loading
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.command_line.report import write_report
from hf_vanilla.data import (
    build_masked_language_dataset,
    build_pretraining_dataset,
    load_documents,
    mask_statically,
)
from hf_vanilla.metrics import PretrainingMetrics, loss_by_position
from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments


TOKEN_HEAD = "cls.predictions."
NEXT_SENTENCE_HEAD = "cls.seq_relationship.weight"


@dataclass
class EvaluationArguments:
    """The model, the documents and the report."""

    model: str = field(metadata={"help": "Folder or Hub name of the model and its tokenizer."})
    files: list[str] = field(
        metadata={"help": "Documents: .json(l), .csv, .tsv or plain text, also as .gz; .parquet."}
    )
    text_column: str | None = field(
        default=None, metadata={"help": "Column of the text. Default: text, content or document."}
    )
    max_length: list[int] = field(
        default_factory=lambda: [128],
        metadata={"help": "Tokens of an example; several lengths are evaluated in turn."},
    )
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of tokens to predict."})
    batch_size: int = field(default=32, metadata={"help": "Examples of a batch."})
    by_position: int | None = field(
        default=None, metadata={"help": "Also report the loss of masked tokens of each so many positions in a row."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of pairs and masks."})
    results_file: str | None = field(default=None, metadata={"help": "JSON file for metrics, versions and machine."})
    commands: list[str] = field(
        default_factory=list, metadata={"help": "The commands that trained the model, for the report."}
    )
    notes: list[str] = field(default_factory=list, metadata={"help": "More facts for the report, each as name=value."})

    def __post_init__(self):
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"`mlm_probability` must be above 0 and below 1, got {self.mlm_probability}.")
        if self.batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1 example, got {self.batch_size}.")
        if self.by_position is not None and self.by_position < 1:
            raise ValueError(f"`by_position` must be at least 1 position, got {self.by_position}.")
        for note in self.notes:
            if "=" not in note:
                raise ValueError(f"`notes` must be of the form name=value, got {note!r}.")


def measure(
    model, tokenizer, path: str, max_length: int, arguments: EvaluationArguments, *, with_next_sentence: bool
) -> dict[str, Any]:
    """Return the metrics of one file, of examples of one length: pairs, or segments for a model without that head."""
    documents = load_documents(data_files=[path], text_column=arguments.text_column)
    if with_next_sentence:
        examples = build_pretraining_dataset(documents, tokenizer, max_length=max_length, seed=arguments.seed)
    else:
        examples = build_masked_language_dataset(documents, tokenizer, max_length=max_length)
    masked = mask_statically(
        examples,
        tokenizer,
        probability=arguments.mlm_probability,
        max_predictions=math.ceil(arguments.mlm_probability * max_length),
        seed=arguments.seed,
    ).remove_columns(["special_tokens_mask", "offset_mapping"])
    metrics = PretrainingMetrics()
    has_accelerator = torch.accelerator.is_available()
    with tempfile.TemporaryDirectory() as folder:  # the trainer needs one, and writes nothing to it
        training_args = VanillaTrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=arguments.batch_size,
            use_cpu=not has_accelerator,
            dataloader_pin_memory=has_accelerator,
            disable_tqdm=False,
            report_to=[],
            label_names=["labels", *(["next_sentence_label"] if with_next_sentence else [])],
        )
        trainer = VanillaTrainer(
            model,
            training_args,
            DataCollatorForTokenClassification(tokenizer),
            processing_class=tokenizer,
            compute_metrics=metrics,
            preprocess_logits_for_metrics=metrics.preprocess_logits,
        )
        prediction = trainer.predict(masked)
    measured = prediction.metrics
    names = ("mlm_loss", "mlm_accuracy", "nsp_accuracy") if with_next_sentence else ("mlm_loss", "mlm_accuracy")
    figures = {name: round(measured[f"test_{name}"], 4) for name in names}
    if not math.isfinite(figures["mlm_loss"] + measured["test_loss"]):  # which has that of next sentences too
        raise ValueError(
            f"The loss of the model ({arguments.model}) on {path} is nan or infinite. Either its weights are nan "
            '(train it again), or values overflow in its dtype (save it with `dtype="float32"`).'
        )
    figures |= {"documents": len(documents), "pairs" if with_next_sentence else "segments": len(masked)}
    if arguments.by_position is not None:
        by_position = loss_by_position(
            EvalPrediction(prediction.predictions, prediction.label_ids), arguments.by_position
        )
        losses = [loss if loss is None else round(loss, 4) for loss in by_position["loss"]]
        figures["by_position"] = {**by_position, "loss": losses}
    return figures


def main() -> None:
    """Load the model, evaluate it on each file, and report."""
    (arguments,) = parse_arguments(EvaluationArguments, description=__doc__)
    logging.set_verbosity_error()
    check_files_exist(files=arguments.files)
    for path in arguments.files:
        check_results_file(arguments.results_file, files=path)
    check_models(model=arguments.model)
    with explained_model_loading("model", arguments.model):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model, loading = AutoModelForPreTraining.from_pretrained(arguments.model, output_loading_info=True)
    if any(name.startswith(TOKEN_HEAD) for name in loading["missing_keys"]):
        raise ValueError(
            f"`model` must have a head for masked tokens, but {arguments.model} has none; give the pre-trained model."
        )
    with_next_sentence = NEXT_SENTENCE_HEAD not in loading["missing_keys"]
    lengths = arguments.max_length
    positions = model.config.max_position_embeddings
    if max(lengths) > positions:
        raise ValueError(
            f"`max_length` must be at most {positions}, the positions of the model ({arguments.model}), "
            f"got {max(lengths)}."
        )
    figures = {
        path if len(lengths) == 1 else f"{path}, {length} tokens": measure(
            model, tokenizer, path, length, arguments, with_next_sentence=with_next_sentence
        )
        for path in arguments.files
        for length in lengths
    }
    unit = "pair" if with_next_sentence else "segment"
    report = {
        "files": figures,
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "masking": f"{arguments.mlm_probability:.0%} of the tokens, an exact number in each {unit}, 80/10/10",
        "max_length": lengths[0] if len(lengths) == 1 else lengths,
        "seed": arguments.seed,
        "notes": dict(note.split("=", 1) for note in arguments.notes),
        "commands": arguments.commands,
    }
    shown = {path: {k: v for k, v in each.items() if k != "by_position"} for path, each in figures.items()}
    print(json.dumps(shown, indent=2, ensure_ascii=False))
    if arguments.results_file is not None:
        write_report(arguments.results_file, report)


if __name__ == "__main__":
    sys.exit(run(main))
