"""Parameter names of BERT's checkpoints, and what they are here.

transformers renames when it loads and, backwards, when it saves: files have BERT's own names, which transformers'
`BertFor...` reads too. What `load_state_dict` is given, as by the Trainer when it resumes, is renamed by
`take_bert_names`, so that both kinds of names fit.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming


# From the names in every BERT's file to those in the models.
BERT_NAMES = [
    WeightRenaming(r"encoder\.layer\.(\d+)\.", r"layers.\1."),
    # The authors' first files say gamma and beta. These rules come first, so that saving, which applies the list in
    # reverse, does not use them.
    *(
        WeightRenaming(rf"\.{theirs}\.LayerNorm\.{old}", f".{ours}.layer_norm.{new}")
        for theirs, ours in (("attention.output", "self_attn_residual"), ("output", "feed_forward_residual"))
        for old, new in (("gamma", "weight"), ("beta", "bias"))
    ),
    WeightRenaming(r"\.attention\.output\.LayerNorm\.", ".self_attn_residual.layer_norm."),
    WeightRenaming(r"\.output\.LayerNorm\.", ".feed_forward_residual.layer_norm."),
    WeightRenaming(r"\.attention\.output\.dense\.", ".self_attn.out_proj."),
    WeightRenaming(r"\.output\.dense\.", ".feed_forward.fc2."),
    WeightRenaming(r"\.intermediate\.dense\.", ".feed_forward.fc1."),
    *(
        WeightConverter(
            [f".attention.self.{name}.{kind}" for name in ("query", "key", "value")],
            f".self_attn.qkv_proj.{kind}",
            operations=[Concatenate(dim=0)],
        )
        for kind in ("weight", "bias")
    ),
]
# In the embeddings and the prediction head, the authors' first files say gamma and beta too.
LEGACY_NAMES = [
    WeightRenaming(r"LayerNorm\.gamma$", "LayerNorm.weight"),
    WeightRenaming(r"LayerNorm\.beta$", "LayerNorm.bias"),
]


def take_bert_names(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Rename what `load_state_dict` is given under BERT's own names: a pre-hook of it.

    Args:
        module (`nn.Module`): The model.
        state_dict (`dict[str, torch.Tensor]`): The parameters, renamed in place.
        prefix (`str`): What the names of this model begin with.
        *args: torch's `local_metadata`, `strict` and `missing_keys`, which gets what a file has in part, and more.
    """
    names = deepcopy([*BERT_NAMES, *LEGACY_NAMES])  # transformers notes in them what was used
    parts: dict[str, dict[int, Tensor]] = {}
    for theirs in [name for name in state_dict if name.startswith(prefix)]:
        ours, number = theirs[len(prefix) :], None
        for each in names:
            ours, source = each.rename_source_key(ours)
            if isinstance(each, WeightConverter) and source is not None:
                number = each.source_patterns.index(source)
        if ours.endswith("embeddings.position_ids"):
            del state_dict[theirs]
        elif number is not None:
            parts.setdefault(ours, {})[number] = state_dict.pop(theirs)
        elif ours != theirs[len(prefix) :]:
            state_dict[prefix + ours] = state_dict.pop(theirs)
    parameters = dict(module.named_parameters())
    for name, found in parts.items():
        if name in parameters and len(found) < 3:  # another shard may hold the other parts
            args[2].append(prefix + name)
            found = {**dict(enumerate(parameters[name].detach().chunk(3))), **found}
        state_dict[prefix + name] = torch.cat([found[number] for number in sorted(found)])
