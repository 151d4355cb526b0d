import sys

import pytest
import torch
from tiny_translation import tiny_collator, tiny_model, tiny_pairs
from transformers import Trainer, TrainingArguments

from hf_vanilla.training import ReleaseMemoryCallback, VanillaTrainer, VanillaTrainingArguments, memory


def resident_mebibytes():
    with open("/proc/self/status") as file:
        (line,) = [each for each in file if each.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "stock trainer"])
def test_training_gives_freed_memory_back(tmp_path, is_ours, monkeypatch):
    monkeypatch.setattr(memory, "SECONDS", 0.0)
    collator = tiny_collator(tiny_model())
    options = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "max_steps": 2}
    if is_ours:
        arguments = VanillaTrainingArguments(str(tmp_path), max_tokens_per_batch=40, **options)
        trainer = VanillaTrainer(tiny_model(), arguments, collator, train_dataset=tiny_pairs())
    else:
        arguments = TrainingArguments(str(tmp_path), **options)
        callbacks = [ReleaseMemoryCallback()]
        trainer = Trainer(tiny_model(), arguments, collator, train_dataset=tiny_pairs(), callbacks=callbacks)
    memory.release_memory()  # of tests before
    before = resident_mebibytes()
    large = [torch.ones(24 * 2**10) for _ in range(4000)]  # 96 KiB each, too small to leave by itself
    last = torch.ones(24 * 2**10)  # memory below a piece in use stays
    del large
    assert resident_mebibytes() > before + 300
    trainer.train()
    assert resident_mebibytes() < before + 200
    assert last.sum() == 24 * 2**10
