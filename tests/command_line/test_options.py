"""Options, early checks, loading errors and exit statuses of the scripts."""

import json
import logging
import os
import re
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainingArguments,
)

from hf_vanilla import VanillaBertConfig, VanillaBertModel, VanillaTransformerConfig
from hf_vanilla.command_line.checks import (
    check_models,
    check_output_dir,
    check_results_file,
    explained_loading,
    explained_model_loading,
    without_load_report,
)
from hf_vanilla.command_line.options import INTERRUPTED, parse_arguments, run, set_up_logging
from hf_vanilla.command_line.report import describe_environment, write_report
from hf_vanilla.precision import fastest_precision
from hf_vanilla.training import resume_hint_on_interrupt
from hf_vanilla_cli.options import answer


@dataclass
class OwnArguments:
    apples: int = field(default=3, metadata={"help": "How many apples."})


@dataclass
class OwnTrainingArguments(TrainingArguments):
    warmup_steps: float = field(default=7, metadata={"help": "How long."})


def help_shown(monkeypatch, capsys, option):
    monkeypatch.setattr("sys.argv", ["script.py", option])
    with pytest.raises(SystemExit) as exit:
        parse_arguments(OwnArguments, OwnTrainingArguments, description="What it does to 15 % of them.")
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_help_lists_own_options_and_on_request_the_trainers(capsys, monkeypatch):
    short, (own, others) = (
        help_shown(monkeypatch, capsys, "--help"),
        help_shown(monkeypatch, capsys, "--help_all").split("options of transformers' trainer:"),
    )
    for option in ("--apples INT", "(default: 3)", "--warmup_steps", "What it does to 15 % of them."):
        assert option in short
        assert option in own
        assert option not in others
    assert "--weight_decay" in others
    assert "--weight_decay" not in short + own
    assert "--max_steps" in short.partition("Options of transformers' trainer too")[2]
    assert "--do_train" not in own + others
    monkeypatch.setattr("sys.argv", ["script.py", "--apples", "4", "--weight_decay", "0.5", "--do_train"])
    apples, args = parse_arguments(OwnArguments, OwnTrainingArguments, description=None)
    assert (apples.apples, args.weight_decay, args.do_train) == (4, 0.5, True)


def test_errors_are_printed_with_their_notes(capsys):
    def main():
        error = OSError("no answer")
        error.add_note("Try again later.")
        raise error

    assert run(main) == 1
    assert capsys.readouterr().err == "error: no answer\nTry again later.\n"


@dataclass
class NeedyArguments:
    folder: str = field(metadata={"help": "Must be given."})
    commands: list[str] = field(default_factory=list, metadata={"help": "Any text."})
    is_red: bool = field(default=True, metadata={"help": "Colour."})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--foldr", "x"], "unknown option --foldr; did you mean --folder?"),
        (["--foldr=x y"], "unknown option --foldr; did you mean --folder?"),
        (["--folder", "x", "--xyzzy"], "unknown option --xyzzy."),
        (["--folder", "x", "y", "-z"], "no option takes 'y -z'; names begin with --, values with spaces need quotes."),
    ],
    ids=["before what is missing", "with a value", "like none", "no option"],
)
def test_unknown_options_are_reported_first(capsys, monkeypatch, words, message):
    monkeypatch.setattr("sys.argv", ["script.py", *words])
    with pytest.raises(SystemExit) as exit:
        parse_arguments(NeedyArguments, description=None)
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n--help lists all options.\n"


def test_values_like_options_are_accepted(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", "--folder=-1", "--commands", "a", "--b c", "--no-is-red"])
    (parsed,) = parse_arguments(NeedyArguments, description=None)
    assert (parsed.folder, parsed.commands, parsed.is_red) == ("-1", ["a", "--b c"], False)


def test_unknown_option_of_a_file_is_reported(tmp_path, capsys, monkeypatch):
    (tmp_path / "options.json").write_text('{"foldr": "x"}')
    monkeypatch.setattr("sys.argv", ["script.py", str(tmp_path / "options.json")])
    with pytest.raises(SystemExit):
        parse_arguments(NeedyArguments, description=None)
    assert "unknown option 'foldr'; did you mean folder?\n" in capsys.readouterr().err


def test_options_of_a_yaml_file(tmp_path, capsys, monkeypatch):
    path = tmp_path / "options.yaml"
    monkeypatch.setattr("sys.argv", ["script.py", str(path)])
    path.write_text("apples: 5\nlearning_rate: 3e-4  # a number\noutput_dir: 3e\nwarmup_steps: 2\n")
    own, training_args = parse_arguments(OwnArguments, OwnTrainingArguments, description=None)
    assert (own.apples, training_args.learning_rate, training_args.output_dir) == (5, 3e-4, "3e")
    path.write_text("eval_strategy: no\nsave_strategy: steps\noutput_dir: ~/x\n")
    _, training_args = parse_arguments(OwnArguments, OwnTrainingArguments, description=None)
    assert (training_args.eval_strategy, training_args.save_strategy) == ("no", "steps")
    assert training_args.output_dir == str(Path.home() / "x")
    for text, message in (
        ("apples: [1", "is no YAML file"),
        ("- apples", "one mapping"),
        ("apples: x", "`apples` must be int"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit):
            parse_arguments(OwnArguments, description=None)
        assert message in capsys.readouterr().err


def test_broken_file_of_options_is_named(tmp_path, capsys, monkeypatch):
    path = tmp_path / "options.json"
    path.write_text('{"apples": 5,')
    monkeypatch.setattr("sys.argv", ["script.py", str(path)])
    with pytest.raises(SystemExit):
        parse_arguments(OwnArguments, description=None)
    assert f"error: {path} is no JSON file in UTF-8: Expecting property name" in capsys.readouterr().err


def test_options_after_a_file_replace_its_own(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.yaml").write_text("folder: x\ncommands: [a, b]\nis_red: false\n")
    script = str(tmp_path / "script.py")
    monkeypatch.setattr("sys.argv", [script, "own.yaml", "--commands", "c"])  # a recipe beside the script
    (parsed,) = parse_arguments(NeedyArguments, description=None)
    assert (parsed.folder, parsed.commands, parsed.is_red) == ("x", ["c"], False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("folder: y\n")  # a file of one's own comes first
    (parsed,) = parse_arguments(NeedyArguments, description=None)
    assert (parsed.folder, parsed.commands, parsed.is_red) == ("y", ["c"], True)


def test_wrong_options_after_a_file_are_reported(capsys, monkeypatch):
    options = [{"name": "folder", "type": "str", "required": True}, {"name": "apples", "type": "int"}]
    command = {"groups": [{"title": "Own", "options": options}], "trainer": []}
    answer(command, ["own.yaml", "--apples", "3"], "script.py")
    for words, message in (["--aples", "3"], "--aples; did you mean --apples?"), (["--apples", "x"], "--apples"):
        with pytest.raises(SystemExit):
            answer(command, ["own.yaml", *words], "script.py")
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("is_saved", [True, False], ids=["checkpoint", "none"])
def test_interrupted_training_says_how_to_resume(tmp_path, capsys, is_saved):
    if is_saved:
        (tmp_path / "checkpoint-40").mkdir()
        (tmp_path / "checkpoint-40" / "trainer_state.json").write_text('{"global_step": 40}')
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({}, tmp_path / "checkpoint-40" / name)

    def train():
        with resume_hint_on_interrupt(tmp_path):
            raise KeyboardInterrupt

    assert run(train) == INTERRUPTED
    hint = (
        f"The same command resumes from {tmp_path / 'checkpoint-40'}."
        if is_saved
        else "There is no checkpoint yet (--save_steps), so the same command starts from the beginning."
    )
    assert capsys.readouterr().err == f"\ninterrupted\n{hint}\n"


@pytest.mark.promise("disk full")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
@pytest.mark.parametrize(
    "write",
    [
        lambda: torch.save({"weight": torch.ones(10)}, "/dev/full"),
        lambda: torch.save({"weight": torch.ones(100_000)}, "/dev/full"),
        lambda: Tokenizer(WordLevel({"a": 0})).save("/dev/full"),
    ],
    ids=["small", "large", "tokenizer"],
)
def test_full_disk_is_reported_in_one_line(capsys, write):
    assert run(write) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a file could not be written, most likely because the disk is full: ")


def test_other_errors_keep_their_traceback(tmp_path, capsys):
    torch.save({"weight": torch.ones(1000)}, tmp_path / "cut_off.pt")
    os.truncate(tmp_path / "cut_off.pt", 900)
    with pytest.raises(RuntimeError, match="PytorchStreamReader failed"):
        run(lambda: torch.load(tmp_path / "cut_off.pt"))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    with pytest.raises(Exception, match="No such file"):
        run(lambda: Tokenizer.from_file(str(tmp_path / "none.json")))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("given", ["link", "link/run"])
def test_broken_link_is_no_folder(tmp_path, given):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="`output_dir` .* must be a folder, but .*link is a broken link; remove"):
        check_output_dir(str(tmp_path / given))
    (tmp_path / "gone").mkdir()
    check_output_dir(str(tmp_path / given))


def test_folder_of_results_is_created_with_them(tmp_path):
    path = tmp_path / "runs" / "reviews" / "results.json"
    check_results_file(str(path))
    assert list(tmp_path.iterdir()) == []
    write_report(str(path), {"main_score": "accuracy"}, "sacrebleu")
    written = json.loads(path.read_text())
    assert written["main_score"] == "accuracy"
    assert written["versions"]["sacrebleu"] == version("sacrebleu")


def test_unwritable_results_file_raises_early(tmp_path):
    with pytest.raises(ValueError, match=f"`results_file` must be a file, but {tmp_path} is a folder; give a file in"):
        check_results_file(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`results_file` \(.*r.json\) must be in a folder that can be written to: "):
        check_results_file(str(tmp_path / "file" / "r.json"))
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"must be in a folder, but .*link is a broken link; remove it"):
        check_results_file(str(tmp_path / "link" / "r.json"))


@pytest.mark.parametrize(
    ("is_first", "logged"), [(True, ["progress", "problem", "slow"]), (False, ["problem", "slow"])]
)
def test_requests_to_the_hub_are_not_logged(tmp_path, caplog, monkeypatch, is_first, logged):
    loggers = logging.getLogger(), logging.getLogger("httpx"), logging.getLogger("transformers")
    levels = [logger.level for logger in loggers]
    monkeypatch.setattr(TrainingArguments, "should_log", is_first)
    monkeypatch.setattr(loggers[0], "handlers", [])  # so that the root has none yet, as in a script
    try:
        set_up_logging(TrainingArguments(str(tmp_path), use_cpu=True))
        loggers[0].addHandler(caplog.handler)
        logging.getLogger("train").info("progress")
        logging.getLogger("train").warning("problem")
        loggers[1].info("HTTP Request: POST")
        loggers[1].warning("slow")
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    assert caplog.messages == logged


def test_load_report_alone_is_silenced(caplog):
    reporter = logging.getLogger("transformers.modeling_utils")
    caplog.set_level(logging.WARNING, logger="transformers")
    with without_load_report():
        reporter.warning("Model LOAD REPORT from: x")
        reporter.warning("Something else.")
    reporter.warning("Model LOAD REPORT from: y")
    assert caplog.messages == ["Something else.", "Model LOAD REPORT from: y"]


@pytest.mark.parametrize(
    ("config", "load", "needed"),
    [
        (
            VanillaBertConfig(),
            AutoModelForSeq2SeqLM.from_pretrained,
            "AutoModelForSeq2SeqLM, such as a vanilla_transformer,",
        ),
        (
            VanillaTransformerConfig(),
            lambda name: AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(name)),
            "AutoModelForSequenceClassification, such as a vanilla_bert,",
        ),
        (
            VanillaBertConfig(),
            lambda name: AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(name)),
            "AutoModelForImageClassification, such as a vanilla_vit,",
        ),
    ],
    ids=["translator", "classifier", "classifier of images"],
)
def test_wrong_kind_of_model_is_reported_in_one_line(tmp_path, config, load, needed):
    config.save_pretrained(tmp_path)
    message = re.escape(f"`model` ({tmp_path}) must be a model for {needed} got a {config.model_type}.") + "$"
    with pytest.raises(ValueError, match=message), explained_loading("model", str(tmp_path)):
        load(str(tmp_path))


def test_folder_of_models_names_one(tmp_path):
    (tmp_path / "seed-7").mkdir()
    (tmp_path / "seed-7" / "config.json").write_text("{}")
    message = "has no config.json; give one of its subfolders, such as .*seed-7"
    with pytest.raises(ValueError, match=message), explained_loading("model", tmp_path):
        AutoTokenizer.from_pretrained(tmp_path)
    with explained_loading("model", tmp_path):  # as of a tokenizer in the folder of a run
        pass


@pytest.mark.promise("hostile weights")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"not those of a VanillaBertModel with its config.json: it lacks layers\.2"),
        ({"num_hidden_layers": 1}, r"with its config.json: it has also layers\.1"),
        ({"intermediate_size": 24}, r"layers.0.feed_forward.fc1.bias has shape \[20\], not \[24\]"),
    ],
    ids=["lacks", "has also", "shape"],
)
def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path, changes, message):
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 8}
    config = VanillaBertConfig(**sizes, num_hidden_layers=2, intermediate_size=20)
    VanillaBertModel(config).save_pretrained(tmp_path)
    with explained_model_loading("model", tmp_path):  # a new head is no fault
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, **changes}))
    with pytest.raises(ValueError, match=message), explained_model_loading("model", tmp_path):
        raise AssertionError("not reached")


@pytest.mark.promise("absurd sizes")
def test_absurd_file_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json must not nest"), explained_loading("model", tmp_path):
        AutoConfig.from_pretrained(tmp_path)


def test_cut_tokenizer_names_the_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "WordLe')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    message = rf"`model` \({tmp_path}\) has a JSON file that is cut or damaged: Unterminated string"
    with pytest.raises(ValueError, match=message), explained_loading("model", tmp_path):
        AutoTokenizer.from_pretrained(tmp_path)


def test_tokenizer_of_another_schema_names_the_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    message = rf"`model` \({tmp_path}\) has a file of tokenizer or config without 'added_tokens'"
    with pytest.raises(ValueError, match=message), explained_loading("model", tmp_path):
        AutoTokenizer.from_pretrained(tmp_path)


def test_other_loading_errors_are_unchanged(tmp_path):
    with pytest.raises(ValueError, match="^Something else"), explained_loading("model", str(tmp_path)):
        raise ValueError("Something else.")


@pytest.mark.parametrize("given", ["{}/no", "./no", "../no", "~/no", "runs/no", "runs/bert/checkpoint-7"])
def test_missing_model_folder_raises_early(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="`model` must name .* but there is no folder .*(no|7).$"):
        check_models(model=given.format(tmp_path))


def test_names_of_the_hub_and_existing_folders_are_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "en-de").mkdir(parents=True)
    check_models(one="google-bert/bert-base-uncased", two="bert-base-uncased", three="runs/en-de", four=None)


@pytest.mark.parametrize(
    ("preloaded", "names"),
    [("", None), ("/some/lib/libtcmalloc.so.4", ["libtcmalloc.so.4"]), ("a/b.so c.so:d.so", ["b.so", "c.so", "d.so"])],
)
def test_environment_names_preloaded_libraries(monkeypatch, preloaded, names):
    monkeypatch.setenv("LD_PRELOAD", preloaded)
    machine = describe_environment()["machine"]
    assert machine.get("preloaded") == names
    assert machine["processor"]


def test_report_has_the_speed_of_products_in_both_precisions(tmp_path):
    write_report(str(tmp_path / "report.json"), {"main_score": "bleu"})
    machine = json.loads((tmp_path / "report.json").read_text())["machine"]
    measured = fastest_precision().gflops
    if measured is None:  # a processor without bfloat16
        assert not {"cpu_gflops", "cpu_threads"} & machine.keys()
    else:
        speeds = {"float32": measured[torch.float32], "bfloat16": measured[torch.bfloat16]}
        assert machine["cpu_gflops"] == {name: round(speed) for name, speed in speeds.items()}
        assert machine["cpu_threads"] == torch.get_num_threads()
