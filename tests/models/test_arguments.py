"""Every entrance of a model takes tensors, counts of labels and both kinds of output, and refuses anything else."""

import pytest
import torch
from tiny_berts import IDS, TASKS, tiny_bert
from tiny_gpts import tiny_gpt
from tiny_models import BATCH, SOURCE, TARGET, tiny_model
from tiny_vits import IMAGES, tiny_vit

from hf_vanilla.generation import forced_attention, score


NO_TENSORS = [[[3, 4, 5]], "ids", 5, {"ids": IDS}]
EXTRA = ("attention_mask", "token_type_ids", "position_ids", "inputs_embeds")


def model_and_inputs(task, **config):
    """Return the model of a task, or the translator, with inputs that fit."""
    if task == "translation":
        return tiny_model(dropout=0.0, **config), dict(BATCH)
    return tiny_bert(task, **config), dict(TASKS[task][3])


@pytest.mark.parametrize("task", [*TASKS, "translation"])
def test_config_may_ask_for_tuples(task):
    model, inputs = model_and_inputs(task)
    tuples, _ = model_and_inputs(task, return_dict=False)
    with torch.no_grad():
        expected, actual = model(**inputs), tuples(**inputs)
        asked = model(**inputs, return_dict=False)
    assert type(actual) is tuple
    assert len(actual) == len(asked) == len(expected.to_tuple())
    torch.testing.assert_close(actual[:2], expected.to_tuple()[:2], rtol=0, atol=0)
    torch.testing.assert_close(tuples(**inputs, return_dict=True)[0], expected[0], rtol=0, atol=0)


def test_translator_of_tuples_generates_scores_and_aligns():
    model, tuples = tiny_model(), tiny_model(return_dict=False)
    for call in (
        lambda each: each.generate(SOURCE, num_beams=3, max_new_tokens=4),
        lambda each: score(each, **BATCH).scores,
        lambda each: forced_attention(each, **BATCH),
    ):
        torch.testing.assert_close(call(tuples), call(model), rtol=0, atol=0)


@pytest.mark.parametrize("given", NO_TENSORS, ids=["list", "string", "number", "dictionary"])
@pytest.mark.parametrize("task", [*TASKS, "translation"])
def test_what_is_no_tensor_is_refused_by_name(task, given):
    model, inputs = model_and_inputs(task)
    names = [*inputs, *(name for name in EXTRA if task != "translation" and name not in inputs)]
    names += ["decoder_input_ids", "decoder_attention_mask"] if task == "translation" else []
    for name in names:
        others = {key: value for key, value in inputs.items() if (key, name) != ("input_ids", "inputs_embeds")}
        for training in (True, False):
            with pytest.raises(TypeError, match=rf"`{name}` must be a tensor.*, got {type(given).__name__}"):
                model.train(training)(**{**others, name: given})


@pytest.mark.parametrize("given", NO_TENSORS, ids=["list", "string", "number", "dictionary"])
def test_translator_refuses_what_is_no_tensor_everywhere(given):
    model = tiny_model()
    for name in ("inputs_embeds", "decoder_inputs_embeds"):
        tokens = {"decoder_input_ids": TARGET} if name == "inputs_embeds" else {"input_ids": SOURCE}
        with pytest.raises(TypeError, match=f"`{name}` must be a tensor"):
            model(**tokens, **{name: given})
    states = torch.zeros(2, 5, 16)
    for name, arguments in (
        ("encoder_hidden_states", {"encoder_hidden_states": given}),
        ("read_positions", {"encoder_hidden_states": states, "read_positions": given}),
    ):
        with pytest.raises(TypeError, match=f"`{name}` must be a tensor"):
            model.get_decoder()(TARGET, **arguments)
    if not isinstance(given, list):
        with pytest.raises(TypeError, match="`encoder_outputs` must be what the encoder returned"):
            model(encoder_outputs=given, decoder_input_ids=TARGET)
    with pytest.raises(TypeError, match="`input_ids` must be a tensor"):
        model.generate(input_ids=given)
    with pytest.raises(TypeError, match="`labels` must be a tensor"):
        score(model, SOURCE, None, given)


@pytest.mark.parametrize(
    ("states", "error", "message"),
    [
        (torch.zeros(2, 5, 17), ValueError, r"must have shape \(batch, length, d_model = 16\), got \(2, 5, 17\)"),
        (torch.zeros(2, 5), ValueError, r"must have shape \(batch, length, d_model = 16\), got \(2, 5\)"),
        (torch.zeros(2, 5, 16, dtype=torch.long), TypeError, "must be floating-point numbers, got torch.int64"),
    ],
    ids=["width", "dimensions", "dtype"],
)
def test_embeddings_and_states_of_another_kind_are_refused(states, error, message):
    model = tiny_model()
    for name, arguments in (
        ("inputs_embeds", {"inputs_embeds": states, "decoder_input_ids": TARGET}),
        ("decoder_inputs_embeds", {"input_ids": SOURCE, "decoder_inputs_embeds": states}),
        ("encoder_hidden_states", {"encoder_outputs": (states,), "decoder_input_ids": TARGET}),
    ):
        with pytest.raises(error, match=f"`{name}` {message}"):
            model(**arguments)
    bert = tiny_bert("model", hidden_size=16, num_attention_heads=4)
    with pytest.raises(error, match=f"`inputs_embeds` {message}"):
        bert(inputs_embeds=states)


@pytest.mark.parametrize(
    "items", [-3, float("nan"), torch.tensor(-3), torch.tensor(float("inf")), "3", torch.tensor(3j)], ids=str
)
@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("model", "answers")] + ["translation"])
def test_number_of_labels_must_be_one(task, items):
    model, inputs = model_and_inputs(task)
    error = TypeError if str(items) in ("3", "tensor(0.+3.j)") else ValueError
    with pytest.raises(error, match="`num_items_in_batch` must be a num"):
        model(**inputs, num_items_in_batch=items)
    expected = model(**inputs, num_items_in_batch=torch.tensor(3)).loss
    for number in (3, torch.tensor([3])):
        torch.testing.assert_close(model(**inputs, num_items_in_batch=number).loss, expected, rtol=0, atol=0)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "choices"])
def test_zero_length_is_refused_where_the_first_position_is_read(task):
    model, _ = model_and_inputs(task)
    if task in ("masked-lm", "tokens", "answers"):
        assert model(IDS[:, :0])[0].shape[:2] == (2, 0)
        return
    with pytest.raises(ValueError, match="`input_ids` must have at least one position, the first"):
        model(IDS[:, :0])


def test_choices_of_different_numbers_are_refused():
    model, inputs = model_and_inputs("choices")
    for name, shape in (("attention_mask", (2, 2, 7)), ("token_type_ids", (2,)), ("position_ids", (3, 7))):
        with pytest.raises(ValueError, match=rf"`{name}` must begin with batch and choices, \(2, 3\), got"):
            model(**{**inputs, name: torch.ones(shape, dtype=torch.long)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("make", [tiny_bert, tiny_gpt, tiny_vit])
def test_classes_that_are_no_integers_are_refused(make, dtype):
    model = make("classes", problem_type="single_label_classification")
    inputs = IMAGES if make is tiny_vit else IDS
    with pytest.raises(TypeError, match="`labels` must be integers .*, got torch.(float32|bool)"):
        model(inputs, labels=torch.tensor([1, 0], dtype=dtype))


@pytest.mark.parametrize("make", [tiny_bert, tiny_gpt], ids=["BERT", "GPT"])
@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        (
            {"attention_mask": torch.ones(2, 1, 5, 5).long()},
            TypeError,
            "four dimensions must be of booleans",
        ),
        ({"attention_mask": torch.ones(3, 1, 5, 5).bool()}, ValueError, "with a batch of 2; got .3, 1, 5, 5."),
        ({"keep_padding": "no"}, TypeError, "`keep_padding` must be a bool, got str"),
    ],
    ids=["integers", "rows", "keep_padding"],
)
def test_masks_and_padding_of_another_kind_are_refused(make, argument, error, message):
    model = make("model") if make is tiny_bert else make()
    with pytest.raises(error, match=message):
        model(torch.full((2, 5), 7), **argument)


@pytest.mark.parametrize(
    ("labels", "problem_type"),
    [
        (torch.tensor([0, 2]), "single_label_classification"),
        (torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]]), "multi_label_classification"),
    ],
)
def test_a_pipeline_learns_what_the_labels_were(labels, problem_type, tmp_path):
    model = tiny_bert("classes", num_labels=3, problem_type=None)
    model(torch.tensor([[5, 6], [7, 8]]), labels=labels)
    model.save_pretrained(tmp_path)
    assert type(model.config).from_pretrained(tmp_path).problem_type == problem_type


def test_refused_labels_leave_the_problem_type_open():
    model = tiny_bert("classes", num_labels=3, problem_type=None)
    with pytest.raises(ValueError, match="`labels` must have shape"):
        model(IDS[:2], labels=torch.ones(2, 4))
    model(IDS[:2], labels=torch.tensor([0, 2]))
    assert model.config.problem_type == "single_label_classification"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize(("make", "inputs"), [(tiny_bert, IDS), (tiny_gpt, IDS), (tiny_vit, IMAGES)])
def test_labels_need_a_classifier(make, inputs):
    with pytest.raises(ValueError, match="`labels` must not be given: the model has no classifier"):
        make("classes", num_labels=0)(inputs, labels=torch.tensor([0, 1]))


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_transposed_labels_are_refused(problem_type):
    model = tiny_bert("classes", num_labels=3, problem_type=problem_type)
    with pytest.raises(ValueError, match=r"`labels` must have shape \(2, 3\) for .*, got \(3, 2\)"):
        model(IDS[:2], labels=torch.ones(3, 2))
