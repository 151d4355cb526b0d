"""Checkpoints and runs written to disk without a training."""

import json

import torch
from safetensors.torch import save_file


WEIGHTS = "model.safetensors"


def write_checkpoint(folder, *, seed=0, dtype=torch.float32, num_shards=1, **changes):
    """Write a checkpoint of three tensors, in one file or in several."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "embedding": torch.randn(5, 4, generator=generator).to(dtype),
        "projection": torch.randn(3, 4, generator=generator).to(dtype),
        "position_ids": torch.arange(7),
        **changes,
    }
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    folder.mkdir(parents=True)
    if num_shards == 1:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    else:
        files = {name: f"model-{1 + number % num_shards}.safetensors" for number, name in enumerate(sorted(tensors))}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"d_model": 4, "transformers_version": str(seed)}))
    return tensors


def write_run(folder, values, *, metric="eval_loss"):
    """Write the folder of a run with one checkpoint and one value of the metric for each hundred steps."""
    history = []
    for number, value in enumerate(values, start=1):
        write_checkpoint(folder / f"checkpoint-{100 * number}", seed=number)
        history += [{"step": 100 * number, "loss": 1.0}, {"step": 100 * number, metric: value, "eval_runtime": 1.0}]
        state = {"log_history": list(history)}
        (folder / f"checkpoint-{100 * number}" / "trainer_state.json").write_text(json.dumps(state))
    return folder


def steps_of(folders):
    return [int(folder.name.removeprefix("checkpoint-")) for folder in folders]
