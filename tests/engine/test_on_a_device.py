"""A step with a device and a host: tensors of the two never mix, and the host synchronizes as rarely as documented."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.other_device import OTHER, third_step
from tests.experts.families import model_of as mixture
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import SEQ, tiny_gpt2, tiny_llama

ONE_WAIT = {"zero/norm.py": 1}  # [Note: one wait a step]
INPUTS = {"models/host_copies.py": 3}  # of three blocks: on a GPU they go on a stream of their own
LAYERS = 3
BF16 = {"bf16": {"enabled": True}}
CPU = {"device": "cpu"}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **keys}}


MODES: dict[str, dict[str, Any]] = {
    "stage 0": zero(0),
    "stage 1, bf16, clipped": zero(1) | BF16 | {"gradient_clipping": 1.0},
    "stage 2, accumulated": zero(2) | BF16 | {"gradient_accumulation_steps": 3},
    "stage 2, fp16": zero(2) | {"fp16": {"enabled": True}},
    "stage 3": zero(3) | BF16,
    "stage 3, recomputed": zero(3) | BF16 | {"activation_checkpointing": {}},
    "stage 3, inputs on the host": zero(3) | BF16 | {"activation_checkpointing": {"cpu_checkpointing": True}},
    "stage 3, tiled loss": zero(3) | BF16 | {"tiled_loss": True},
    **{
        f"stage 2, {kind}": zero(2) | BF16 | {"optimizer": {"type": kind, "params": {"lr": 1e-3}}}
        for kind in ("Muon", "Lamb", "Lion", "SGD", "Adagrad")
    },
}
OFFLOADED: dict[str, dict[str, Any]] = {
    "optimizer on the host": zero(2, offload_optimizer=CPU),
    "optimizer on the host, accumulated": zero(2, offload_optimizer=CPU) | {"gradient_accumulation_steps": 2},
    "all on the host": zero(3, offload_optimizer=CPU, offload_param=CPU),
    "half on the host, Muon": zero(2, offload_optimizer=CPU | {"ratio": 0.5})
    | {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
    "bits on the host": zero(2, offload_optimizer=CPU) | {"replica_check": {"resting": True}},
    "optimizer on NVMe": zero(3, offload_optimizer={"device": "nvme"}),
    "all on NVMe": zero(
        3, offload_optimizer={"device": "nvme"}, offload_param={"device": "nvme", "max_in_cpu": 0}
    ),
}


def batch() -> dict[str, Tensor]:
    ids = torch.zeros(2, SEQ, dtype=torch.long, device=OTHER)
    return {"input_ids": ids, "labels": ids}


def crossed(ctx: RankContext, name: str, config: dict[str, Any], world: int = 1) -> dict[str, dict[str, int]]:
    whole = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    model = partial(tiny_gpt2 if "accumulated" in name else tiny_llama, layers=LAYERS)
    if "experts" in name:
        model = partial(mixture, "plain")
    found = third_step(model, whole | config, batch, world)
    return {kind: dict(found.of(kind)) for kind in ("wait", "to host", "to device", "pageable")}


@pytest.mark.parametrize("name", MODES)
def test_the_host_waits_once_a_step(pool: WorkerPool, name: str) -> None:
    (found,) = pool.run(crossed, 1, name, MODES[name])
    more = (
        INPUTS if "inputs" in name else {"optim/lamb.py": 1} if "Lamb" in name else {}
    )  # its ratios of norms
    assert found["wait"] == ONE_WAIT | more
    assert sum(found["to device"].values()) <= 1, "the flags of use"


@pytest.mark.parametrize("name", OFFLOADED)
def test_what_rests_on_the_host_goes_there_and_back(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    config = BF16 | OFFLOADED[name]
    for key in ("offload_optimizer", "offload_param"):
        section = config["zero_optimization"].get(key)
        if section and section["device"] == "nvme":
            config["zero_optimization"][key] = section | {"nvme_path": str(tmp_path)}
    (found,) = pool.run(crossed, 1, name, config)
    sent = found["to host"].pop("models/host_copies.py")
    added = {"zero/gradients.py": sent} if "accumulated" in name else {}  # to what the host has of this step
    added |= {"zero/features/replicas.py": 2} if "bits" in name else {}  # before and after the step
    assert found["wait"] == ONE_WAIT | added, "the backward does not wait"
    assert sent >= 2 and not found["to host"]
    at_once = "Muon" not in name  # which needs whole matrices: parameters are copied when all are stepped
    assert sum(found["to device"].values()) >= LAYERS or "NVMe" in name or not at_once
    # memory for what comes from a file is soon used for something else
    assert found["pageable"].keys() <= (set() if at_once and name != "all on NVMe" else {"zero/flat.py"})


SHARED: dict[str, dict[str, Any]] = {
    "stage 1": zero(1),
    "stage 3": zero(3),
    "stage 3, in groups": zero(3, mics_shard_size=2),
    "stage 3, weights in groups": zero(3, zero_hpz_partition_size=2),
    "stage 2, optimizer on the host": zero(2, offload_optimizer=CPU),
    "tensor parallel, optimizer on the host": zero(2, offload_optimizer=CPU)
    | {"tensor_parallel": {"autotp_size": 2}},
    "tensor parallel": zero(1) | {"tensor_parallel": {"autotp_size": 2}},
    "tensor and sequence parallel": zero(1)
    | {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}},
    "Ulysses": zero(3) | {"sequence_parallel_size": 2},
    "ring": zero(2) | {"context_parallel": {"ring": 2}},
    "experts": zero(1) | {"expert_parallel": {"size": 2}},
    "experts, gathered": zero(3),
}


@pytest.mark.parametrize("name", SHARED)
def test_with_other_ranks(pool: WorkerPool, name: str) -> None:
    """One process acts as the first of four ranks; data from the others is arbitrary."""
    (found,) = pool.run(crossed, 1, name, BF16 | SHARED[name], 4)
    counts = (
        {"experts/routing.py": 2} if name == "experts" else {}
    )  # each of two layers: how many tokens go where
    assert found["wait"] == ONE_WAIT | counts
    assert not found["pageable"]
