"""What a training records about itself for the model card."""

from tiny_translation import tiny_collator, tiny_model, tiny_pairs, tiny_tokenizer

from hf_vanilla.hub.card import card_of_folder
from hf_vanilla.metrics import TranslationMetrics
from hf_vanilla.training import VanillaTrainer, VanillaTrainingArguments, save_final_model


def test_the_card_of_a_run_has_its_settings(tmp_path):
    args = VanillaTrainingArguments(
        str(tmp_path), max_steps=2, max_tokens_per_batch=40, gradient_accumulation_steps=3, learning_rate=2.5e-3,
        warmup_steps=1, lr_scheduler_type="linear", adam_beta2=0.98, seed=17, use_cpu=True, disable_tqdm=True,
        report_to="none", save_strategy="no", predict_with_generate=True, generation_max_length=4,
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
        "betas 0.9 and 0.98",
        "precision: float32",
        "seed: 17",
        "training examples: 45",
        "validation examples: 9",
        "tok:none",
        "updates: 2",
        "torch 2.",
    ):
        assert line in text, line
