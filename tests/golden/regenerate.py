"""Write the golden files of this folder: `python tests/golden/regenerate.py`, from the root of the repository.

Run it only when the names of parameters or the results of old checkpoints are meant to change, and say so in the
changelog: a user's checkpoints change with them.

- `state_dict_keys_*.txt`: names and shapes of all parameters of a base model with one layer on each side.
- `vanilla_transformer/`: a small checkpoint with random weights, as `save_pretrained` writes it, and in
  `expected.json` what it computes. A test loads it with the present code, which must give the same within `tolerance`.
"""

import json
import os
import pathlib
import shutil
import tempfile

import torch
import transformers

import hf_vanilla
from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


FOLDER = pathlib.Path(__file__).parent
SOURCE = torch.tensor([[3, 4, 5, 6, 2], [7, 8, 2, 0, 0]])
LABELS = torch.tensor([[5, 6, 7, 8, 9, 10, 2], [5, 11, 2, -100, -100, -100, -100]])


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def write_state_dict_keys(name: str, **overrides: object) -> None:
    """Write the names and shapes of the parameters of a model with one layer on each side."""
    config = VanillaTransformerConfig(encoder_layers=1, decoder_layers=1, **overrides)
    with torch.device("meta"):
        state = VanillaTransformerForConditionalGeneration(config).state_dict()
    lines = [f"{key} {tuple(tensor.shape)}\n" for key, tensor in state.items()]
    write_text(FOLDER / f"state_dict_keys_{name}.txt", "".join(lines))


def random_model() -> VanillaTransformerForConditionalGeneration:
    """Build a model whose sequences differ from sentence to sentence."""
    config = VanillaTransformerConfig(
        vocab_size=13, d_model=16, d_ff=24, num_heads=4, d_k=3, d_v=5, encoder_layers=2, decoder_layers=3
    )
    torch.manual_seed(1)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.model.encoder.layers.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for parameter in model.model.decoder.layers.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def expected_results(model: VanillaTransformerForConditionalGeneration) -> dict[str, object]:
    """Compute what the checkpoint must go on giving."""
    inputs = {"input_ids": SOURCE, "attention_mask": (SOURCE != 0).long()}
    with torch.no_grad():
        outputs = model(**inputs, labels=LABELS)
    return {
        "command": "python tests/golden/regenerate.py",
        "versions": {
            "hf_vanilla": hf_vanilla.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "tolerance": 1e-5,
        **{name: tensor.tolist() for name, tensor in inputs.items()},
        "labels": LABELS.tolist(),
        "logits": outputs.logits.tolist(),
        "loss": outputs.loss.item(),
        "sequences": {
            str(num_beams): model.generate(**inputs, num_beams=num_beams, max_new_tokens=8).tolist()
            for num_beams in (1, 4)
        },
    }


def main() -> None:
    """Write everything."""
    write_state_dict_keys("base")
    write_state_dict_keys(
        "pre_learned_separate",
        norm_position="pre",
        position_type="learned",
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
    )
    model = random_model()
    folder = FOLDER / "vanilla_transformer"
    with tempfile.TemporaryDirectory(dir=FOLDER) as unfinished:
        checkpoint = pathlib.Path(unfinished) / folder.name
        model.save_pretrained(checkpoint)
        (checkpoint / "expected.json").write_text(json.dumps(expected_results(model)) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(checkpoint, folder)


if __name__ == "__main__":
    main()
