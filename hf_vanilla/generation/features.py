"""Feature-based use of BERT: vectors of texts and tokens, from any layers of an encoder."""

from collections.abc import Sequence

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models.checks import as_texts, check_evaluation_mode
from ..models.text_batches import batches_by_length, without_lone_surrogates


POOLINGS = ("mean", "cls", "max", "tokens")


MIXES = ("mean", "concatenate")


@torch.no_grad()
def extract_features(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    layers: Sequence[int] = (-1,),
    mix: str = "mean",
    pooling: str = "mean",
    max_length: int | None = None,
    max_tokens_per_batch: int = 4096,
    show_progress: bool = False,
) -> list[np.ndarray]:
    """Compute one vector for each text, or one for each of its tokens.

    ```python
    vectors = extract_features(model, tokenizer, texts, layers=(-4, -3, -2, -1), mix="concatenate")
    ```

    Args:
        model (`PreTrainedModel`): An encoder, as loaded by `AutoModel`, in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        texts (`Sequence[str]`): Any texts; long ones are truncated.
        layers (`Sequence[int]`, defaults to `(-1,)`): Layers whose outputs are used: 0 is the embeddings, -1 the last
            layer.
        mix (`str`, defaults to `"mean"`): How several layers are combined: their `"mean"`, or `"concatenate"` (the
            paper's best are the last four layers).
        pooling (`str`, defaults to `"mean"`): `"mean"` or `"max"` over a text's tokens, the first token's vector
            (`"cls"`), or all vectors (`"tokens"`).
        max_length (`int`, *optional*): Most tokens of a text; the model's limit by default.
        max_tokens_per_batch (`int`, defaults to 4096): Most tokens of a batch, padding included.
        show_progress (`bool`, defaults to `False`): Whether to draw a progress bar on standard error.

    Returns:
        `list[np.ndarray]`: in the order of the texts, float32 vectors of shape `(width,)`, or with `"tokens"` matrices
        of shape `(tokens, width)`, special tokens included. The width is the model's, times the number of layers if
        they are concatenated.

    Raises:
        TypeError: if `texts` is a single string, or contains something else than strings.
        ValueError: if the model is in training mode, an argument is unknown or out of its range, or a text to pool has
            no token.

    Source: Devlin et al. 2018, 5.3, Table 7.
    """
    texts = as_texts("texts", texts, allows_one=False)
    _check_choices(model, layers, mix, pooling)
    limit = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))
    longest = limit if max_length is None else max_length
    shortest = tokenizer.num_special_tokens_to_add() + 1
    if not shortest <= longest <= limit:
        raise ValueError(
            f"`max_length` must be in [{shortest}, {limit}], from one token in addition to the special ones to the "
            f"model's limit; got {max_length}."
        )
    texts = [without_lone_surrogates(text) for text in texts]
    encoded = tokenizer(texts, truncation=True, max_length=longest) if texts else {"input_ids": []}
    lengths = [len(ids) for ids in encoded["input_ids"]]
    if 0 in lengths and pooling != "tokens":
        raise ValueError(f"`texts` must have tokens, but text {lengths.index(0) + 1} has none; leave it out.")
    features: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(lengths)
    with tqdm(total=len(lengths), unit="text", disable=not show_progress) as progress:
        for batch in batches_by_length(lengths, max_tokens_per_batch):
            rows = {name: [values[number] for number in batch] for name, values in encoded.items()}
            inputs = tokenizer.pad(rows, padding_side="right", return_tensors="pt").to(model.device)
            states = model(**inputs, output_hidden_states=True, return_dict=True).hidden_states
            chosen = [states[layer].float() for layer in layers]
            mixed = torch.cat(chosen, dim=-1) if mix == "concatenate" else torch.stack(chosen).mean(0)
            for number, row, length in zip(batch, mixed, (lengths[number] for number in batch), strict=True):
                # A copy: the vector of one token would keep the whole batch.
                features[number] = _pooled(row[:length], pooling).cpu().numpy().copy()
            progress.update(len(batch))
    return features


def _pooled(vectors: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pool the vectors (tokens, width) of a text."""
    if pooling == "tokens":
        return vectors
    if pooling == "cls":
        return vectors[0]
    return vectors.mean(0) if pooling == "mean" else vectors.amax(0)


def _check_choices(model: PreTrainedModel, layers: Sequence[int], mix: str, pooling: str) -> None:
    """Raise if a layer does not exist or a name is unknown."""
    check_evaluation_mode(model)
    count = model.config.num_hidden_layers
    for layer in layers:
        if not -count - 1 <= layer <= count:
            raise ValueError(f"`layers` must be in [{-count - 1}, {count}], got {layer}; 0 is the embeddings.")
    if not layers:
        raise ValueError("`layers` must name at least one layer.")
    for name, value, allowed in (("mix", mix, MIXES), ("pooling", pooling, POOLINGS)):
        if value not in allowed:
            raise ValueError(f"`{name}` must be one of {', '.join(allowed)}; got {value!r}.")
