"""Configurations that estimates, rehearsals and runs are compared on."""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import cache
from typing import Any

import pytest

from launcher.config import load
from launcher.engine.offloading import HOST
from launcher.estimate.answer import Estimate
from launcher.estimate.dry_run import DEVICE, dry_run
from launcher.models.build import build_on_meta, load_config

WORLD, SEQUENCE = 2, 128
TP = {"tensor_parallel": {"autotp_size": 2}}
BF16 = {"bf16": {"enabled": True}}
RECOMPUTE = {"activation_checkpointing": {"partition_activations": False}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def config_of(stage: int, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        **more,
    }


EVERY_UNIT_FREED = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
CASES = {
    "0": config_of(0),
    "1": config_of(1),
    "2": config_of(2),
    "3": config_of(3),
    "3, every unit freed": config_of(3, EVERY_UNIT_FREED),
    "1, bf16": config_of(1, **BF16),
    "3, bf16": config_of(3, **BF16),
    "0, tp": config_of(0, **TP),
    "2, tp, sequence": config_of(2, tensor_parallel={"autotp_size": 2, "sequence_parallel": True}),
    "3, ring": config_of(3, context_parallel={"ring": 2}),
    "2, ulysses, recompute": config_of(2, context_parallel={"ulysses": 2}, **RECOMPUTE),
    "2, recompute": config_of(2, **RECOMPUTE),
    "2, optimizer offloaded": config_of(2, OFFLOADED),
    "0, stages": config_of(0, pipeline={"stages": 2}),
    "3, zero bubble": config_of(
        3, pipeline={"stages": 2, "schedule": "zb-h1"}, gradient_accumulation_steps=4
    ),
    "3, all offloaded": config_of(3, {**OFFLOADED, "offload_param": {"device": "cpu"}}),
}
"""Those that runs are compared on."""

NARROW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
NVME = {"device": "nvme", "nvme_path": "/nowhere"}
MORE = {
    "3, bf16, recompute": config_of(3, **BF16, **RECOMPUTE),
    "2, bf16 everywhere": config_of(2, bf16=NARROW),
    "2, bf16, stages": config_of(2, pipeline={"stages": 2}, **BF16),
    "0, interleaved, half recomputed": config_of(
        0,
        pipeline={"stages": 2, "schedule": "interleaved"},
        gradient_accumulation_steps=4,
        activation_checkpointing={"number_checkpoints": 2},
    ),
    "3, bf16, half on the host": config_of(3, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, **BF16),
    "3, all on NVMe": config_of(3, {"offload_optimizer": NVME, "offload_param": NVME | {"max_in_cpu": 0}}),
}
"""More, for the estimate beside the rehearsal."""

CHOSEN = {
    "1, bf16",
    "3, every unit freed",
    "2, tp, sequence",
    "3, zero bubble",
    "3, all offloaded",
    "3, ring",
}
CHOSEN |= {"2, bf16, stages", "3, bf16, half on the host", "2, bf16 everywhere"}
"""Those with nearly everything between them; the others are left to `make test-all`."""


def chosen(cases: Iterable[str], those: Container[str] = CHOSEN) -> list[Any]:
    return [pytest.param(name, marks=() if name in those else pytest.mark.full) for name in cases]


@cache
def rehearsed(name: str, rank: int = 0, *, one_memory: bool = False) -> Estimate:
    """What a rehearsal of a case finds.

    Args:
        one_memory: device and host are the same.
    """
    model = build_on_meta(load_config("default"))
    device = HOST if one_memory else DEVICE
    config = load((CASES | MORE)[name])
    return dry_run(model, config, world=WORLD, rank=rank, sequence=SEQUENCE, device=device)
