"""Checkpoints with the usual `use_cache`, which load without a false warning of tied weights."""

from typing import Any

from transformers import Trainer


class CleanCheckpointTrainer(Trainer):
    """A `Trainer` whose checkpoints have their type's usual `use_cache`, and load without a warning of tied weights.

    `Trainer` turns `use_cache` of the config off while it trains, and would save it so. Of weights that are tied, only
    one is in a checkpoint, and the others are no missing ones.
    """

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model with the default of `use_cache` for its type."""
        config: Any = getattr(self.accelerator.unwrap_model(self.model), "config", None)
        default = getattr(type(config), "use_cache", None)
        if not isinstance(default, bool):
            super()._save(output_dir, state_dict)
            return
        in_training = config.use_cache
        config.use_cache = default
        try:
            super()._save(output_dir, state_dict)
        finally:
            config.use_cache = in_training

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of missing weights other than tied ones."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))
