"""Muon for the matrices of the layers, AdamW for all else, as one optimizer.

    matrix of a layer    momentum of its gradients, orthogonalized: all directions are learned equally fast
    all else             AdamW: embeddings, biases, norms, heads

A miniature learns as much in fewer updates. An update costs some products of each matrix with itself, which a large
batch pays for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon
from transformers import Trainer, TrainingArguments


# Learning rate of the matrices over that of all else. Muon's updates are scaled to the size of Adam's.
MATRIX_RATE = 2.0
# What to do about an error of torch's optimizers, by a part of its message.
_ADVICE = {
    "number of parameter groups": "Give `muon` as the run that saved it did, and no other `optimizers`.",
    "size of optimizer's group": "Train the same parameters as the run that saved it: freeze those that it froze.",
}


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's `Muon` and `AdamW`, each for its parameters; state, schedule and checkpoints are those of one optimizer.

    Args:
        adamw (`torch.optim.AdamW`): The optimizer of all other parameters, whose learning rate the trainer logs.
        muon (`torch.optim.Muon`): The optimizer of the matrices.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the size of the updates is
    that of Liu et al. 2025, "Muon is Scalable for LLM Training".
    """

    def __init__(self, adamw: AdamW, muon: Muon) -> None:
        self.optimizers = (adamw, muon)
        # Schedules with a last learning rate divide it by this one.
        super().__init__([*adamw.param_groups, *muon.param_groups], {"lr": adamw.defaults["lr"]})
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state, as `load_state_dict` does, for both optimizers."""
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take a group, but only while the optimizer is made.

        Args:
            param_group (`dict[str, Any]`): The group.

        Raises:
            ValueError: if the optimizer is made already: neither of the two would train the group.
        """
        if self.optimizers[0].state is self.state:
            raise ValueError(
                "Parameters can't be added to a `MuonWithAdamW`; make one of all of them (`create_muon`)."
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters.

        Args:
            closure (`Callable`, *optional*): Computes the loss and its gradients again.

        Returns:
            `float`, *optional*: what the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def _share(self) -> None:
        """Let both optimizers have their groups and the state of this one."""
        first = 0
        for optimizer in self.optimizers:
            last = first + len(optimizer.param_groups)
            optimizer.param_groups, first = self.param_groups[first:last], last
            optimizer.state = self.state


class MuonTrainer(Trainer):
    """A `Trainer` that trains by [`MuonWithAdamW`] if its arguments have `muon`.

    Args:
        *args (`Any`): As in `Trainer`.
        **kwargs (`Any`): Likewise.

    Raises:
        ValueError: if `muon` is combined with an optimizer that is given, or with FSDP or DeepSpeed.
    """

    optimizer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not getattr(self.args, "muon", False):
            return
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise ValueError("`optimizers` must not be given with `muon`, which makes its own; leave one of them out.")
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # also by `accelerate launch`
            raise ValueError("`muon` needs whole parameters; leave it out with `fsdp` or `deepspeed`.")

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer: the stock one, or [`MuonWithAdamW`] with `muon`.

        Args:
            model (`torch.nn.Module`, *optional*): The model; the default is the trainer's own.

        Returns:
            `torch.optim.Optimizer`: the optimizer.
        """
        if self.optimizer is None and getattr(self.args, "muon", False):
            model = self.model if model is None else model
            self.optimizer = create_muon(model, self.args, self.get_decay_parameter_names(model))
        return super().create_optimizer(model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load their states; say what to do if that of the optimizer is of another one or of other parameters."""
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except ValueError as error:
            advice = next((advice for cause, advice in _ADVICE.items() if cause in str(error)), None)
            if advice is None:
                raise
            raise ValueError(f"The optimizer can't continue from {checkpoint}: {error}. {advice}") from error


def create_muon(model: torch.nn.Module, args: TrainingArguments, decayed: list[str]) -> MuonWithAdamW:
    """Create the optimizer of a model.

    Args:
        model (`torch.nn.Module`): The model. Its matrices are the weights of the linear maps in its `ModuleList`s; one
            map to queries, keys and values has one matrix.
        args (`TrainingArguments`): With learning rate, weight decay and Adam's settings.
        decayed (`list[str]`): Names of the parameters with weight decay.

    Returns:
        [`MuonWithAdamW`]: the optimizer.

    Raises:
        ValueError: if no matrix is trained, or the parameters are sharded.
    """
    stacks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    linears = [module for stack in stacks for module in stack.modules() if isinstance(module, torch.nn.Linear)]
    weights = {linear.weight for linear in linears}
    matrices: list[torch.nn.Parameter] = []
    others: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"`muon` needs whole parameters, but {name} is sharded; train without one of the two.")
        if parameter.requires_grad:
            (matrices if parameter in weights else others[name in decayed]).append(parameter)
    if not matrices:
        raise ValueError("`muon` needs a model with layers to train, but no matrix of a layer is trained.")
    adam_settings: Any = Trainer.get_optimizer_cls_and_kwargs(args, model)[1]
    adam_settings.pop("lr")
    groups = [
        {"params": others[True], "weight_decay": args.weight_decay},
        {"params": others[False], "weight_decay": 0.0},
    ]
    muon = Muon(matrices, args.learning_rate * MATRIX_RATE, args.weight_decay, adjust_lr_fn="match_rms_adamw")
    return MuonWithAdamW(AdamW(groups, args.learning_rate, **adam_settings), muon)
