"""Write the golden files of this folder: `python tests/golden/regenerate.py`, from the root of the repository.

Run it only when the names of parameters or the results of old checkpoints are meant to change, and say so in the
changelog: a user's checkpoints change with them.

- `state_dict_keys_*.txt`: names and shapes of all parameters of a base model with one layer on each side.
- `vanilla_transformer/`: a small checkpoint that has learnt to write each sentence backwards, as `save_pretrained`
  writes it, and in `expected.json` what it computes. A test loads it with the present code, which must give the same
  within `tolerance`.
- `vanilla_gpt/`: likewise a small language model with random weights.
- `vanilla_vit/`: likewise a small classifier of images with random weights, which computes logits of images of its own
  size and of another.
"""

import json
import os
import pathlib
import shutil
import tempfile

import torch
import transformers

import hf_vanilla
from hf_vanilla import (
    VanillaGptConfig,
    VanillaGptForCausalLM,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaVitConfig,
    VanillaVitForImageClassification,
)


FOLDER = pathlib.Path(__file__).parent
STEPS = 1500
SOURCE = torch.tensor([[3, 4, 5, 6, 2], [7, 8, 9, 2, 0]])
LABELS = torch.tensor([[6, 5, 4, 3, 2], [9, 8, 7, 2, -100]])


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


def trained_model() -> VanillaTransformerForConditionalGeneration:
    """Train a small model to write sentences of three to six words backwards."""
    config = VanillaTransformerConfig(
        vocab_size=13, d_model=16, d_ff=24, num_heads=4, d_k=3, d_v=5, encoder_layers=2, decoder_layers=3, dropout=0.0
    )
    torch.manual_seed(1)
    model = VanillaTransformerForConditionalGeneration(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    for _ in range(STEPS):
        lengths = torch.randint(3, 7, (64, 1))
        places = torch.arange(7)
        words = torch.randint(3, 13, (64, 7))
        source = torch.where(places < lengths, words, torch.where(places == lengths, 2, 0))
        backwards = words.gather(1, (lengths - 1 - places).clamp(min=0))
        labels = torch.where(places < lengths, backwards, torch.where(places == lengths, 2, -100))
        optimizer.zero_grad()
        model(source, attention_mask=(source != 0).long(), labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


def randomise(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Change all weights, so that none of them is trivial."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def language_model() -> transformers.PreTrainedModel:
    """Make a small GPT with random weights, in which no weight or bias is trivial."""
    config = VanillaGptConfig(
        vocab_size=13, hidden_size=12, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=17,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    return randomise(VanillaGptForCausalLM(config))


def image_classifier() -> transformers.PreTrainedModel:
    """Make a small ViT with random weights, in which no weight or bias is trivial."""
    config = VanillaVitConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, image_size=6, patch_size=2,
        num_channels=2, num_labels=5,
    )  # fmt: skip
    torch.manual_seed(1)
    return randomise(VanillaVitForImageClassification(config))


def made_by() -> dict[str, object]:
    """Return the command, the versions, and how far results may differ."""
    return {
        "command": "python tests/golden/regenerate.py",
        "versions": {
            "hf_vanilla": hf_vanilla.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "tolerance": 1e-5,
    }


def expected_logits(model: transformers.PreTrainedModel) -> dict[str, object]:
    """Compute what the classifier must keep producing."""
    images = {"own": torch.randn(2, 2, 6, 6), "other": torch.randn(2, 2, 4, 10)}
    with torch.no_grad():
        logits = {name: model(each, interpolate_pos_encoding=name == "other").logits for name, each in images.items()}
    return {
        **made_by(),
        "images": {name: each.tolist() for name, each in images.items()},
        "logits": {name: each.tolist() for name, each in logits.items()},
    }


def write_checkpoint(name: str, model: transformers.PreTrainedModel, expected: dict[str, object]) -> None:
    """Write a checkpoint with its expected results, whole or not at all."""
    folder = FOLDER / name
    with tempfile.TemporaryDirectory(dir=FOLDER) as unfinished:
        checkpoint = pathlib.Path(unfinished) / folder.name
        model.save_pretrained(checkpoint)
        for code in checkpoint.glob("*.py"):
            code.unlink()  # the present code loads it
        (checkpoint / "expected.json").write_text(json.dumps(expected) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(checkpoint, folder)


def expected_results(
    model: transformers.PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor
) -> dict[str, object]:
    """Compute what the checkpoint must keep producing."""
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    with torch.no_grad():
        outputs = model(**inputs, labels=labels)
    return {
        **made_by(),
        **{name: tensor.tolist() for name, tensor in inputs.items()},
        "labels": labels.tolist(),
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
    model = trained_model()
    write_checkpoint("vanilla_transformer", model, expected_results(model, SOURCE, LABELS))
    prompts = SOURCE.flip(1)  # padding on the left
    write_checkpoint("vanilla_gpt", language_model(), expected_results(language_model(), prompts, prompts))
    write_checkpoint("vanilla_vit", image_classifier(), expected_logits(image_classifier()))


if __name__ == "__main__":
    main()
