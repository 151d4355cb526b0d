"""Parameter names of ViT's checkpoints, and what they are here.

transformers renames when it loads and, backwards, when it saves: files have the names that transformers' `ViTFor...`
writes and reads. transformers 5 has other names in memory, which can be loaded, too.
"""

from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming


# From the names in every ViT's file to those in the models; the names in memory come first. Saving applies the list in
# reverse, and so uses the later of two rules with one target. `(?!)` in a target, which transformers drops, matches
# nothing in reverse.
VIT_NAMES = [
    *(
        WeightRenaming(rf"\.attention\.{memory}\.", rf"(?!)\.attention\.attention\.{file}\.")
        for memory, file in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
    ),
    WeightRenaming(r"layernorm\.", r"norm\."),
    WeightRenaming(r"encoder\.layer\.(\d+)\.", r"layers.\1."),
    WeightRenaming(r"\.layernorm_before\.", ".self_attn_residual.layer_norm."),
    WeightRenaming(r"\.layernorm_after\.", ".feed_forward_residual.layer_norm."),
    *(
        WeightRenaming(rf"\.{theirs}\.", f".{ours}.")
        for theirs, ours in (
            (r"attention\.o_proj", "self_attn.out_proj"),
            (r"mlp\.fc1", "feed_forward.fc1"),
            (r"mlp\.fc2", "feed_forward.fc2"),
            (r"attention\.output\.dense", "self_attn.out_proj"),
            (r"intermediate\.dense", "feed_forward.fc1"),
            (r"output\.dense", "feed_forward.fc2"),
        )
    ),
    *(
        WeightConverter(
            [f".attention.attention.{name}.{kind}" for name in ("query", "key", "value")],
            f".self_attn.qkv_proj.{kind}",
            operations=[Concatenate(dim=0)],
        )
        for kind in ("weight", "bias")
    ),
]
