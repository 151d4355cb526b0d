"""One of two processes that share models: loads them with each plan, and saves what it computed.

Run by test_sharing.py with `torchrun`, as `run_sharing.py <folder>`; also imported by it to compute alone.
"""

import sys
from pathlib import Path
from typing import Any

import tiny_berts
import tiny_gpts
import tiny_vits
import torch
import torch.distributed
from tiny_models import BATCH, tiny_model
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from hf_vanilla.command_line.options import leave_process_group
from hf_vanilla.generation import beam_search, fast_model
from hf_vanilla.models.packing import PackingPlanner


# For each family a model, in which every head is cut somewhere, and a batch.
MODELS: dict[str, Any] = {
    "transformer": (lambda: tiny_model(dropout=0.0, norm_position="pre"), BATCH),
    "bert": (lambda: tiny_berts.tiny_bert(**tiny_berts.NO_DROPOUT), tiny_berts.TASKS["pre-training"][3]),
    "gpt": (lambda: tiny_gpts.tiny_gpt(**tiny_gpts.NO_DROPOUT), tiny_gpts.TASKS["text"][2]),
    "vit": (tiny_vits.tiny_vit, {"pixel_values": tiny_vits.IMAGES, **tiny_vits.TASKS["classes"][3]}),
}
PLANS = {"tensor parallel": {"tp_plan": "auto"}, "FSDP2": {"fsdp_size": 2}}


def whole(tensor: Any) -> torch.Tensor:
    """Return a tensor with the parts of all processes."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def compute(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Compute outputs without gradients, and the loss and its gradients in training."""
    with torch.no_grad():
        outputs = [each for each in model.eval()(**inputs).to_tuple() if isinstance(each, torch.Tensor)]
    loss = model.train()(**inputs).loss
    loss.backward()
    gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return {"outputs": outputs, "loss": loss.detach(), "gradients": gradients}


def search(model: Any, inputs: dict[str, torch.Tensor], rank: int) -> torch.Tensor:
    """Search beams, in each process to another length."""
    prompts = {name: each for name, each in inputs.items() if name != "labels"}
    options = {"num_beams": 2, "max_new_tokens": 3 + 2 * rank, "eos_token_id": None}
    return fast_model(model, 64).generate(**prompts, custom_generate=beam_search, **options)


def share(folder: Path, kind: str, plan: str) -> dict[str, Any]:
    """Load a model with a plan, and compute, save and generate with it."""
    make, inputs = MODELS[kind]
    config = DistributedConfig(**PLANS[plan])
    model = type(make()).from_pretrained(folder / kind, distributed_config=config)
    seen = compute(model, inputs)
    own = [(each, each.to_local() if isinstance(each, DTensor) else each) for each in model.parameters()]
    seen["own_share"] = sum(part.numel() for _, part in own) / sum(each.numel() for each, _ in own)
    if kind == "bert":
        states = torch.ones(2, 7, 12)
        seen["is_packed"] = PackingPlanner(model.bert, states, {}).plan_tokens(states, tiny_berts.MASK) is not None
    if plan == "FSDP2" and kind == "gpt":  # `generate()` calls the encoder of others without its weights
        seen["searched"] = search(model.eval(), inputs, torch.distributed.get_rank())
    if plan == "tensor parallel" and kind in ("transformer", "gpt"):
        prompts = {name: each for name, each in inputs.items() if name != "labels"}
        seen["generated"] = model.eval().generate(**prompts, max_new_tokens=5, do_sample=False)
    model.save_pretrained(folder / plan / kind, is_main_process=torch.distributed.get_rank() == 0)
    return seen


def main() -> None:
    """Share all models with all plans, and save the results of this process to a file."""
    folder = Path(sys.argv[1])
    seen = {plan: {kind: share(folder, kind, plan) for kind in MODELS} for plan in PLANS}
    torch.save(seen, folder / f"rank-{torch.distributed.get_rank()}.pt")
    leave_process_group()


if __name__ == "__main__":
    main()
