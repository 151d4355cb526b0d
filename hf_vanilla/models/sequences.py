"""Where sequences lie in the rows of a batch, and the positions of their tokens.

Attention on a GPU runs on sequences that follow each other without padding, given their offsets:

    tokens    a a a a b b b c        offsets    0 4 7 8        max_length    4

These are the tokens of padded rows, or of one row that holds several sequences, as transformers'
`DataCollatorWithFlattening` makes it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .checks import can_read


class Sequences(NamedTuple):
    """Where sequences lie that follow each other without padding.

    Attributes:
        offsets: First token of each, and the number of tokens, in int32, of shape `(sequences + 1,)`.
        max_length: At least the length of the longest, on the host.
    """

    offsets: Tensor
    max_length: int

    @classmethod
    def of_lengths(cls, lengths: Tensor, max_length: int) -> "Sequences":
        """Build those of these lengths, of shape `(sequences,)`."""
        return cls(nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), max_length)

    @classmethod
    def of_rows(cls, rows: int, length: int, device: torch.device) -> "Sequences":
        """Build those of rows without padding."""
        return cls(length * torch.arange(rows + 1, dtype=torch.int32, device=device), length)


def positions_of(
    attention_mask: Tensor | None, length: int, past_length: int | Tensor, device: torch.device
) -> Tensor:
    """Number the tokens of each row from 0, whichever side its padding is on.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, past_length + length)`, *optional*): Not 0 for tokens, 0 for
            padding.
        length (`int`): Number of positions wanted: the last ones.
        past_length (`int` or `torch.Tensor`): Number of positions before these; of a static cache, a tensor.
        device (`torch.device`): Device of the result.

    Returns:
        `torch.Tensor` of shape `(batch, length)`, or `(1, length)` without a mask: the positions. Padding has any
        valid position.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return torch.arange(length, device=device)[None] + past_length
    is_token = attention_mask != 0  # as transformers reads masks of any type
    return (is_token.long().cumsum(-1) - 1).clamp(min=0)[:, attention_mask.shape[1] - length :]


def flattened_rows(
    position_ids: Tensor | None, offsets: Tensor | None, length: int, from_zero: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Find positions and sequences where a row may hold several, as of transformers' `DataCollatorWithFlattening`.

    Args:
        position_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): Positions given by the caller. A
            sequence begins wherever one is not the one before plus 1.
        offsets (`torch.Tensor` of shape `(sequences + 1,)`, *optional*): Where the sequences of one row begin instead,
            as transformers' `cu_seq_lens_q`; checked.
        length (`int`): Length of the rows.
        from_zero (`bool`, defaults to `False`): Whether every sequence has to begin at position 0; if one does not,
            the row is one sequence.

    Returns:
        `tuple[torch.LongTensor | None, torch.LongTensor | None]`: the positions, by default counted from the offsets;
        and for each position the number of its sequence in the row, both of shape `(batch or 1, length)`.
    """
    if offsets is not None:
        cells = torch.arange(length, device=offsets.device)
        numbers = torch.searchsorted(offsets[1:].contiguous(), cells, right=True)
        return ((cells - offsets.long()[numbers])[None] if position_ids is None else position_ids), numbers[None]
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.numel() == 0:
        return position_ids, None  # what is no position is refused elsewhere
    begins = nn.functional.pad((position_ids.diff() != 1).long(), (1, 0))
    if from_zero:
        begins = begins * ((begins == 0) | (position_ids == 0)).all()
    return position_ids, begins.cumsum(1)


def holds_several(sequence_ids: Tensor | None) -> bool:
    """Return whether a row is known to hold several sequences. A GPU is waited for.

    Args:
        sequence_ids (`torch.LongTensor` of shape `(batch or 1, length)`, *optional*): What [`flattened_rows`] returns.

    Returns:
        `bool`: whether one does; false in code that may not read values.
    """
    if sequence_ids is None or sequence_ids.numel() == 0 or not can_read(sequence_ids):
        return False
    return bool((sequence_ids[:, -1] != sequence_ids[:, 0]).any())


def find_sequences(sequence_ids: Tensor, batch: int, arguments: Mapping[str, Any]) -> Sequences | None:
    """Find where the sequences of a batch lie. Without transformers' arguments, a GPU is waited for.

    Args:
        sequence_ids (`torch.LongTensor` of shape `(batch or 1, length)`): The number of each position's sequence.
        batch (`int`): Number of rows.
        arguments (`Mapping[str, Any]`): The arguments of `forward`, with `cu_seq_lens_q` and `max_length_q` or not.

    Returns:
        `Sequences`: those of the two arguments if both are given; otherwise those found, `None` if each row is one.
    """
    offsets, longest = (arguments.get(name) for name in ("cu_seq_lens_q", "max_length_q"))
    if offsets is not None and isinstance(longest, int):
        return Sequences(offsets.int(), longest)
    begins = nn.functional.pad(sequence_ids.diff() != 0, (1, 0), value=True).expand(batch, -1).flatten()
    cells = torch.arange(begins.numel(), device=begins.device)
    numbers = cells - torch.where(begins, cells, 0).cummax(0).values  # in each sequence
    count, last = torch.stack((begins.sum(), numbers.max())).tolist()
    starts = begins.nonzero_static(size=count)[:, 0]
    offsets = nn.functional.pad(starts, (0, 1), value=begins.numel())
    return None if count == batch else Sequences(offsets.int(), last + 1)
