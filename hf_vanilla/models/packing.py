"""Which tokens the layers see."""

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.output_capturing import capture_outputs


# From this share of padding on, work on real tokens alone is faster than on all positions, moving them included.
MIN_PADDING_SHARE = 0.05


# Up to this share of tokens whose output is read, it is faster to have a last layer compute theirs alone.
MAX_OUTPUT_SHARE = 0.75


def _scatter_rows(tokens: torch.Tensor, positions: torch.Tensor, rows: int) -> torch.Tensor:
    """Put tokens `(tokens, width)` at their positions among `rows` rows of zeros."""
    return tokens.new_zeros(rows, tokens.shape[1]).index_copy_(0, positions, tokens)


class Frame(NamedTuple):
    """Some rows of a packed batch, as attention needs them: side by side, filled up at their ends.

    Attributes:
        rows: Number of rows.
        length: That of the longest.
        positions: Where in `(rows * length)` the tokens are, row after row; shape `(tokens,)`.
        attention_mask: True for tokens; shape `(rows, 1, 1, length)`. `None` if there is no padding.
    """

    rows: int
    length: int
    positions: torch.Tensor
    attention_mask: torch.Tensor | None

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """Lay tokens `(tokens, width)` out as `(rows, length, width)`, zero where there is none."""
        if self.attention_mask is not None:
            tokens = _scatter_rows(tokens, self.positions, self.rows * self.length)
        return tokens.view(self.rows, self.length, -1)

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Take the tokens `(tokens, width)` out of `(rows, length, width)`."""
        padded = padded.flatten(0, 1)
        return padded if self.attention_mask is None else padded.index_select(0, self.positions)


class Packing(NamedTuple):
    """The tokens of a padded batch without its padding: what stands at each position can be computed for them alone.

    Attributes:
        batch: Rows of the batch.
        length: Its length with padding.
        positions: Where in `(batch * length)` the tokens are, frame after frame; shape `(tokens,)`.
        frames: Rows of like length, for attention.
    """

    batch: int
    length: int
    positions: torch.Tensor
    frames: tuple[Frame, ...]

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Take the tokens `(1, tokens, width)` out of `(batch, length, width)`."""
        return padded.flatten(0, 1).index_select(0, self.positions)[None]

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """Put tokens `(1, tokens, width)` back to `(batch, length, width)`, zero where there is none."""
        return put_tokens(tokens, self.positions, self.batch, self.length)

    def split(self, tokens: torch.Tensor) -> list[tuple[Frame, torch.Tensor]]:
        """Part tokens `(1, tokens, width)` into the frames' `(tokens, width)`."""
        parts = tokens.squeeze(0).split([frame.positions.shape[0] for frame in self.frames])
        return list(zip(self.frames, parts, strict=True))


def _frame(lengths: torch.Tensor) -> Frame:
    """Describe the frame of rows of these lengths."""
    rows, length = lengths.shape[0], int(lengths.max())
    mask = torch.arange(length, device=lengths.device) < lengths[:, None]  # (rows, length)
    is_full = bool((lengths == length).all())
    return Frame(rows, length, mask.flatten().nonzero()[:, 0], None if is_full else mask[:, None, None])


def pack_padding(
    layers: nn.ModuleList,
    config: PreTrainedConfig,
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    num_frames: int = 1,
    needs_first: bool = False,
    **kwargs: Any,
) -> Packing | None:
    """Find the tokens of a padded batch, if working on them alone pays: on a CPU, outside of compiled code.

    Args:
        layers (`nn.ModuleList`): What will work on them. Whoever hooks or compiles a part of one gets all positions.
        config (`PreTrainedConfig`): The model's config; its attention must be `eager` or `sdpa`.
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): What will be packed.
        mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for tokens, 0 for padding anywhere.
        num_frames (`int`, defaults to 1): Into how many frames, each of rows of like length, the rows may be sorted:
            attention over long rows is worth it. With one they keep their order.
        needs_first (`bool`, defaults to `False`): Whether the output at each row's first position will be read.
        **kwargs: What `forward` was asked for: with `output_attentions` or `output_hidden_states`, single layers show
            all positions.

    Returns:
        `Packing`, or `None` where there is too little padding, none that is known, or a row of nothing else.
    """
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.numel() == 0 or mask.device.type != "cpu":
        return None
    if config._attn_implementation not in ("eager", "sdpa") or not _can_leave_out(config, hidden_states, kwargs):
        return None
    mask = mask.bool()
    if needs_first and not mask[:, 0].all():
        return None
    lengths = mask.sum(1)  # (batch,)
    if int(lengths.min()) == 0 or int(lengths.sum()) > (1 - MIN_PADDING_SHARE) * mask.numel():
        return None
    if any(map(_is_watched, layers)):
        return None
    batch, length = mask.shape
    cells = torch.arange(batch * length).view(batch, length)
    if num_frames == 1:
        return Packing(batch, length, cells[mask], (_frame(lengths),))
    lengths, order = lengths.sort()
    parts = [part for part in lengths.tensor_split(num_frames) if part.numel()]
    return Packing(batch, length, cells[order][mask[order]], tuple(map(_frame, parts)))


def find_read_tokens(
    encoder: PreTrainedModel,
    hidden_states: torch.Tensor,
    read_positions: torch.Tensor,
    packing: Packing | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Find the tokens whose output will be read, if having the last layer compute no others pays: as `pack_padding`.

    Args:
        encoder (`PreTrainedModel`): The model, with `layers`. Whoever hooks it, hooks or compiles a part of the last
            layer, or replaces that or its attention, gets all positions.
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): What the layers are given.
        read_positions (`torch.Tensor` of shape `(batch, length)`): Not 0 where the output will be read.
        packing (`Packing`, *optional*): Where the tokens belong, if padding is left out.
        **kwargs: What `forward` was asked for.

    Returns:
        `torch.LongTensor` of shape `(read,)`: indices of tokens, row after row or as packed; or `None` where most of
        them are read, or none.
    """
    layers = cast(nn.ModuleList, encoder.layers)
    if read_positions.device.type != "cpu" or not _can_leave_out(encoder.config, hidden_states, kwargs):
        return None
    last: Any = layers[-1] if len(layers) else None
    if not _accepts_packing(last) or not _accepts_packing(last.self_attn):
        return None
    if _has_hooks(encoder) or _is_watched(last):
        return None
    is_read = read_positions.flatten() != 0
    if packing is not None:
        is_read = is_read[packing.positions]
    read_tokens = is_read.nonzero()[:, 0]
    return read_tokens if 0 < read_tokens.shape[0] <= MAX_OUTPUT_SHARE * is_read.shape[0] else None


def take_tokens(hidden_states: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """Take tokens out.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, length, d_model)`): All of them.
        tokens (`torch.LongTensor` of shape `(read,)`, *optional*): Their indices, row after row; all by default.

    Returns:
        `torch.Tensor` of shape `(1, read, d_model)`: the tokens, or `hidden_states` itself if all are wanted.
    """
    return hidden_states if tokens is None else hidden_states.flatten(0, 1).index_select(0, tokens)[None]


def put_tokens(tokens: torch.Tensor, positions: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Put tokens at their positions, and zeros elsewhere.

    Args:
        tokens (`torch.Tensor` of shape `(1, tokens, width)`): The tokens.
        positions (`torch.LongTensor` of shape `(tokens,)`): Where in `(batch * length)` they belong.
        batch (`int`): Number of rows.
        length (`int`): Length of a row.

    Returns:
        `torch.Tensor` of shape `(batch, length, width)`: all positions.
    """
    return _scatter_rows(tokens.squeeze(0), positions, batch * length).view(batch, length, -1)


def _can_leave_out(config: PreTrainedConfig, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether positions may be left out: on a CPU, not compiled or traced, no outputs of single layers."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or hidden_states.device.type != "cpu":
        return False
    return not any(kwargs.get(name, getattr(config, name)) for name in ("output_attentions", "output_hidden_states"))


def _accepts_packing(module: nn.Module | None) -> bool:
    """Whether a module's own class, not a base class, declares that it computes the outputs of some tokens alone."""
    return bool(vars(type(module)).get("accepts_packing"))


def _is_watched(layer: nn.Module) -> bool:
    """Whether a part of a layer has hooks or is compiled by itself."""
    return any(map(_has_hooks, layer.modules()))


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module is compiled by itself, or has hooks other than those by which transformers records."""
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return True
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hook.__module__ != capture_outputs.__module__ for each in hooks for hook in each.values())


# For attention, rows of a padded batch are sorted into groups of like length, one for so many positions of the longest
# row, and no more than so many.
FRAME_LENGTH = 64


MOST_FRAMES = 8


def first_positions(inputs: torch.Tensor | None) -> torch.Tensor | None:
    """Mark the position that the pooler reads.

    Args:
        inputs (`torch.Tensor` of shape `(batch, length)` or `(batch, length, d_model)`, *optional*): What is encoded.

    Returns:
        `torch.BoolTensor` of shape `(batch, length)`: true at the first; `None` where there is no such input.
    """
    if inputs is None or inputs.dim() < 2:
        return None
    is_read = torch.zeros(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    is_read[:, :1] = True
    return is_read
