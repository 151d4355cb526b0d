"""Parameter names of BERT checkpoints, and what they are called here."""

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming

from .configuration_vanilla_bert import VanillaBertConfig


# From the names in every BERT's file to those in this module; transformers applies it at loading, reversed at saving.
BERT_NAMES = [
    WeightRenaming(r"encoder\.layer\.(\d+)\.", r"layers.\1."),
    # The authors' first files say gamma and beta. These lines stand first, so that saving, which goes backwards, never
    # gets to them.
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


# A checkpoint that carries this file may bring it in twice.
register_checkpoint_conversion_mapping(VanillaBertConfig.model_type, BERT_NAMES, overwrite=True)
