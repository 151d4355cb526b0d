"""The faults of the scoreboard on transformers' own `Trainer` and BERT, at the sizes of the tests: what happens.

Run by `python tests/scoreboard.py --stock`; alone, it prints what it found.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments


SIZES = dict(
    vocab_size=13, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
    max_position_embeddings=11,
)  # fmt: skip
IDS = torch.randint(3, 13, (12, 7), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in IDS]
QUIET = dict(use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, report_to="none")


class Fault(TrainerCallback):
    """Does something to the model after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Act after the step."""
        if state.global_step == self.step:
            self.action(model)


def train(folder, checkpoint=None, fault=None, config=None, **changes):
    """Train with the stock trainer for four steps with a checkpoint at each; return the weights."""
    transformers.set_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES, **(config or {})))
    args = TrainingArguments(
        str(folder), **{"max_steps": 4, "save_steps": 1, "per_device_train_batch_size": 3, **QUIET, **changes}
    )
    trainer = Trainer(model, args, train_dataset=ROWS, callbacks=[fault] if fault else [])
    trainer.train(resume_from_checkpoint=checkpoint)
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def outcome(action, expected=None):
    """Say what happens: the error, or whether the weights at the end are the expected ones."""
    try:
        result = action()
    except Exception as error:  # what it is, is the result
        message = str(error).strip().splitlines()[0].partition(": '")[0]  # without paths
        return f"{type(error).__name__}: {message[:60].strip()}"
    if expected is None:
        return str(result)
    if any(each.isnan().any() for each in result.values()):
        return "no error; NaN weights are saved"
    same = all(torch.equal(result[name], each) for name, each in expected.items())
    return "no error; the same weights at the end" if same else "no error; other weights at the end"


def flip(path):
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def change(path, action):
    """Change the tensors of a file."""
    tensors = load_file(path)
    action(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def set_nan(model):
    """Set one weight to NaN, as a fault of the machine would."""
    next(model.parameters()).data[3] = torch.nan


def resumed_after(damage, run, expected):
    """Damage the third of four checkpoints, remove the fourth, and resume."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(run, copy)
        shutil.rmtree(copy / "checkpoint-4")
        damage(copy / "checkpoint-3")
        return outcome(lambda: train(copy, checkpoint=True), expected)


def remove(*names):
    """Return a damage: files that are missing."""
    return lambda folder: [(folder / name).unlink() for name in names]


WEIGHTS = "model.safetensors"
DAMAGES = {
    "killed inside a save": remove("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"),
    "file missing": remove("optimizer.pt", "scheduler.pt"),
    "file cut short": lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2),
    "flipped bit": lambda folder: flip(folder / WEIGHTS),
    "tensor missing": lambda folder: change(
        folder / WEIGHTS, lambda tensors: tensors.pop("bert.encoder.layer.0.intermediate.dense.weight")
    ),
    "hostile weights": lambda folder: change(
        folder / WEIGHTS, lambda tensors: tensors["bert.embeddings.word_embeddings.weight"].fill_(torch.nan)
    ),
}


def after_signal(folder):
    """Send SIGTERM to a training, from inside it."""
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]); import stock_faults as stock;"
        "stop = stock.Fault(3, lambda model: os.kill(os.getpid(), signal.SIGTERM));"
        "stock.train(sys.argv[2], fault=stop, save_steps=4)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), str(folder)], capture_output=True)
    saved = len(list(Path(folder).glob("checkpoint-*")))
    ended = f"ended by signal {signal.Signals(-done.returncode).name}" if done.returncode < 0 else "ended"
    return f"{ended}; {saved or 'no'} checkpoint saved"


def of_inputs(model, **inputs):
    """Say what a model makes of inputs."""
    output = model(**inputs)
    finite = all(each.isfinite().all() for each in output.to_tuple())
    return f"no error; {'finite numbers' if finite else 'NaN'}"


def run():
    """Try every fault, and return what happened to each."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_dir = Path(folder) / "run"
        expected = train(run_dir)
        if "the same weights" not in resumed_after(lambda folder: None, run_dir, expected):
            raise RuntimeError("without a fault, a resumed run must end with the same weights")
        for fault, damage in DAMAGES.items():
            found[fault] = resumed_after(damage, run_dir, expected)
        third = str(run_dir / "checkpoint-2")
        elsewhere = Path(folder) / "elsewhere"
        found["other processes or batches"] = outcome(
            lambda: train(elsewhere, third, per_device_train_batch_size=2), expected
        )
        found["other config, tokenizer or data"] = outcome(
            lambda: train(elsewhere, third, config={"hidden_dropout_prob": 0.4}), expected
        )
        found["two runs in one folder"] = outcome(
            lambda: train(elsewhere, fault=Fault(2, lambda _: train(elsewhere))) and "no error; files of both"
        )
        found["NaN"] = outcome(lambda: train(elsewhere, fault=Fault(2, set_nan)), expected)
        found["SIGTERM or Ctrl-C"] = after_signal(Path(folder) / "killed")
        token = "hf_" + "b" * 34
        train(elsewhere, hub_token=token)
        saved = token.encode() in (elsewhere / "checkpoint-4" / "training_args.bin").read_bytes()
        found["token of the Hub"] = "saved in training_args.bin" if saved else "not saved"
        file = Path(folder) / "file"
        file.touch()
        found["folder not writable"] = outcome(lambda: train(file / "run"), expected)
    model, ids = BertForMaskedLM(BertConfig(**SIZES)).eval(), IDS[:2]
    with torch.no_grad():
        for fault, inputs in {
            "no labels": dict(input_ids=ids, labels=torch.full_like(ids, -100)),
            "id outside the vocabulary": dict(input_ids=ids + 5),
            "row of padding": dict(input_ids=ids, attention_mask=torch.tensor([[1], [0]]).expand(2, 7)),
            "empty batch or sentence": dict(input_ids=ids[:, :0]),
            "too long": dict(input_ids=IDS.view(4, 21)),
            "mask of another shape": dict(input_ids=ids, attention_mask=torch.ones(2, 6)),
        }.items():
            found[fault] = outcome(lambda inputs=inputs: of_inputs(model, **inputs))
    found["nonsense in a config"] = outcome(
        lambda: BertConfig(**{**SIZES, "num_hidden_layers": -3}) and "no error for -3 layers"
    )
    return {fault: text.replace("|", "/").replace("*", "") for fault, text in found.items()}


if __name__ == "__main__":
    with contextlib.redirect_stderr(sys.stdout):
        print(*(f"{fault}: {text}" for fault, text in run().items()), sep="\n")
