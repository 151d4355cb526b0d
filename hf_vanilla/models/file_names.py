"""Names of parameters in checkpoint files where they differ from those in the models.

transformers renames in `from_pretrained` and, backwards, in `save_pretrained`, by the rules in `conversion_<family>`.
`load_state_dict`, which the Trainer calls when it resumes, does not: models register the hook below.
"""

import re
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers.core_model_loading import WeightConverter, WeightRenaming


# The names of norms in TensorFlow's files, which transformers renames in all checkpoints.
LEGACY_NAMES = [
    WeightRenaming(r"LayerNorm\.gamma$", "LayerNorm.weight"),
    WeightRenaming(r"LayerNorm\.beta$", "LayerNorm.bias"),
]


def take_file_names(module: Any, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Rename what `load_state_dict` is given under the names in files: a pre-hook of it.

    Args:
        module (`VanillaPreTrainedModel`): The model, whose `file_names` are the rules.
        state_dict (`dict[str, torch.Tensor]`): The parameters, renamed in place.
        prefix (`str`): What the names of this model begin with.
        *args: torch's `local_metadata`, `strict` and `missing_keys`, which gets what a file has in part, and more.
    """
    names = deepcopy([*module.file_names(), *LEGACY_NAMES])  # transformers notes in them what was used
    ignored = module._keys_to_ignore_on_load_unexpected or ()
    parts: dict[str, tuple[WeightConverter, dict[str, Tensor]]] = {}
    for theirs in [name for name in state_dict if name.startswith(prefix)]:
        ours, converter, pattern = theirs[len(prefix) :], None, ""
        for each in names:
            ours, source = each.rename_source_key(ours)
            if isinstance(each, WeightConverter) and source is not None:
                converter, pattern = each, source
        if any(re.search(each, ours) for each in ignored):
            del state_dict[theirs]
        elif converter is not None:
            parts.setdefault(ours, (converter, {}))[1][pattern] = state_dict.pop(theirs)
        elif ours != theirs[len(prefix) :]:
            state_dict[prefix + ours] = state_dict.pop(theirs)
    parameters = dict(module.named_parameters())
    for name, (converter, found) in parts.items():
        patterns = converter.source_patterns
        if name in parameters and len(found) < len(patterns):  # another shard may hold the other parts
            args[2].append(prefix + name)
            known = parameters[name].detach().chunk(len(patterns))
            found = {**dict(zip(patterns, known, strict=True)), **found}
        patterns = [pattern for pattern in patterns if pattern in found]
        for operation in converter.operations:
            found = operation.convert(found, patterns, converter.target_patterns)
        (state_dict[prefix + name],) = found.values()
