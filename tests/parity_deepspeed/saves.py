"""Runs that DeepSpeed begins and saves, and that either engine resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.pool.reference import batch, share, tiny_llama

BEFORE, AFTER = 3, 5  # steps
CASES: list[dict[str, Any]] = [
    {"stage": 0, "kind": "tied"},
    {"stage": 0, "kind": "plain", "dtype": "bf16"},
    {"stage": 1, "kind": "groups"},
    {"stage": 1, "kind": "tied", "dtype": "bf16"},
    {"stage": 2, "kind": "frozen"},
    {"stage": 2, "kind": "groups", "dtype": "bf16"},
    {"stage": 2, "kind": "plain", "zero": {"round_robin_gradients": True}},
    {"stage": 2, "kind": "tied", "zero": {"offload_optimizer": {"device": "cpu"}}},
    {"stage": 3, "kind": "tied"},
    {"stage": 3, "kind": "groups"},
    {"stage": 3, "kind": "frozen", "dtype": "bf16"},
    {"stage": 3, "kind": "plain", "zero": {"sub_group_size": 6000}},
    {"stage": 3, "kind": "tied", "zero": {"offload_optimizer": {"device": "cpu"}}},
    {"stage": 2, "kind": "lora"},
    {"stage": 3, "kind": "lora", "dtype": "bf16"},
]
FROZEN = "model.embed_tokens.weight"


def model_of(case: dict[str, Any], seed: int = 0) -> nn.Module:
    model = tiny_llama(tied=case["kind"] == "tied", layers=2, vocab=61, seed=seed)
    if case["kind"] == "frozen":
        model.get_parameter(FROZEN).requires_grad_(False)
    if case["kind"] == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        return get_peft_model(
            model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
    return model


def config_of(case: dict[str, Any], world: int, stage: int | None = None) -> dict[str, Any]:
    zero = {"stage": case["stage"] if stage is None else stage, "stage3_param_persistence_threshold": 0}
    if stage is None:
        zero |= case.get("zero", {})
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 // world,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}},
    }
    if case.get("dtype"):
        config[case["dtype"]] = {"enabled": True}
    if case["kind"] != "groups":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    return config


def arguments_of(case: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the optimizer arguments of initialize()."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if case["kind"] != "groups":
        return {"model_parameters": trained}
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    return {"optimizer": torch.optim.AdamW(groups, lr=1e-2)}


def steps(engine: Any, first: int, count: int, tp: int = 1) -> list[float]:
    """Return the losses of steps, averaged over all ranks; `tp` ranks share the same data."""
    rank, world, losses = dist.get_rank(), dist.get_world_size(), []
    for step in range(first, first + count):
        (ids,) = share(batch(step, sequences=4) % 61, rank // tp, world // tp)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def begin(initialize: Any, weights_of: Any, state_of: Any, root: Path) -> list[list[float]]:
    """Run, save and continue every case; return the losses after the save.

    Args:
        weights_of: reads weights in fp32 from a directory.
        state_of: gathers an optimizer state of a parameter.
    """
    told = []
    for number, case in enumerate(CASES):
        model = model_of(case)
        config = {**config_of(case, dist.get_world_size()), "zero_force_ds_cpu_optimizer": False}
        engine = initialize(model=model, config=config, **arguments_of(case, model))[0]
        steps(engine, 0, BEFORE)
        engine.save_checkpoint(str(root / str(number)), client_state={"case": number})
        moments = {
            f"{kind}/{name}": state_of(parameter, kind).clone()
            for name, parameter in engine.module.named_parameters()
            for kind in ("exp_avg", "exp_avg_sq")
            if case["stage"] == 3
            and parameter.requires_grad  # at other stages it gathers only those of its own classes
        }
        told.append(steps(engine, BEFORE, AFTER))
        if case["stage"] and dist.get_rank() == 0:
            if moments:
                torch.save(moments, root / f"{number}-moments.pt")
            found = weights_of(str(root / str(number)))
            torch.save({name: value.clone() for name, value in found.items()}, root / f"{number}.pt")
        engine.destroy()
    return told
