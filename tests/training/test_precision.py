"""The choice between float32 and bfloat16: by injected timings, by device, and where it is used."""

from contextlib import contextmanager

import pytest
import torch
from tiny_translation import tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer
from transformers import Trainer, pipeline

from hf_vanilla import precision
from hf_vanilla.generation import load_translator
from hf_vanilla.precision import Precision, choose_faster, fastest_precision
from hf_vanilla.training import FinetuningArguments, VanillaTrainingArguments, arguments, begin_run


@pytest.mark.parametrize(
    ("float32", "bfloat16", "chosen"),
    [
        ([0.01], [0.004], torch.bfloat16),
        ([0.004], [0.01], torch.float32),
        ([0.010], [0.009], torch.float32),  # casts cost more than this gains
        ([0.01, 0.09, 0.01], [0.004, 0.09, 0.004], torch.bfloat16),  # a slow moment
        ([2.0], [3.0], torch.float32),
    ],
    ids=["faster", "slower", "hardly faster", "disturbed", "slow CPU"],
)
def test_faster_type_is_chosen(float32, bfloat16, chosen):
    turns = {torch.float32: list(float32), torch.bfloat16: list(bfloat16)}
    measured = []

    def measure(dtype):
        values = turns[dtype]
        measured.append(values.pop(0) if len(values) > 1 else values[0])
        return measured[-1]

    choice = choose_faster(measure)
    assert choice.dtype == chosen
    assert choice.name == str(chosen)[6:]
    assert choice.gflops[torch.float32] == pytest.approx(2 * 256 * 512 * 2048 / sorted(float32)[0] / 1e9)
    for speed in choice.gflops.values():
        assert f"{speed:.3g}" in str(choice)
    assert sum(measured[2:-2]) < precision.MAX_SECONDS  # no turn begins after that


def test_slow_cpu_gets_one_turn():
    seconds = []
    choose_faster(lambda dtype: seconds.append(0.4) or 0.4)
    assert len(seconds) == 4  # one to prepare and one to measure, of each type


def test_cpu_is_measured_only_if_it_has_the_kernel(monkeypatch):
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: False)
    monkeypatch.setattr(precision, "choose_faster", None)
    precision.forget()
    try:
        choice = fastest_precision()
    finally:
        precision.forget()
    assert (choice.dtype, choice.gflops) == (torch.float32, None)
    assert str(choice) == "float32: this CPU has no bfloat16 products"


def test_this_machine_gets_an_answer():
    choice = fastest_precision("cpu")
    assert choice is fastest_precision(torch.device("cpu"))
    assert choice.dtype in (torch.float32, torch.bfloat16)
    assert choice.gflops is None or min(choice.gflops.values()) > 0


@pytest.mark.parametrize(("has_it", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_gpu_is_asked(monkeypatch, has_it, dtype):
    chosen = []

    @contextmanager
    def choose(device):
        chosen.append(device)
        yield
        chosen.pop()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", choose)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_it and chosen == ["cuda:1"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    choice = fastest_precision("cuda:1")
    assert (choice.dtype, choice.reason.startswith("A card has ")) == (dtype, True)


def test_missing_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="`device` must be one of the 1 GPUs or cpu, got cuda:1"):
        fastest_precision("cuda:1")


def test_other_devices_keep_float32():
    assert fastest_precision("mps").dtype == torch.float32


@pytest.fixture
def chooses(monkeypatch):
    """Return a function that sets what is the fastest, and a list of the questions."""
    asked = []

    def choose(dtype):
        def answer(device):
            asked.append(torch.device(device).type)
            return Precision(dtype, "measured")

        monkeypatch.setattr(precision, "fastest_precision", answer)
        monkeypatch.setattr(arguments, "fastest_precision", answer)
        return asked

    return choose


@pytest.mark.parametrize("kind", [VanillaTrainingArguments, FinetuningArguments])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_uses_the_fastest(tmp_path, chooses, kind, dtype):
    asked = chooses(dtype)
    args = kind(output_dir=str(tmp_path), use_cpu=True, precision="fastest")
    assert asked == ["cpu"]
    assert args.precision == str(dtype)[6:]
    assert args.bf16 == (dtype == torch.bfloat16)
    model = tiny_model()
    trainer = Trainer(model, args, tiny_collator(model), tiny_pairs(4))
    assert trainer.accelerator.mixed_precision == ("bf16" if args.bf16 else "no")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, False)),
        ({"precision": "bfloat16"}, ("bfloat16", True)),
        ({"precision": "float32"}, ("float32", False)),
        ({"precision": "fastest", "bf16": True}, (None, True)),
        ({"precision": "float32", "bf16": True}, (None, True)),
    ],
    ids=str,
)
def test_what_is_given_is_not_measured(tmp_path, chooses, given, expected):
    asked = chooses(torch.float32)
    args = VanillaTrainingArguments(str(tmp_path), use_cpu=True, **given)
    assert (args.precision, args.bf16) == expected
    assert args.mixed_precision == ("bf16" if args.bf16 else "no")
    assert asked == []


def test_unknown_precision_raises(tmp_path):
    with pytest.raises(ValueError, match="`precision` must be fastest, float32 or bfloat16, got 'half'"):
        VanillaTrainingArguments(str(tmp_path), precision="half")


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16], ids=str)
def test_resumed_run_keeps_its_choice(tmp_path, chooses, first):
    def arguments_of_run(**given):
        return VanillaTrainingArguments(str(tmp_path), use_cpu=True, **{"precision": "fastest", **given})

    chooses(first)
    args = arguments_of_run()
    begin_run(args)
    (tmp_path / "config.json").touch()  # the run has a model
    asked = chooses(torch.float32 if first == torch.bfloat16 else torch.bfloat16)
    asked.clear()
    again = arguments_of_run()
    assert (again.precision, again.bf16, asked) == (args.precision, args.bf16, [])
    begin_run(again)
    begin_run(arguments_of_run(precision=again.precision))
    begin_run(arguments_of_run(precision=None, bf16=again.bf16))
    other = "float32" if again.bf16 else "bfloat16"
    with pytest.raises(ValueError, match=f"`bf16` is {not again.bf16}, not the {again.bf16}"):
        begin_run(arguments_of_run(precision=other))


def test_resumed_fine_tuning_keeps_its_choice(tmp_path, chooses):
    (tmp_path / "seed-7").mkdir()
    (tmp_path / "seed-7" / "_run_options.json").write_text('{"bf16": true}')
    asked = chooses(torch.float32)
    args = FinetuningArguments(output_dir=str(tmp_path), use_cpu=True, precision="fastest")
    assert (args.precision, args.bf16, asked) == ("bfloat16", True, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_translation_uses_the_fastest(tmp_path, chooses, dtype):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    asked = chooses(dtype)
    assert load_translator(str(tmp_path), dtype="fastest", device="cpu")[0].dtype == dtype
    translator = pipeline("vanilla-translation", model=str(tmp_path), dtype="fastest", device="cpu")
    assert translator.model.dtype == dtype
    assert len(asked) == 2
    assert translator("4 5") == pipeline("vanilla-translation", model=str(tmp_path), dtype=dtype, device="cpu")("4 5")
    assert len(asked) == 2
