"""Parameter names of the checkpoints of transformers' `openai-gpt` and `gpt2`, and what they are here.

The two differ in the names of the embeddings; GPT-2 has one more norm. Matrices of layers are transposed in files.
"""

from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming


_OPENAI_EMBEDDINGS = [
    WeightRenaming(r"tokens_embed\.", "embed_tokens."),
    WeightRenaming(r"positions_embed\.", "embed_positions."),
]
_GPT2_EMBEDDINGS = [
    WeightRenaming(r"wte\.", "embed_tokens."),
    WeightRenaming(r"wpe\.", "embed_positions."),
    WeightRenaming(r"ln_f\.", "norm."),
]
_MATRICES = {
    ".attn.c_attn": ".self_attn.qkv_proj",
    ".attn.c_proj": ".self_attn.out_proj",
    ".mlp.c_fc": ".feed_forward.fc1",
    ".mlp.c_proj": ".feed_forward.fc2",
}
_LAYERS = [
    WeightRenaming(r"h\.(\d+)\.", r"layers.\1."),
    WeightRenaming(r"\.ln_1\.", ".self_attn_residual.layer_norm."),
    WeightRenaming(r"\.ln_2\.", ".feed_forward_residual.layer_norm."),
    *(WeightRenaming(f"{theirs}.bias", f"{ours}.bias") for theirs, ours in _MATRICES.items()),
    *(WeightConverter(f"{theirs}.weight", f"{ours}.weight", [Transpose()]) for theirs, ours in _MATRICES.items()),
]

# For each place of the norm, the names of the checkpoints that have it there. Saving applies the rules backwards,
# those of layers first: their norms have other names then than the last one.
GPT_NAMES = {"post": [*_OPENAI_EMBEDDINGS, *_LAYERS], "pre": [*_GPT2_EMBEDDINGS, *_LAYERS]}
