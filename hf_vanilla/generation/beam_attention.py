"""Cross-attention along the hypotheses of a beam search, for word alignments without a second forward pass.

[`forced_attention`] gives the same numbers for any translation, with one forward pass over it.
"""

from collections.abc import Sequence

import torch
from transformers.generation import GenerateBeamEncoderDecoderOutput

from ..models.alignment import mean_of_heads


def beam_attention(
    outputs: GenerateBeamEncoderDecoderOutput, *, layer: int | None = None, heads: Sequence[int] | None = None
) -> torch.Tensor:
    """Collect cross-attention along the hypotheses of a beam search: at each step, of the beam that it continues.

    ```python
    model.set_attn_implementation("eager")
    outputs = model.generate(**inputs, num_beams=4, output_attentions=True, return_dict_in_generate=True)
    attention = beam_attention(outputs)
    ```

    Args:
        outputs (`GenerateBeamEncoderDecoderOutput`): Output of `generate()`, with or without `beam_search`.
        layer (`int`, *optional*): Decoder layer, from 0; the penultimate one by default, of two the last.
        heads (`Sequence[int]`, *optional*): Heads to average; all by default.

    Returns:
        `torch.Tensor` of shape `(batch * num_return_sequences, tgt_len, src_len)`: for each generated token, the
        attention of the step that generated it. Rows after the end of a hypothesis are 0.

    Raises:
        ValueError: if the outputs lack cross-attentions or beam indices, or `layer` or a head does not exist.
    """
    steps, beam_indices = outputs.get("cross_attentions"), outputs.get("beam_indices")
    if beam_indices is None or not steps or steps[0] is None or steps[0][0] is None:
        raise ValueError(
            "`outputs` must have `cross_attentions` and `beam_indices`: search with `num_beams` above 1, "
            "`return_dict_in_generate=True`, `output_attentions=True`, and attn_implementation='eager'."
        )
    tgt_len = beam_indices.shape[1]
    last_query = [tuple(attention[:, :, -1:] for attention in step) for step in steps[:tgt_len]]
    # (rows, tgt_len, src_len)
    attention = torch.cat([mean_of_heads(step, layer, heads) for step in last_query], dim=1)
    beams = beam_indices.long().clamp(min=0)  # (batch * num_return_sequences, tgt_len)
    followed = attention[beams, torch.arange(tgt_len, device=beams.device)]
    return followed * (beam_indices >= 0)[..., None]


__all__ = ["beam_attention"]
