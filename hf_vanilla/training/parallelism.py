"""Which ways to spread a training over devices the models can't take."""

from typing import Any


def check_parallelism(config: Any) -> None:
    """Refuse to cut sequences across devices, which would let tokens attend to others than in one process.

    Args:
        config (`ParallelismConfig`, *optional*): accelerate's configuration, from the training arguments or from
            `accelerate launch`.

    Raises:
        ValueError: if it asks for context or sequence parallelism.
    """
    sizes = {name: getattr(config, name, None) or 1 for name in ("cp_size", "sp_size")}
    if max(sizes.values()) > 1:
        given = ", ".join(f"`{name}` {size}" for name, size in sizes.items())
        raise ValueError(
            f"`parallelism_config` must not cut sequences across devices, got {given}: context and sequence "
            "parallelism know neither padding nor attention to both sides. Use DDP, FSDP2, or tensor parallelism "
            'by `from_pretrained(..., distributed_config=DistributedConfig(tp_plan="auto"))`.'
        )
