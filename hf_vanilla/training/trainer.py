"""A `Seq2SeqTrainer` with batches of a fixed number of tokens, the paper's schedule and safe checkpoints.

Everything here is optional: the stock `Seq2SeqTrainer` trains the same models with its own batches. The docstring of
[`VanillaTrainer`] lists what it adds.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput, SchedulerType, seed_worker
from transformers.utils import logging

from ..data.batching import LengthSortedBatchSampler, PairLengths, TokenBudgetBatchSampler, measure_pair_lengths
from ..data.streams import TokenBudgetStream
from ..models.checks import IGNORED_LABEL
from ..models.configuration_vanilla_gpt import VanillaGptConfig
from ..models.modeling_vanilla_gpt import next_tokens
from ..models.read_positions import host_sizes
from ..models.self_contained import VanillaPreTrainedModel
from ..models.varlen_attention import has_varlen_kernels
from .arguments import VanillaTrainingArguments, add_early_stopping
from .checkpointing import VerifiedCheckpointTrainer
from .consistency import ConsistencyLoss, twice
from .manifest import order_seed
from .policies import add_policies
from .recipes import inverse_sqrt_schedule_from_one
from .streaming import StreamedTraining, check_stream, stream_of_tokens


logger = logging.get_logger(__name__)


MEASURED_DATASETS_KEPT = 8  # more than a trainer usually has; bounds the memory of a long-lived one


class CountingCollator:
    """Adds to each batch the numbers of its tokens and labels, for which a model would have to wait for its GPU.

    Args:
        collator (`Callable`): Makes a batch out of rows.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], Any]) -> None:
        self.collator = collator

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate and count.

        Args:
            rows (`list[dict[str, Any]]`): The rows.

        Returns:
            `dict[str, Any]`: the collator's batch, with `mask_sizes`.
        """
        batch = dict(self.collator(rows))
        sizes = host_sizes(batch.get("attention_mask"), batch.get("labels"))
        return {**batch, "mask_sizes": {name: tuple(each) for name, each in sizes.items()}}


class VanillaTrainer(VerifiedCheckpointTrainer, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with token-budget batches, the paper's schedule, scheduled sampling and checks for nan.

    - `max_tokens_per_batch` makes batches of a number of tokens instead of a number of sentences, in training with
      [`~hf_vanilla.data.batching.TokenBudgetBatchSampler`], in evaluation longest first. Predictions are returned, and
      passed to `compute_metrics`, in the order of the dataset. `eval_loss` is then the exact mean over the tokens of
      all batches and processes; with stock batches it is the stock mean over batches. The loss of next-sentence
      prediction in it depends on the batches: the mean of each counts by the batch's masked tokens. With
      `batch_eval_metrics`, `compute_metrics` gets the batches in the order of evaluation.
    - With `max_tokens_per_batch`, a `datasets.IterableDataset` to train on becomes a
      [`~hf_vanilla.data.TokenBudgetStream`], or give one with other settings. It is read until `max_steps`, pass after
      pass. Each process saves its state in the checkpoints, and a resumed run ends with the same weights.
    - `lr_scheduler_type="inverse_sqrt"` counts its steps from 1 as the paper's formula does. The stock trainer counts
      from 0, so its first update has a learning rate of 0.
    - `teacher_forcing_ratio` below 1 feeds the decoder partly with the model's own predictions.
    - `consistency_weight` above 0 trains by R-Drop: each pair twice, with like predictions under different dropout.
    - `muon` updates the matrices of the layers by Muon ([`~hf_vanilla.training.muon.MuonTrainer`]).
    - The default data collator is `DataCollatorForSeq2Seq` if `processing_class` is a tokenizer.
    - `early_stopping_patience` adds transformers' `EarlyStoppingCallback`.
    - A loss, gradient or weight that is nan or infinite stops the run before anything is saved. `on_nan="skip"` leaves
      such updates out, and `on_nan="rollback"` returns to a checkpoint
      ([`~hf_vanilla.training.NaNPolicyCallback`]). `stop_on_divergence` stops at a loss that rises far
      ([`~hf_vanilla.training.StopOnDivergenceCallback`]).
    - On a GPU, training batches hold their numbers of tokens and labels, so that no step has to wait to count them
      ([`CountingCollator`]).
    - Checkpoints are written in one step, and verified when a run resumes from them
      ([`~hf_vanilla.training.VerifiedCheckpointTrainer`]).

    Args:
        model (`PreTrainedModel`, *optional*): The model to train, unless `model_init` is among the other arguments.
        args (`VanillaTrainingArguments`, *optional*): The training arguments.
        data_collator (`Callable`, *optional*): Makes a batch out of rows.
        **kwargs (`Any`): The other arguments of `Seq2SeqTrainer`.

    Raises:
        TypeError: if `args` is not a `VanillaTrainingArguments`.
        ValueError: if `consistency_weight` is above 0 for a model other than a `VanillaTransformer`, if
            `teacher_forcing_ratio` is below 1 for a model without a decoder of its own, if
            `label_smoothing_factor` is set with it or for a model that computes its own loss differently, if
            `max_tokens_per_batch` is set and the training data has no length and is no `datasets.IterableDataset`,
            if a `TokenBudgetStream` is not for this process, or if more than one `dataloader_num_workers` would read
            one.
    """

    args: VanillaTrainingArguments
    lr_scheduler: Any
    compute_metrics: Any

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        args: VanillaTrainingArguments | None = None,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            args = VanillaTrainingArguments()
        _check_class(args)
        train_dataset = kwargs.get("train_dataset")
        _check_training_data(train_dataset, args)
        if isinstance(train_dataset, datasets.IterableDataset) and args.max_tokens_per_batch is not None:
            kwargs["train_dataset"] = stream_of_tokens(train_dataset, args)
        accelerator_config: Any = args.accelerator_config
        if args.max_tokens_per_batch is not None:
            # accelerate before 1.14 refuses batches of unequal size otherwise. These samplers give every process the
            # same number of batches anyway; those of the stock trainer do not, and so need even batches.
            accelerator_config.even_batches = False
        if args.device.type == "cuda" and args.dataloader_pin_memory:  # or each batch would wait for the step before
            accelerator_config.non_blocking = True
        super().__init__(model, args, data_collator, **kwargs)
        if data_collator is None and isinstance(self.processing_class, PreTrainedTokenizerBase):
            self.data_collator = DataCollatorForSeq2Seq(self.processing_class, model=self.model)
        _check_consistency(args)
        _check_teacher_forcing(args, self.model)
        if args.consistency_weight > 0:
            self.compute_loss_func = ConsistencyLoss(self.model.config, args.consistency_weight)
        self.add_callback(_EpochOfBatchSampler())
        add_policies(self)
        add_early_stopping(self)
        self._lengths_of_datasets: dict[int, tuple[Dataset, PairLengths]] = {}
        self._sentences_per_update: int | None = None
        self._eval_loss: _TokenMeanLoss | None = None
        self._stream: StreamedTraining | None = None

    def get_train_dataloader(self) -> DataLoader:
        """Return the training dataloader, with batches of `max_tokens_per_batch` tokens if that is set.

        Returns:
            `DataLoader`: prepared by accelerate, with the same number of batches on each process.

        Raises:
            ValueError: if the training data has no length, holds a pair longer than the budget, or lacks the labels of
                an encoder-decoder.
        """
        max_tokens = self.args.max_tokens_per_batch
        self._stream = None
        if isinstance(self.train_dataset, TokenBudgetStream):
            collator = self._get_collator_with_removed_columns(self._training_collator(), description="Training")
            self._stream = StreamedTraining(self.train_dataset, collator, self.args, self._resumed_from)
            return self._stream.dataloader(self.accelerator)
        if max_tokens is None or self.train_dataset is None:
            collator, self.data_collator = self.data_collator, self._training_collator()
            try:
                return super().get_train_dataloader()
            finally:
                self.data_collator = collator
        _check_training_data(self.train_dataset, self.args)
        lengths = self._lengths(self.train_dataset)
        if lengths.target is None and getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            raise ValueError("`train_dataset` must have a column `labels`; tokenize the target side.")
        batches_per_update = self.args.world_size * self.args.gradient_accumulation_steps
        sampler = TokenBudgetBatchSampler(
            lengths.source,
            lengths.source if lengths.target is None else lengths.target,
            max_tokens,
            seed=order_seed(self.args),
            batches_per_step=batches_per_update,
        )
        self._sentences_per_update = max(1, round(len(lengths.source) * batches_per_update / max(1, len(sampler))))
        return self._dataloader(self.train_dataset, sampler, "Training", is_training=True)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """Return the evaluation dataloader, with batches of `max_tokens_per_batch` tokens if that is set.

        Args:
            eval_dataset (`str` or `Dataset`, *optional*): A dataset, or the name of one of `self.eval_dataset`; the
                default is `self.eval_dataset`.

        Returns:
            `DataLoader`: longest pairs first, with the same numbers of batches and of rows on each process.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, dict):
            dataset = self.eval_dataset[dataset]
        if self.args.max_tokens_per_batch is None or not _is_indexable(dataset):
            return super().get_eval_dataloader(eval_dataset)
        return self._sorted_dataloader(dataset, self.args.max_tokens_per_batch, "Evaluation")

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """Return the dataloader of `predict`, with batches of `max_tokens_per_batch` tokens if that is set.

        Args:
            test_dataset (`Dataset`): The rows to predict.

        Returns:
            `DataLoader`: longest pairs first, with the same numbers of batches and of rows on each process.
        """
        if self.args.max_tokens_per_batch is None or not _is_indexable(test_dataset):
            return super().get_test_dataloader(test_dataset)
        return self._sorted_dataloader(test_dataset, self.args.max_tokens_per_batch, "Prediction")

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the number of sentences of one update, the mean number for token-budget batches.

        Args:
            args (`TrainingArguments`): The arguments of the run.

        Returns:
            `int`: sentences of one update over all processes and accumulated batches.
        """
        if self._sentences_per_update is None:
            return super().get_total_train_batch_size(args)
        return self._sentences_per_update

    def _sorted_dataloader(self, dataset: Dataset, max_tokens: int, description: str) -> DataLoader:
        """Batch `dataset` by tokens, longest first."""
        lengths = self._lengths(dataset).longer_side()
        sampler = LengthSortedBatchSampler(lengths, max_tokens, num_processes=self.args.world_size)
        return self._dataloader(dataset, sampler, description, is_training=False)

    def _dataloader(
        self, dataset: Any, batch_sampler: Sampler[list[int]], description: str, *, is_training: bool
    ) -> DataLoader:
        """Build a dataloader over the batches of `batch_sampler`, with the arguments of the stock one."""
        data_collator = self._training_collator() if is_training else self.data_collator
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        elif not getattr(dataset, "has_used_columns", False):
            data_collator = self._get_collator_with_removed_columns(data_collator, description=description)
        num_workers = self.args.dataloader_num_workers
        worker_init = functools.partial(seed_worker, num_workers=num_workers, rank=self.args.process_index)
        # Starting a loader draws a random number, which must not change a training: not in an evaluation, and not for
        # persistent workers, which start once, at another epoch in a resumed run.
        has_own_numbers = not is_training or self.args.dataloader_persistent_workers
        dataloader = DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            collate_fn=data_collator,
            num_workers=num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            # Each evaluation builds a new loader, so persistent workers would pile up.
            persistent_workers=self.args.dataloader_persistent_workers and is_training,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            in_order=self.args.dataloader_in_order,
            generator=torch.Generator().manual_seed(self.args.seed) if has_own_numbers else None,
            worker_init_fn=worker_init if is_training else None,
        )
        return self.accelerator.prepare(dataloader)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Return the batches of an update as the stock trainer does; of a stream, also note its state after them.

        Args:
            epoch_iterator (`Iterator`): The batches.
            num_batches (`int`): Number of batches of the update.
            device (`torch.device`): The device of the number of labels.

        Returns:
            `tuple[list, torch.Tensor]`: the batches, and the number of their labels.
        """
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._stream is not None:
            self._stream.take_states(batches)
        return batches, num_items

    def _save_rng_state(self, output_dir: str) -> None:
        """Save what each process needs to continue, in a checkpoint: random states, and that of a stream."""
        super()._save_rng_state(output_dir)
        if self._stream is not None:
            self._stream.save(output_dir, self.state.global_step)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log values; at the end of the training on a stream also what it read and skipped.

        Args:
            logs (`dict[str, float]`): The values.
            start_time (`float`, *optional*): As in `Trainer`.
        """
        if self._stream is not None and "train_runtime" in logs:
            logs.update(self._stream.summary(self.accelerator, logs["train_runtime"]))
        super().log(logs, start_time)

    def _training_collator(self) -> Any:
        """Return the collator of training; for a GPU and a model that takes the numbers, it counts."""
        args, model = self.args, self.model
        # Compiled code would be compiled again for every number; `DataParallel`, and a process that reads for all,
        # divide the rows but not the numbers.
        is_divided = args.n_gpu > 1 or args.accelerator_config.dispatch_batches
        is_stream = isinstance(self.train_dataset, TokenBudgetStream)  # of which each process reads its share
        is_read_by_one = isinstance(self.train_dataset, IterableDataset) and not is_stream
        is_plain = not args.torch_compile and not is_divided and not is_read_by_one
        if has_varlen_kernels(args.device) and is_plain and isinstance(model, VanillaPreTrainedModel):
            return CountingCollator(self.data_collator)
        return self.data_collator

    def _lengths(self, dataset: Dataset) -> PairLengths:
        """Measure `dataset` once; the cache holds the dataset too, so that no other object gets its id."""
        measured = self._lengths_of_datasets
        if id(dataset) not in measured:
            if len(measured) == MEASURED_DATASETS_KEPT:
                measured.pop(next(iter(measured)))
            measured[id(dataset)] = (dataset, measure_pair_lengths(dataset))
        return measured[id(dataset)][1]

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the scheduler; `inverse_sqrt` counts its steps from 1 as the paper's formula does.

        Args:
            num_training_steps (`int`): Number of updates of the run.
            optimizer (`torch.optim.Optimizer`, *optional*): The optimizer to schedule; the default is the trainer's
                own.

        Returns:
            `LRScheduler`: the schedule.
        """
        optimizer = self.optimizer if optimizer is None else optimizer
        is_inverse_sqrt = self.args.lr_scheduler_type == SchedulerType.INVERSE_SQRT
        if self.lr_scheduler is not None or optimizer is None or not is_inverse_sqrt:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup_steps = self.args.get_warmup_steps(num_training_steps)
        scheduler_arguments: Any = self.args.lr_scheduler_kwargs or {}
        self.lr_scheduler = inverse_sqrt_schedule_from_one(optimizer, warmup_steps, **scheduler_arguments)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Compute the loss as the stock trainer does, after scheduled sampling with `teacher_forcing_ratio` below 1.

        With `consistency_weight` above 0 the model gets every pair twice, and [`ConsistencyLoss`] computes the loss.

        Args:
            model (`torch.nn.Module`): The model, wrapped or not.
            inputs (`dict`): Its arguments.
            return_outputs (`bool`, *optional*, defaults to `False`): Whether to return the outputs too.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Number of labels of the update.

        Returns:
            `torch.Tensor`, or the pair of it and the outputs of the model.
        """
        if model.training and self.args.teacher_forcing_ratio < 1.0:
            inputs = self._mix_predictions(model, inputs)
        if self.args.consistency_weight > 0:  # the model gets no labels
            inputs = self._with_decoder_inputs(model, inputs)
            inputs = twice(inputs) if model.training else inputs
        if self._eval_loss is not None:
            # The mean over this batch, which `_TokenMeanLoss` weights.
            num_items_in_batch = None
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _mix_predictions(self, model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Replace a share of `1 - teacher_forcing_ratio` of the decoder inputs by predictions of the model."""
        inputs = self._with_decoder_inputs(model, inputs)
        labels, gold = inputs["labels"], inputs["decoder_input_ids"]
        first_pass = {name: value for name, value in inputs.items() if name != "labels"}
        model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**{**first_pass, "use_cache": False}, return_dict=True).logits
        model.train()
        predicted = logits.argmax(dim=-1)[:, :-1]  # (batch, tgt_len - 1)
        is_replaced = torch.rand(predicted.shape, device=predicted.device) >= self.args.teacher_forcing_ratio
        is_replaced &= labels[:, :-1] != IGNORED_LABEL
        mixed = torch.cat((gold[:, :1], torch.where(is_replaced, predicted, gold[:, 1:])), dim=1)  # (batch, tgt_len)
        return {**inputs, "decoder_input_ids": mixed}

    def _with_decoder_inputs(self, model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Add what the decoder reads, if the collator did not."""
        if inputs.get("decoder_input_ids") is not None:
            return inputs
        shift_right = self.accelerator.unwrap_model(model).prepare_decoder_input_ids_from_labels
        return {**inputs, "decoder_input_ids": shift_right(inputs["labels"])}

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the stock loop; with token-budget batches, restore the order of rows and average the loss over tokens.

        Args:
            dataloader (`DataLoader`): The batches.
            description (`str`): Name of the loop in the log.
            prediction_loss_only (`bool`, *optional*): Whether to compute only the loss.
            ignore_keys (`list[str]`, *optional*): Outputs of the model to leave out.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`): Prefix of the metrics' names.

        Returns:
            `EvalLoopOutput`: predictions and labels in the order of the dataset, and the metrics.
        """
        sampler = _inner_sampler(dataloader, LengthSortedBatchSampler)
        loop = functools.partial(
            super().evaluation_loop, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        if sampler is None:
            return loop()
        compute_metrics = self.compute_metrics
        if compute_metrics is not None and not self.args.batch_eval_metrics:
            self.compute_metrics = functools.partial(_compute_in_dataset_order, compute_metrics, sampler)
        self._eval_loss = token_loss = _TokenMeanLoss(sampler, self.args.process_index, self.args.device)
        try:
            output = loop()
        finally:
            self.compute_metrics = compute_metrics
            self._eval_loss = None
        metrics = dict(output.metrics or {})
        loss_name = f"{metric_key_prefix}_loss"
        if loss_name in metrics:
            metrics[loss_name] = token_loss.mean(self.accelerator)
        predictions, label_ids = sampler.restore(output.predictions), sampler.restore(output.label_ids)
        return output._replace(predictions=predictions, label_ids=label_ids, metrics=metrics)

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
        """Run the stock step, and record its loss and its number of tokens.

        Args:
            model (`torch.nn.Module`): The model.
            inputs (`dict`): Its arguments.
            prediction_loss_only (`bool`): Whether to compute only the loss.
            ignore_keys (`list[str]`, *optional*): Outputs of the model to leave out.
            **gen_kwargs (`Any`): Arguments of `generate`.

        Returns:
            loss (`torch.Tensor`), predictions and labels; each may be `None`.
        """
        # `DataCollatorForSeq2Seq` sets `labels=None` for rows without labels, which the stock step takes for labels.
        inputs = {name: value for name, value in inputs.items() if value is not None}
        if self._eval_loss is not None:
            labelled = {name: inputs[name] for name in self.label_names if name in inputs}
            self._eval_loss.check_labels(self.model, labelled)
            inputs |= self._eval_loss.hide_repeated_rows(labelled)
        step = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        if self._eval_loss is not None and step[0] is not None:
            labels = inputs[self.label_names[0]]
            if getattr(self.model, "loss_type", None) == "ForCausalLM":  # the first token of a row is not predicted
                is_ours = self.model.config.model_type == VanillaGptConfig.model_type  # nor is it after padding
                labels = next_tokens(labels, inputs.get("attention_mask") if is_ours else None)
            self._eval_loss.add(step[0], labels)
        return step


class _TokenMeanLoss:
    """The mean loss of an evaluation over tokens, summed on the device without a synchronisation per step."""

    def __init__(self, sampler: LengthSortedBatchSampler, process_index: int, device: torch.device) -> None:
        self.sampler = sampler
        self.process_index = process_index
        self.step = 0
        self.totals = torch.zeros(2, device=device, dtype=torch.float64 if device.type != "mps" else torch.float32)

    def check_labels(self, model: Any, labels: dict[str, torch.Tensor]) -> None:
        """Check that labels can be excluded if rows are repeated."""
        problem_type = getattr(getattr(model, "config", None), "problem_type", None)
        are_numbers = problem_type in ("regression", "multi_label_classification")
        if self.sampler.num_repeated and (are_numbers or any(each.is_floating_point() for each in labels.values())):
            rows, processes = self.sampler.num_rows, self.sampler.num_processes
            raise ValueError(
                f"`max_tokens_per_batch` has {processes} processes evaluate {rows} rows, of which some twice, and "
                "labels that are no classes would count twice in the loss; leave out "
                f"{rows % processes} rows, or leave `max_tokens_per_batch` unset."
            )

    def hide_repeated_rows(self, labels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Exclude the labels of repeated rows from the loss, and count the step."""
        repeated = self.sampler.repeated_rows(self.step, self.process_index)
        self.step += 1
        if repeated:
            labels = {name: each.clone() for name, each in labels.items()}
            for each in labels.values():
                each[-repeated:] = IGNORED_LABEL
        return labels

    def add(self, loss: Any, labels: torch.Tensor) -> None:
        """Add the mean loss of a batch."""
        tokens = (labels != IGNORED_LABEL).sum().to(self.totals)
        loss = loss.to(self.totals)
        # The mean over no token is nan; such a batch has repeated rows only.
        self.totals += torch.stack((torch.where(tokens > 0, loss * tokens, torch.zeros_like(loss)), tokens))

    def mean(self, accelerator: Any) -> float:
        """Return the mean over the tokens of all processes."""
        loss, tokens = accelerator.reduce(self.totals, reduction="sum").tolist()
        return loss / tokens if tokens else math.nan


class _EpochOfBatchSampler(TrainerCallback):
    """Sets the epoch of the batch sampler, also in a resumed run that skips batches.

    The loader that skips batches does not pass `set_epoch` on to the sampler.
    """

    def __init__(self) -> None:
        self.next_epoch = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if _inner_sampler(kwargs["train_dataloader"], TokenBudgetBatchSampler) is None:
            return
        updates_per_epoch = max(1, math.ceil(len(kwargs["train_dataloader"]) / args.gradient_accumulation_steps))
        self.next_epoch = state.global_step // updates_per_epoch

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        sampler = _inner_sampler(kwargs["train_dataloader"], TokenBudgetBatchSampler)
        if sampler is not None:
            sampler.set_epoch(self.next_epoch)
        self.next_epoch += 1


def _check_class(args: Any) -> None:
    """Check that the arguments include those of this trainer."""
    if not isinstance(args, VanillaTrainingArguments):
        raise TypeError(
            f"`args` must be a `VanillaTrainingArguments`, got a `{type(args).__name__}`; it takes the same "
            "arguments, so only the name of the class has to change."
        )


def _check_consistency(args: VanillaTrainingArguments) -> None:
    """Check that the label smoothing of transformers' trainer is not set with a loss that does not use it."""
    if args.consistency_weight > 0 and args.label_smoothing_factor != 0:
        raise ValueError(
            f"`label_smoothing_factor` ({args.label_smoothing_factor}) has no effect with `consistency_weight` "
            f"({args.consistency_weight}); set `label_smoothing` of the model's config."
        )


def _check_teacher_forcing(args: VanillaTrainingArguments, model: Any) -> None:
    """Check that a model that is to be fed its own predictions has a decoder that the trainer can feed."""
    ratio = args.teacher_forcing_ratio
    if ratio < 1 and not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise ValueError(
            f"`teacher_forcing_ratio` ({ratio}) is for encoder-decoders, got a {type(model).__name__}; leave it at 1."
        )


def _is_indexable(dataset: Any) -> bool:
    """Check whether the rows of `dataset` can be read by index."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, dict)


def _check_training_data(train_dataset: Any, args: VanillaTrainingArguments) -> None:
    """Check that token-budget batches can be made of the training data."""
    if isinstance(train_dataset, TokenBudgetStream):
        check_stream(train_dataset, args)
        return
    if train_dataset is None or args.max_tokens_per_batch is None or _is_indexable(train_dataset):
        return
    if not isinstance(train_dataset, datasets.IterableDataset):
        raise ValueError(
            f"`max_tokens_per_batch` ({args.max_tokens_per_batch}) needs a `train_dataset` with a length or a "
            f"`datasets.IterableDataset`, got a `{type(train_dataset).__name__}`; `IterableDataset.from_generator` "
            "makes one, or leave `max_tokens_per_batch` unset."
        )


def _inner_sampler(dataloader: Any, sampler_class: type) -> Any:
    """Return the batch sampler of `sampler_class` inside accelerate's wrappers, or `None`."""
    sampler = getattr(dataloader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, sampler_class):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def _compute_in_dataset_order(
    compute_metrics: Any, sampler: LengthSortedBatchSampler, prediction: EvalPrediction
) -> dict[str, float]:
    """Call `compute_metrics` with the rows in the order of the dataset."""
    inputs = prediction.inputs
    return compute_metrics(
        EvalPrediction(
            predictions=sampler.restore(prediction.predictions),
            label_ids=sampler.restore(prediction.label_ids),
            inputs=None if inputs is None else sampler.restore(inputs),
            losses=prediction.losses,
        )
    )
