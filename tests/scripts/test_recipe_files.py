"""The files of the papers' settings: each starts a training, and states what it costs."""

import json

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from datasets import Dataset
from script_runner import SCRIPTS, run_here, write_documents

from hf_vanilla import VanillaBertConfig, VanillaGptConfig, VanillaTransformerConfig
from hf_vanilla.data import date_corpus
from hf_vanilla.training import GPT_RECIPE, bert_training_arguments, estimate, paper_training_arguments


FOLDER = SCRIPTS / "recipes"
NAMES = ("transformer_base", "transformer_big", "bert_base", "bert_large", "gpt")
# Operations per second that the costs assume: a share of what the GPU computes at most in bfloat16, without sparsity.
SHARE, PEAKS = 0.4, {"H200": 989e12, "A100": 312e12}
SENTENCE, BLOCK, CORPUS = 28, 512, 1e9  # tokens of a sentence of WMT 2014, of GPT's blocks and of its corpus
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TINY = {
    "transformer": {
        **{"d_model": 16, "d_ff": 24, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 2},
        **{"max_tokens_per_batch": 128, "average_last": 0},
    },
    "bert": {**SIZES, "phase_lengths": (16, 32), "max_tokens_per_batch": 64, "validation_share": 0.2},
    "gpt": {**SIZES, "block_length": 16, "per_device_train_batch_size": 2, "validation_share": 0.2},
}
COMMON = {"vocab_size": 300, "max_steps": 2, "preprocessing_num_workers": 1, "gradient_accumulation_steps": 1}


def read(name):
    options = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return {key: float(value) if key in ("learning_rate", "adam_epsilon") else value for key, value in options.items()}


def tokens_of_an_update(options, gpus):
    tokens = options.get("max_tokens_per_batch") or options["per_device_train_batch_size"] * BLOCK
    return tokens * gpus * options.get("gradient_accumulation_steps", 1)


def kinds_of_rows(name, options, tokens):
    """Return config, columns, their length and the number of updates of each kind of row."""
    if name.startswith("transformer"):
        config = VanillaTransformerConfig.preset(options["preset"], vocab_size=options["vocab_size"])
        return [(config, ("input_ids", "labels"), SENTENCE, options["max_steps"])]
    if name.startswith("bert"):
        config = VanillaBertConfig.preset(options["preset"], vocab_size=options["vocab_size"])
        phases = zip(options["phase_lengths"], options["phase_shares"], strict=True)
        return [(config, ("input_ids",), length, round(share * options["max_steps"])) for length, share in phases]
    config = VanillaGptConfig.preset(options["preset"], vocab_size=options["vocab_size"])
    return [(config, ("input_ids",), BLOCK, round(options["num_train_epochs"] * CORPUS / tokens))]


def cost(name, gpus):
    """Return the lines on the cost of a training."""
    options = read(name)
    tokens = tokens_of_an_update(options, gpus)
    hours, flops = dict.fromkeys(PEAKS, 0.0), 0.0
    for config, columns, length, updates in kinds_of_rows(name, options, tokens):
        rows = Dataset.from_dict(dict.fromkeys(columns, [[5] * length] * (2 * (tokens // length))))
        for gpu, peak in PEAKS.items():
            speed = SHARE * peak * gpus
            costs = estimate(config, rows, updates=updates, max_tokens_per_batch=tokens, flops_per_second=speed)
            hours[gpu] += costs.seconds / 3600
        flops += costs.flops
    assumed = {"t": f" for sentences of {SENTENCE} tokens", "b": "", "g": " for a billion tokens of text"}[name[0]]
    many = "one" if gpus == 1 else "eight"
    times = " or ".join(f"{each:.{2 if each < 100 else 3}g} on {many} {gpu}" for gpu, each in hours.items())
    peaks = " and ".join(f"{peak / 1e12:.0f}" for peak in PEAKS.values())
    return (
        f"# Estimated, not measured: {flops:.1e} operations{assumed}. Hours: {times}, if\n"
        f"# {SHARE * 100:.0f} % of their {peaks} TFLOP/s in bfloat16 are reached, without evaluation and saving.\n"
    )


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_cost_is_that_of_the_estimate(name, gpus):
    name += "_8_gpus" * (gpus == 8)
    assert cost(name, gpus) in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


# Tokens of an update, and what the papers say besides the optimizer.
BERT = {"max_steps": 1_000_000, "phase_lengths": [128, 512], "phase_shares": [0.9, 0.1], "mlm_probability": 0.15}
PAPERS = {
    "transformer_base": (25_000, {"max_steps": 100_000, "vocab_size": 37_000, "average_last": 5}),
    "transformer_big": (25_000, {"max_steps": 300_000, "vocab_size": 37_000, "average_last": 20}),
    "bert_base": (256 * 512, {**BERT, "weight_decay": 0.01, "warmup_steps": 10_000, "learning_rate": 1e-4}),
    "bert_large": (256 * 512, {**BERT, "weight_decay": 0.01, "warmup_steps": 10_000, "learning_rate": 1e-4}),
    "gpt": (64 * 512, {"num_train_epochs": 100, "weight_decay": 0.01, "warmup_steps": 2000, "learning_rate": 2.5e-4}),
}


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_papers(name):
    tokens, expected = PAPERS[name]
    options = read(name)
    assert tokens_of_an_update(options, 1) == tokens
    assert {each: options[each] for each in expected} == expected


@pytest.mark.parametrize("name", NAMES)
def test_eight_gpus_have_the_update_of_one(name):
    one, eight = read(name), read(f"{name}_8_gpus")
    assert tokens_of_an_update(one, 1) == tokens_of_an_update(eight, 8)
    sizes = {"max_tokens_per_batch", "per_device_train_batch_size", "gradient_accumulation_steps"}
    assert {key: one[key] for key in one.keys() - sizes} == {key: eight[key] for key in eight.keys() - sizes}


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_is_the_papers(name, tmp_path):
    options = read(name)
    if name == "gpt":
        paper = GPT_RECIPE
    elif name.startswith("bert"):
        paper = vars(bert_training_arguments(str(tmp_path)))
    else:
        config = VanillaTransformerConfig.preset(options["preset"], vocab_size=11)
        paper = vars(paper_training_arguments(config, str(tmp_path)))
    names = {"learning_rate", "lr_scheduler_type", "warmup_steps", "adam_beta1", "adam_beta2", "adam_epsilon"}
    names = (names | {"max_grad_norm"}) & options.keys()
    assert len(names) >= 6
    assert {each: options[each] for each in names} == {each: paper[each] for each in names}


def test_accelerate_starts_eight_processes():
    config = load_config_from_file(str(FOLDER / "accelerate_8_gpus.yaml"))
    assert (config.distributed_type, config.num_processes, config.num_machines) == ("MULTI_GPU", 8, 1)
    assert config.mixed_precision == "bf16"


def write_data(family, folder):
    """Write text as the recipe expects it, and return the options that name it."""
    documents = write_documents(folder) / "train.txt"
    if family == "gpt":
        return {"train_files": documents}
    (folder / "data").mkdir()
    rows = [{"text": each} for each in documents.read_text().split("\n\n")]
    if family == "transformer":
        rows = [{"translation": {"en": each["source"], "de": f"am {each['target']}"}} for each in date_corpus(60)]
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"dataset_name": folder / "data", "dataset_config_name": "default"}


@pytest.mark.parametrize("gpus", ["", "_8_gpus"])
@pytest.mark.parametrize("name", NAMES)
def test_recipe_starts_a_training(name, gpus, tmp_path, monkeypatch):
    family = name.split("_")[0]
    options = {**TINY[family], **COMMON, **write_data(family, tmp_path), "output_dir": tmp_path / "run"}
    words = []
    for key, value in options.items():
        words += [f"--{key}", *(value if isinstance(value, tuple) else [value])]
    script = {"transformer": "train_translation", "bert": "pretrain_bert", "gpt": "pretrain_gpt"}[family]
    assert run_here(monkeypatch, f"{script}.py", f"{name}{gpus}.yaml", "--disable_tqdm", "true", *words) == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == 2
    assert (tmp_path / "run" / "model.safetensors").exists()
