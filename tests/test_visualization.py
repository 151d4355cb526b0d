import sys

import numpy as np
import pytest
import torch
from matplotlib import font_manager
from PIL import Image

from hf_vanilla import visualization
from hf_vanilla.data.tokenization import train_tokenizer, train_wordpiece_tokenizer
from hf_vanilla.visualization import (
    plot_attention,
    plot_image_attention,
    plot_learning_rate,
    plot_position_encodings,
    plot_position_losses,
    plot_training_curve,
    readable_tokens,
)


SOURCE = ["A", "man", "sleeps", ".", "</s>"]
TARGET = ["<s>", "Ein", "Mann", "schläft", ".", "</s>", "<pad>"]
LAYERS, BATCH, HEADS = 3, 2, 4
WEIGHTS = torch.randn(LAYERS, BATCH, HEADS, len(TARGET), len(SOURCE), generator=torch.manual_seed(0)).softmax(-1)


def panels_of(figure):
    return [axes for axes in figure.axes if axes.get_label() not in ("<colorbar>", "<learning rate>")]


def shown_arrays(figure):
    return [np.asarray(axes.get_images()[0].get_array()) for axes in panels_of(figure)]


def labels_of(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def write(figure, folder):
    path = folder / "picture.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 5_000


def test_attention_of_the_last_layer_is_averaged_over_heads():
    figure = plot_attention(tuple(WEIGHTS), SOURCE, TARGET, title="Cross-attention")
    (panel,) = panels_of(figure)
    np.testing.assert_allclose(shown_arrays(figure)[0], WEIGHTS[-1, 0].mean(0), atol=1e-6)
    assert labels_of(panel.xaxis) == SOURCE
    assert labels_of(panel.yaxis) == TARGET
    assert (panel.get_xlabel(), panel.get_ylabel(), panel.get_title()) == ("source", "target", "mean of 4 heads")
    assert figure.get_suptitle() == "Cross-attention"
    bottom, top = panel.get_ylim()
    assert bottom > top  # the first target token is the top row


def test_attention_of_chosen_heads_layer_and_example():
    figure = plot_attention(tuple(WEIGHTS), SOURCE, TARGET, layer=1, heads=[3, 0, -2], example=1)
    assert [panel.get_title() for panel in panels_of(figure)] == ["head 3", "head 0", "head 2"]
    for array, head in zip(shown_arrays(figure), [3, 0, 2], strict=True):
        np.testing.assert_allclose(array, WEIGHTS[1, 1, head], atol=1e-6)
    colors = {panel.get_images()[0].get_clim() for panel in panels_of(figure)}
    assert len(colors) == 1  # one colour bar holds for all panels
    assert labels_of(panels_of(figure)[1].yaxis) == []


@pytest.mark.parametrize(
    "weights",
    [
        list(WEIGHTS),
        WEIGHTS[-1],
        WEIGHTS[-1, 0],
        WEIGHTS[-1, 0].mean(0),
        WEIGHTS[-1].numpy(),
        WEIGHTS[-1, 0].mean(0).tolist(),
        WEIGHTS[-1].to(torch.bfloat16).requires_grad_(),
    ],
    ids=["layers", "4 dimensions", "3 dimensions", "2 dimensions", "NumPy", "lists", "bfloat16 with gradient"],
)
def test_attention_weights_of_every_form(weights):
    (array,) = shown_arrays(plot_attention(weights, SOURCE, TARGET))
    np.testing.assert_allclose(array, WEIGHTS[-1, 0].mean(0), atol=4e-3)


@pytest.mark.parametrize(
    ("count", "grid"), [(1, (1, 1)), (3, (1, 3)), (5, (2, 3)), (7, (2, 4)), (8, (2, 4))], ids=lambda value: str(value)
)
def test_panels_form_a_grid_with_labelled_edges(count, grid):
    weights = WEIGHTS[0, 0, :1].expand(8, -1, -1)
    panels = panels_of(plot_attention(weights, SOURCE, TARGET, heads=range(count)))
    assert len(panels) == count
    specification = panels[0].get_subplotspec().get_gridspec()
    assert (specification.nrows, specification.ncols) == grid
    columns = grid[1]
    assert all((labels_of(panel.yaxis) == TARGET) == (i % columns == 0) for i, panel in enumerate(panels))
    assert all((labels_of(panel.xaxis) == SOURCE) == (i + columns >= count) for i, panel in enumerate(panels))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": WEIGHTS[0, 0].mT}, "the 7 `target_tokens` .* the 5 `source_tokens`, got 5 rows and 7 columns"),
        ({"source_tokens": SOURCE[:-1]}, "the 4 `source_tokens`, got 7 rows and 5 columns"),
        ({"weights": WEIGHTS}, r"`weights` must be .* got shape \(3, 2, 4, 7, 5\)"),
        ({"weights": WEIGHTS[0, 0, 0, 0]}, r"`weights` must be .* got shape \(5,\)"),
        ({"weights": WEIGHTS[0, 0, :0]}, r"none of them 0; got shape \(0, 7, 5\)"),
        ({"layer": 3}, r"`layer` must be in \[-3, 3\), got 3"),
        ({"example": -3}, r"`example` must be in \[-2, 2\), got -3"),
        ({"heads": [0, 4]}, r"`heads` must be in \[-4, 4\), got 4"),
        ({"heads": []}, "`heads` must have at least one head"),
        ({"weights": ()}, r"returns none. Call `model.set_attn_implementation\(\"eager\"\)`"),
        ({"weights": None}, r"set_attn_implementation\(\"eager\"\)"),
    ],
    ids=[
        "transposed",
        "too few tokens",
        "5 dimensions",
        "1 dimension",
        "empty",
        "layer",
        "example",
        "head",
        "no head",
        "no layers",
        "no weights",
    ],
)
def test_bad_attention_is_named(changes, message):
    arguments = {"weights": tuple(WEIGHTS), "source_tokens": SOURCE, "target_tokens": TARGET, **changes}
    with pytest.raises(ValueError, match=message):
        plot_attention(**arguments)


@pytest.mark.parametrize(
    ("token", "label"),
    [
        (" word", "␣word"),
        ("two words  ", "two words␣␣"),
        ("   ", "␣␣␣"),
        ("a\nb\t\x00", r"a\nb\t\x00"),
        ("\u00a0", r"\xa0"),
        ("נה\u200dא", "נה\u200dא"),
        ("x" * 20, "x" * 20),
        ("x" * 21, "x" * 19 + "…"),
        ("$\\alpha$", "$\\alpha$"),
        ("\ud800", r"\ud800"),
        ("", ""),
    ],
)
def test_tokens_are_readable(token, label, tmp_path):
    figure = plot_attention(np.eye(2), [token, "b"], ["c", token])
    assert labels_of(panels_of(figure)[0].xaxis) == [label, "b"]
    assert labels_of(panels_of(figure)[0].yaxis) == ["c", label]
    write(figure, tmp_path)


@pytest.mark.parametrize("script", ["Привет", "Γειά", "שלום", "مرحبا", "naïve", "𝔸"])
def test_scripts_of_the_default_font_need_no_other_font(script, caplog):
    figure = plot_attention(np.eye(1), [script], [script])
    assert labels_of(panels_of(figure)[0].xaxis) == [script]
    assert caplog.text == ""


def test_characters_of_other_fonts_are_shown(tmp_path):
    sign = "\u24b6"  # in matplotlib's STIXGeneral, not in its default font
    figure = plot_attention(np.eye(1), [f"a{sign}"], ["b"])
    (label,) = panels_of(figure)[0].get_xticklabels()
    assert label.get_text() == f"a{sign}"
    assert label.get_fontfamily()[0] == "DejaVu Sans"
    assert len(label.get_fontfamily()) == 2
    write(figure, tmp_path)


def test_characters_without_a_font_are_shown_as_code_points(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [])
    monkeypatch.setattr(visualization.logger, "warning", messages.append)
    figure = plot_attention(np.eye(1), ["中a文"], ["b"])
    assert labels_of(panels_of(figure)[0].xaxis) == [r"\u4e2da\u6587"]
    assert len(messages) == 1
    assert "2 characters of the tokens (U+4E2D U+6587)" in messages[0]
    assert "install Noto Sans CJK (on Debian: apt install fonts-noto-cjk)." in messages[0]


def test_long_lists_enlarge_the_figure_and_keep_every_label(tmp_path):
    tokens = [f"word{i}" for i in range(120)]
    figure = plot_attention(np.eye(120), tokens, tokens)
    (panel,) = panels_of(figure)
    assert labels_of(panel.xaxis) == tokens
    write(figure, tmp_path)
    height = panel.get_window_extent().height / figure.dpi / 120  # inches from label to label
    assert panel.get_yticklabels()[0].get_fontsize() / 72 < height


def test_very_long_lists_show_some_labels():
    tokens = [f"word{i}" for i in range(700)]
    figure = plot_attention(np.eye(700), tokens, tokens)
    (panel,) = panels_of(figure)
    positions = panel.get_xticks().tolist()
    assert labels_of(panel.xaxis) == [tokens[position] for position in positions]
    assert 200 < len(positions) < 400
    assert max(figure.get_size_inches()) < 45


def test_position_encodings_are_a_heat_map_and_curves(tmp_path):
    table = torch.randn(11, 16)
    figure = plot_position_encodings(table, dimensions=[2, 5, 6], title="Learned")
    left, right = panels_of(figure)
    np.testing.assert_allclose(left.get_images()[0].get_array(), table)
    low, high = left.get_images()[0].get_clim()
    assert -low == high == pytest.approx(table.abs().max().item())  # white is zero
    assert (left.get_xlabel(), left.get_ylabel()) == ("dimension", "position")
    assert (right.get_xlabel(), right.get_ylabel()) == ("position", "value")
    for line, dimension in zip(right.get_lines(), [2, 5, 6], strict=True):
        np.testing.assert_allclose(line.get_ydata(), table[:, dimension])
        assert line.get_label() == f"dimension {dimension}"
    assert figure.get_suptitle() == "Learned"
    write(figure, tmp_path)


@pytest.mark.parametrize(("d_model", "dimensions"), [(1, [0]), (4, [0, 1, 2]), (512, [0, 64, 128, 256])])
def test_position_encodings_choose_their_dimensions(d_model, dimensions):
    figure = plot_position_encodings(np.zeros((3, d_model)))
    labels = [line.get_label() for line in panels_of(figure)[1].get_lines()]
    assert labels == [f"dimension {dimension}" for dimension in dimensions]


@pytest.mark.parametrize(
    ("shape", "dimensions", "message"),
    [
        ((1, 7, 4), None, r"`encodings` must have shape \(positions, d_model\), .* got \(1, 7, 4\)"),
        ((0, 4), None, r"neither of them 0, got \(0, 4\)"),
        ((7, 4), [0, 4], r"`dimensions` must be in \[-4, 4\), got 4"),
    ],
)
def test_position_encodings_of_bad_shapes_are_named(shape, dimensions, message):
    with pytest.raises(ValueError, match=message):
        plot_position_encodings(np.zeros(shape), dimensions=dimensions)


def test_learning_rate_curves_have_a_peak(tmp_path):
    schedules = {"warm-up 2": [1e-4, 3e-4, 2e-4], "constant": torch.full((4,), 1e-3)}
    figure = plot_learning_rate(schedules, title="Schedules")
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("update", "learning rate")
    first, second = axes.get_lines()
    assert (first.get_xdata().tolist(), first.get_ydata().tolist()) == ([1, 2, 3], [1e-4, 3e-4, 2e-4])
    assert second.get_xdata().tolist() == [1, 2, 3, 4]
    assert first.get_color() != second.get_color()
    assert axes.get_ylim()[0] == 0
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["warm-up 2 (peak 3.00e-04 at update 2)", "constant (peak 1.00e-03 at update 1)"]
    write(figure, tmp_path)


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ({}, "`schedules` must have at least one list of learning rates, got none"),
        ({"a": []}, r"`schedules` must be .* got shape \(0,\) for 'a'"),
        ({"a": [1.0], "b": [[1.0]]}, r"got shape \(1, 1\) for 'b'"),
    ],
)
def test_bad_learning_rates_are_named(schedules, message):
    with pytest.raises(ValueError, match=message):
        plot_learning_rate(schedules)


LOG = [
    {"loss": 5.0, "grad_norm": 1.0, "learning_rate": 1e-3, "epoch": 0.5, "step": 10},
    {"loss": 4.0, "grad_norm": 1.0, "learning_rate": 1e-3, "epoch": 1.0, "step": 20},
    {
        "eval_loss": 4.5,
        "eval_bleu": 11.0,
        "eval_de_loss": 6.5,
        "eval_runtime": 1.5,
        "eval_samples_per_second": 2.0,
        "eval_steps_per_second": 3.0,
        "eval_model_preparation_time": 0.1,
        "epoch": 1.0,
        "step": 20,
    },
    {"eval_bleu": 12.0, "step": 30},
    {"train_runtime": 9.0, "train_loss": 4.2, "total_flos": 1.0, "step": 30},
]


def curves_of(axes):
    return {line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.get_lines()}


def test_training_curve_has_losses(tmp_path):
    figure = plot_training_curve(LOG, title="Run")
    losses, bleu = panels_of(figure)
    assert (losses.get_xlabel(), losses.get_ylabel()) == ("update", "loss")
    assert curves_of(losses) == {
        "training": [(10, 5.0), (20, 4.0)],
        "evaluation": [(20, 4.5)],
        "evaluation (de)": [(20, 6.5)],
    }
    assert [text.get_text() for text in losses.get_legend().get_texts()] == list(curves_of(losses))
    assert bleu.get_ylabel() == "BLEU"
    assert curves_of(bleu) == {"evaluation": [(20, 11.0), (30, 12.0)]}
    assert bleu.get_lines()[0].get_marker() == "o"
    assert figure.get_suptitle() == "Run"
    write(figure, tmp_path)


@pytest.mark.parametrize(("scores", "grid"), [(0, (1, 1)), (2, (1, 3)), (3, (2, 2)), (4, (2, 3))])
def test_training_curve_has_a_panel_for_each_metric(scores, grid):
    log = [{"loss": 1.0, "step": 1}, {f"eval_score{i}": 1.0 for i in range(scores)} | {"step": 1}]
    axes = plot_training_curve(log).axes
    assert [panel.get_ylabel() for panel in axes] == ["loss", *(f"score{i}" for i in range(scores))]
    specification = axes[0].get_subplotspec().get_gridspec()
    assert (specification.nrows, specification.ncols) == grid


def test_training_curve_shows_phases_and_the_learning_rate():
    lengths = {10: 32, 20: 32, 30: 128}
    log = [
        {"loss": 9.0, "learning_rate": 1e-4 * step, "sequence_length": lengths[step], "step": step} for step in lengths
    ]
    figure = plot_training_curve(log)
    (losses,) = panels_of(figure)
    assert [text.get_text() for text in losses.texts] == ["up to 32 tokens", "up to 128 tokens"]
    assert [line.get_xdata() for line in losses.get_lines()[1:]] == [[20, 20]]  # the last update of the first phase
    (rate,) = next(axes for axes in figure.axes if axes not in panels_of(figure)).get_lines()
    np.testing.assert_allclose(rate.get_ydata(), [1e-3, 2e-3, 3e-3])


def test_training_curve_draws_lengths_of_sequences_together():
    log = [
        {f"eval_{length}_tokens_{name}": value + step, "step": step}
        for step in (1, 2)
        for length, name, value in (
            (8, "mlm_loss", 3),
            (16, "mlm_loss", 4),
            (8, "nsp_accuracy", 0),
            (16, "nsp_accuracy", 5),
        )
    ]
    losses, accuracy = plot_training_curve(log).axes
    assert curves_of(losses) == {
        "evaluation (masked tokens), 8 tokens": [(1, 4), (2, 5)],
        "evaluation (masked tokens), 16 tokens": [(1, 5), (2, 6)],
    }
    assert curves_of(accuracy) == {"evaluation, 8 tokens": [(1, 1), (2, 2)], "evaluation, 16 tokens": [(1, 6), (2, 7)]}
    assert len(accuracy.get_legend().get_texts()) == 2


def test_losses_by_position_have_a_curve_for_each_model(tmp_path):
    curves = {
        "old": {"width": 4, "loss": [3.0, None, 2.0], "tokens": [1, 0, 3]},
        "new": {"width": 1, "loss": [1.0, 2.0], "tokens": [2, 2]},
    }
    figure = plot_position_losses(curves, title="Losses")
    (axes,) = figure.axes
    assert curves_of(axes) == {"old (mean 2.25)": [(1.5, 3.0), (9.5, 2.0)], "new (mean 1.50)": [(0, 1.0), (1, 2.0)]}
    assert figure.get_suptitle() == "Losses"
    write(figure, tmp_path)
    for bad, message in (({}, "got none"), ({"a": {"width": 1, "loss": [None], "tokens": [0]}}, "none for 'a'")):
        with pytest.raises(ValueError, match=f"`curves` must have .*{message}"):
            plot_position_losses(bad)


@pytest.mark.parametrize("final_step", [20, 25], ids=["evaluated before", "not evaluated before"])
def test_training_curve_marks_the_final_model_apart(final_step):
    log = [{"eval_mlm_accuracy": 0.3, "step": 10}, {"eval_mlm_accuracy": 0.4, "step": 20}]
    log += [{"train_runtime": 1.0, "step": final_step}, {"eval_mlm_accuracy": 0.5, "step": final_step}]
    (axes,) = plot_training_curve(log).axes
    assert axes.get_ylabel() == "masked tokens right"
    shown = [float(label.get_text().removesuffix("%")) for label in axes.get_yticklabels()]
    assert shown == pytest.approx(100 * axes.get_yticks())  # ticks of 2.5 % have a decimal
    assert curves_of(axes) == {
        "evaluation": [(10, 0.3), (20, 0.4)],
        "evaluation, final model": [(final_step, 0.5)],
    }
    assert axes.get_lines()[1].get_marker() == "*"


def test_training_curve_draws_a_repeated_evaluation_once():
    log = [{"eval_loss": 3.0, "step": 1}, {"eval_loss": 2.0, "step": 2}]
    (axes,) = plot_training_curve([*log, {"train_runtime": 1.0, "step": 2}, {"eval_loss": 2.0, "step": 2}]).axes
    assert curves_of(axes) == {"evaluation": [(1, 3.0), (2, 2.0)]}


def test_readable_tokens_keep_their_spaces():
    tokenizer = train_tokenizer(["a dog, a cat 中"] * 2, 270, show_progress=False)
    ids = tokenizer(" a dog 中")["input_ids"]
    tokens = readable_tokens(tokenizer, ids)
    assert tokens[0] == " "  # where decode() gives nothing
    assert "".join(tokens[:-1]).startswith("  a dog ")
    assert tokens[-1] == "</s>"
    pieces = train_wordpiece_tokenizer(["a dog, a cat"] * 2, 30, show_progress=False)
    assert readable_tokens(pieces, pieces("a dog")["input_ids"])[:2] == ["[CLS]", "a"]


def test_maltese_letters_of_other_vocabularies_are_no_bytes():
    pieces = train_wordpiece_tokenizer(["Ġgant Għawdex ċar"] * 2, 60, lowercase=False, show_progress=False)
    ids = pieces("Ġgant Għawdex", add_special_tokens=False)["input_ids"]
    assert readable_tokens(pieces, ids) == ["Ġgant", "Għawdex"]


def test_tokenizers_in_python_are_read_by_their_bytes():
    class InPython:
        def convert_ids_to_tokens(self, ids):
            return [["Ġa", "Ã©"][each] for each in ids]

    tokenizer = InPython()
    assert readable_tokens(tokenizer, [0, 1]) == ["Ġa", "Ã©"]
    tokenizer.byte_decoder = {}  # as GPT-2's has
    assert readable_tokens(tokenizer, [0, 1]) == [" a", "é"]


def test_training_curve_leaves_out_a_single_point():
    log = [{"loss": 3.0, "step": 1}, {"loss": 2.0, "step": 2}, {"eval_loss": 2.5, "eval_bleu": 7.0, "step": 2}]
    (losses,) = plot_training_curve(log).axes
    assert curves_of(losses) == {"training": [(1, 3.0), (2, 2.0)], "evaluation": [(2, 2.5)]}


def test_training_curve_of_evaluations_alone():
    assert [panel.get_ylabel() for panel in plot_training_curve([{"eval_bleu": 1.0, "step": 1}]).axes] == ["BLEU"]


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (3, "a list of entries, got 3"),
        (["a"], "mappings as entries, but entry 1 is 'a'"),
        ([*LOG[:1], {"loss": 1.0}], "a `step` in each entry, but entry 2 has none"),
        ([{"loss": "a", "step": 1}], "numbers as `loss`, but entry 1 has 'a'"),
        ([{"eval_bleu": 1.0, "step": 10**400}], "numbers as `step`, but entry 1 has 10"),
    ],
)
def test_bad_log_is_named(log, message):
    with pytest.raises(ValueError, match=f"`log_history` must (be|have) {message}"):
        plot_training_curve(log)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "`tokens` must be a list of numbers, got None"),
        ({"loss": ["a", None]}, "`loss` must be a list of numbers, got "),
        ({"width": 0}, "`width` must be a number of positions, at least 1, got 0"),
        ({"loss": [1.0]}, "`loss` must have a number wherever `tokens` has more than 0"),
    ],
)
def test_bad_losses_by_position_are_named(changes, message):
    curve = {"width": 4, "loss": [3.0, None], "tokens": [1, 0], **changes}
    with pytest.raises(ValueError, match=f"`curves`, 'old': {message}"):
        plot_position_losses({"old": curve})
    del curve["tokens"]
    with pytest.raises(ValueError, match="`curves`, 'old': losses by position must have .*, but have no `tokens`"):
        plot_position_losses({"old": curve})


@pytest.mark.parametrize("log", [[], [{"train_loss": 1.0, "step": 3}]], ids=["empty", "summary alone"])
def test_empty_log_is_named(log):
    with pytest.raises(ValueError, match=f"`log_history` must have .* got none in {len(log)} entries"):
        plot_training_curve(log)


@pytest.mark.parametrize(
    "plot",
    [
        lambda: plot_attention(np.eye(1), ["a"], ["b"]),
        lambda: plot_position_encodings(np.eye(3)),
        lambda: plot_learning_rate({"a": [1.0]}),
        lambda: plot_training_curve(LOG),
    ],
    ids=["attention", "positions", "learning rate", "training curve"],
)
def test_missing_matplotlib_is_named(plot, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "hf_vanilla\[viz\]"'):
        plot()


def test_plots_do_not_use_pyplot():
    plot_training_curve(LOG)
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_attention_of_the_class_token_is_drawn_below_each_image(tmp_path):
    weights = [torch.rand(2, 4, 7, 7) for _ in range(3)]
    images = [np.random.default_rng(0).random((4, 6)), np.random.default_rng(1).random((4, 6, 3))]
    figure = plot_image_attention(weights, images, (2, 3), layer=1, titles=["one", "two"], title="Attention")
    drawn = shown_arrays(figure)
    for number in range(2):
        np.testing.assert_allclose(drawn[number], images[number])
        expected = weights[1][number, :, 0, 1:].mean(0).reshape(2, 3)
        np.testing.assert_allclose(drawn[2 + number], expected, rtol=1e-6)
    assert [axes.get_title() for axes in panels_of(figure)] == ["one", "two", "", ""]
    write(figure, tmp_path)
    for first in (weights[0][:1], weights[0][0], [each[0] for each in weights]):  # of one image
        (_, below) = shown_arrays(plot_image_attention(first, images[:1], (3, 2), layer=0, head=3))
        np.testing.assert_allclose(below, weights[0][0, 3, 0, 1:].reshape(3, 2), rtol=1e-6)


def test_pictures_of_every_mode_are_drawn_as_they_look():
    picture = Image.new("RGB", (3, 2), (204, 0, 0))  # in the palette
    picture.putpixel((0, 0), (0, 0, 204))
    turned = picture.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6  # by a quarter to the right
    kinds = {each: picture.convert(each) for each in ("P", "CMYK", "YCbCr")}
    for name, given in {**kinds, "turned": turned}.items():
        (drawn, _) = shown_arrays(plot_image_attention(torch.rand(1, 1, 7, 7), [given], (2, 3)))
        # YCbCr rounds
        np.testing.assert_allclose(drawn.astype(int), np.asarray(picture).astype(int), atol=2, err_msg=name)
    deep = Image.fromarray(np.array([[0, 4000]], dtype=np.uint16))
    (drawn, _) = shown_arrays(plot_image_attention(torch.rand(1, 1, 7, 7), [deep], (2, 3)))
    assert drawn.tolist() == [[0, 4000]]
    (drawn, _) = shown_arrays(plot_image_attention(torch.rand(1, 1, 7, 7), [Image.new("LA", (3, 2), (9, 0))], (2, 3)))
    assert drawn[0, 0].tolist() == [9, 9, 9, 0]  # transparent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": []}, r"`images` must be one or more, with as many `titles`.*got 0 and none"),
        ({"titles": ["one", "two"]}, r"`images` must be one or more.*got 1 and 2"),
        ({"grid": (2, 2)}, r"`weights` must be of a class token and 2 x 2 patches \(`grid`\), got 7 rows"),
        ({"head": 4}, r"`heads` must be in \[-4, 4\), got 4"),
        ({"weights": torch.rand(2, 4, 7, 7)}, r"a row for each of the 1 `images`, got \(2, 4, 7, 7\); cut both"),
        ({"weights": torch.rand(2, 7, 7), "images": [np.zeros((4, 6))] * 2}, r"`weights` must.* got \(2, 7, 7\)"),
        ({"weights": [torch.rand(4, 7, 7)], "layer": 1}, r"`layer` must be in \[-1, 1\), got 1"),
    ],
    ids=["no images", "titles", "grid", "head", "more rows", "no batch", "layer"],
)
def test_bad_image_attention_is_refused(options, message):
    given = {"weights": torch.rand(1, 4, 7, 7), "images": [np.zeros((4, 6))], "grid": (2, 3), **options}
    with pytest.raises(ValueError, match=message):
        plot_image_attention(**given)
