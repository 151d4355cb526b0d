"""What a training records about itself for the model card."""

import logging

from tiny_translation import tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer

from hf_vanilla import (
    VanillaBertConfig,
    VanillaBertForMaskedLM,
    VanillaBertForPreTraining,
    VanillaTransformerConfig,
)
from hf_vanilla.hub.card import card_of_folder
from hf_vanilla.hub.client import add_advice
from hf_vanilla.metrics import TranslationMetrics
from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments, save_final_model


def test_the_card_of_a_run_has_its_settings(tmp_path):
    args = VanillaTrainingArguments(
        str(tmp_path), max_steps=2, max_tokens_per_batch=40, gradient_accumulation_steps=3, learning_rate=2.5e-3,
        warmup_steps=1, lr_scheduler_type="linear", adam_beta2=0.98, seed=17, use_cpu=True, disable_tqdm=True,
        report_to="none", save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
        predict_with_generate=True, generation_max_length=4, muon=True,
    )  # fmt: skip
    model = tiny_model()
    trainer = VanillaTrainer(
        model, args, tiny_collator(model), train_dataset=tiny_pairs(45), eval_dataset=tiny_pairs(9),
        processing_class=tiny_tokenizer(), compute_metrics=TranslationMetrics(tiny_tokenizer(), tokenize="none"),
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    save_final_model(trainer)
    text = str(card_of_folder(tmp_path, "someone/model"))
    for line in (
        "learning rate: 0.0025 at its peak",
        "schedule: linear, warm-up over 1 updates",
        "batch: 40 tokens, 3 accumulated",
        "optimizer: Muon for the matrices of the layers, for all else adamw_torch",
        "betas 0.9 and 0.98",
        "precision: float32",
        "seed: 17",
        "weights: those of the checkpoint with the best loss",
        "training examples: 45",
        "validation examples: 9",
        "tok:none",
        "updates: 2",
        "torch 2.",
    ):
        assert line in text, line


def test_checkpoints_have_no_trace_of_the_training(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    args = VanillaTrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, use_cpu=True, disable_tqdm=True, report_to="none"
    )

    def trainer():
        model = tiny_model()
        return VanillaTrainer(
            model, args, tiny_collator(model), train_dataset=tiny_pairs(), processing_class=tiny_tokenizer()
        )

    trainer().train()
    assert VanillaTransformerConfig.from_pretrained(tmp_path / "checkpoint-1").use_cache
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == 2
    assert not resumed.model.config.use_cache  # in the training, as `Trainer` has it
    assert "missing keys" not in caplog.text


def test_a_masked_language_model_loads_from_pretraining_without_a_report(tmp_path):
    sizes = dict(vocab_size=13, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
    VanillaBertForPreTraining(VanillaBertConfig(**sizes)).save_pretrained(tmp_path)
    _, report = VanillaBertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())


def test_an_error_of_xet_says_how_to_go_without():
    error = ConnectionError("no route")
    add_advice(error)
    assert "HF_HUB_DISABLE_XET=1" in error.__notes__[0]
