"""Parameter names of BERT's checkpoints, and what they are here.

transformers renames when it loads and, backwards, when it saves: files have BERT's own names, which transformers'
`BertFor...` read too.
"""

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
