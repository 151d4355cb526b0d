"""The smallest proof that the whole of it learns: the copy task of the Annotated Transformer, to the last symbol."""

import pytest
import torch
from transformers import Seq2SeqTrainer, default_data_collator, set_seed

from hf_vanilla import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla.data import copy_task
from hf_vanilla.training import paper_optimizers, paper_training_arguments


@pytest.mark.slow
@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_copy_task_is_learnt_to_the_last_symbol(tmp_path, norm_position):
    set_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=11, d_model=64, d_ff=128, num_heads=4, encoder_layers=2, decoder_layers=2,
        norm_position=norm_position, eos_token_id=None, decoder_start_token_id=1, dropout=0.0, label_smoothing=0.0,
    )  # fmt: skip
    model = VanillaTransformerForConditionalGeneration(config)
    training_args = paper_training_arguments(
        config, str(tmp_path), warmup_steps=200, factor=0.5, max_steps=1000, per_device_train_batch_size=64,
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=copy_task(20_000, seed=1),
        data_collator=default_data_collator,
        optimizers=paper_optimizers(model, training_args),
    )
    trainer.train()
    source = torch.tensor(copy_task(500, seed=2)["input_ids"])
    copied = model.eval().generate(source, max_new_tokens=source.shape[1] - 1)
    assert (copied == source).all(dim=1).float().mean() == 1.0
