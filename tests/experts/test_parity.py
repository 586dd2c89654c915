"""Expert parallelism: losses, gradient norms and weights match one process in fp64 to 1e-6."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import launcher
from launcher.comm import Axis, Mesh
from launcher.config import load
from launcher.engine.report import ranks
from launcher.errors import ConfigError
from launcher.experts.apply import apply
from launcher.experts.capacity import limit
from tests.experts.families import FAMILIES, global_batch, model_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.sequence.families import model_of as of_sequences
from tests.tensor.running import plain_steps, whole_state

STEPS, LR, TOLERANCE = 3, 0.05, 1e-6
SHARED = {"sequence_parallel_size", "context_parallel"}


class Case(NamedTuple):
    """A configuration of expert parallelism."""

    size: int = 2
    stage: int = 0
    accumulation: int = 1
    implementation: str = "eager"
    more: tuple[tuple[str, Any], ...] = ()  # sections of the JSON
    capacity: float | None = None
    dispatch: str = "pairs"


Trained = tuple[list[float], list[float], dict[str, Tensor]]


def trained(ctx: RankContext, family: str, case: Case, rows: int) -> Trained:
    """Return (losses, gradient norms, weights) after a few steps."""
    zero = {"stage": case.stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        **dict(case.more),
        "zero_optimization": {**zero, **dict(case.more).get("zero_optimization", {})},
        "expert_parallel": {"size": case.size, "capacity_factor": case.capacity, "dispatch": case.dispatch},
    }
    engine: Any = launcher.initialize(
        model=model_of(family, case.implementation), config=config, device=DEVICE
    )[0]
    dp, losses, norms = engine.mesh.dp, [], []
    for step in range(STEPS):
        mine = global_batch(step, rows)[dp.rank * case.accumulation :][: case.accumulation]
        batches = [{"input_ids": ids, "labels": ids} for ids in mine]
        losses.append(float(engine.train_batch(iter(batches))))
        norms.append(engine.get_global_grad_norm())
    weights = {name: value for name, value in whole_state(engine).items() if "/" not in name}
    engine.destroy()
    return losses, norms, weights


@cache
def truth(family: str, rows: int, capacity: float | None = None) -> Trained:
    """Return the same from plain PyTorch on one process."""
    model = model_of(family).double()
    if capacity is not None:
        limit(model, capacity, whole=True)

    def loss_of(step: int) -> Tensor:
        parts = [model(input_ids=ids, labels=ids).loss / rows for ids in global_batch(step, rows)]
        return torch.stack(parts).sum()

    return plain_steps(model, loss_of, STEPS, LR)


def check(pool: WorkerPool, family: str, case: Case, world: int) -> None:
    more = dict(case.more)
    apart = more.get("pipeline", {}).get("stages", 1) * (2 if SHARED & more.keys() else 1)
    apart *= more.get("tensor_parallel", {}).get("autotp_size", 1)
    rows = world // apart * case.accumulation
    losses, norms, weights = truth(family, rows, case.capacity)
    for found in pool.run(trained, world, family, case, rows):
        assert found[0] == pytest.approx(losses, rel=TOLERANCE)
        assert found[1] == pytest.approx(norms, rel=2 * TOLERANCE)
        for name, value in weights.items():
            off = (found[2][name].double() - value).norm()
            assert off <= TOLERANCE * value.norm(), name


@pytest.mark.key("expert_parallel.size")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage(pool: WorkerPool, stage: int) -> None:
    check(pool, "plain", Case(stage=stage, accumulation=2), 2)


KINDS = [family for family in FAMILIES if family not in ("plain", "deep")]


@pytest.mark.parametrize("family", KINDS)
def test_every_kind_of_experts(pool: WorkerPool, family: str) -> None:
    check(pool, family, Case(stage=1), 2)


@pytest.mark.key("expert_parallel.capacity_factor")
@pytest.mark.parametrize(("family", "case", "world"), [
    ("plain", Case(stage=1, capacity=0.7), 2), ("shared expert", Case(size=1, capacity=0.5), 2),
    ("biases", Case(size=4, stage=2, capacity=0.6, more=(("tensor_parallel", {"autotp_size": 2}),)), 4),
])  # fmt: skip
def test_a_capacity(pool: WorkerPool, family: str, case: Case, world: int) -> None:
    """It applies to each batch of a rank, as in one process, and it has an effect."""
    check(pool, family, case, world)
    assert truth(family, 2, case.capacity)[0] != pytest.approx(truth(family, 2)[0], rel=1e-5)


OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
MATRIX = [
    ("plain", Case(stage=2, accumulation=2, more=(("prescale_gradients", True),)), 4),
    ("plain", Case(stage=3, more=(("zero_optimization", {"enable_sanity_checks": True}),)), 2),
    ("biases", Case(size=4, stage=3), 4),
    ("uneven", Case(size=4, stage=1), 4),
    ("tied", Case(stage=3, implementation="grouped_mm"), 4),
    ("groups and dense layers", Case(stage=3, more=(("activation_checkpointing", {}),)), 2),
    ("plain", Case(stage=3, more=(("zero_optimization", OFFLOADED),)), 2),
    ("plain", Case(stage=1, more=(("gradient_predivide_factor", 4.0),)), 4),
    (
        "plain",
        Case(stage=3, more=(("zero_optimization", {"overlap_comm": False, "reduce_scatter": False}),)),
        4,
    ),
    ("deep", Case(stage=2, accumulation=2, more=(("pipeline", {"stages": 2}),)), 4),
    ("deep", Case(stage=1, accumulation=2, more=(("pipeline", {"stages": 2, "schedule": "zbv"}),)), 4),
    ("deep", Case(stage=1, accumulation=4, more=(("pipeline", {"stages": 2, "schedule": "zb-h1"}),)), 4),
    ("plain", Case(stage=3, accumulation=2, more=(("sequence_parallel_size", 2),)), 4),
    ("shared expert", Case(size=4, stage=2, accumulation=2, more=(("context_parallel", {"ring": 2}),)), 4),
    ("biases", Case(stage=1, accumulation=2, more=(("tensor_parallel", {"autotp_size": 2}),)), 4),
    ("shared expert", Case(size=4, stage=3, more=(("tensor_parallel", {"autotp_size": 2}),)), 4),
    ("plain", Case(stage=2, more=(("tensor_parallel", {"autotp_size": 2}),)), 2),
]


@pytest.mark.parametrize(
    ("family", "case", "world"),
    [*MATRIX[:3], *(pytest.param(*row, marks=pytest.mark.full) for row in MATRIX[3:-4]), *MATRIX[-4:]],
)
def test_ways_to_spread(pool: WorkerPool, family: str, case: Case, world: int) -> None:
    """A covering of degrees, stages, kernels, offload, recomputation, pipeline stages and sequence parallelism."""
    check(pool, family, case, world)


BY_TOKENS = [
    ("plain", Case(stage=3, accumulation=2), 2),
    ("biases", Case(size=4, stage=2, capacity=0.6, more=(("tensor_parallel", {"autotp_size": 2}),)), 4),
    ("tied", Case(stage=1, implementation="grouped_mm"), 4),
    ("uneven", Case(size=4, stage=1), 4),
    ("shared expert", Case(stage=2, accumulation=2, more=(("context_parallel", {"ring": 2}),)), 4),
    ("groups and dense layers", Case(stage=3, more=(("activation_checkpointing", {}),)), 2),
    ("deep", Case(stage=1, accumulation=2, more=(("pipeline", {"stages": 2, "schedule": "zbv"}),)), 4),
    ("all", Case(stage=3, implementation="grouped_mm", more=(("zero_optimization", OFFLOADED),)), 2),
]


@pytest.mark.key("expert_parallel.dispatch")
@pytest.mark.parametrize(
    ("family", "case", "world"),
    [*BY_TOKENS[:3], *(pytest.param(*row, marks=pytest.mark.full) for row in BY_TOKENS[3:])],
)
def test_dispatch_by_tokens(pool: WorkerPool, family: str, case: Case, world: int) -> None:
    check(pool, family, case._replace(dispatch="tokens"), world)


def test_states_and_parameters_on_nvme(pool: WorkerPool, tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    both = {"offload_optimizer": place, "offload_param": place}
    check(pool, "biases", Case(stage=3, more=(("zero_optimization", both),)), 2)


def by_muon(ctx: RankContext, family: str, size: int, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {"size": size},
    }
    engine: Any = launcher.initialize(model=model_of(family), config=config, device=DEVICE)[0]
    losses = []
    for step in range(STEPS):
        ids = global_batch(step, 4)[ctx.rank]
        losses.append(float(engine.train_batch(iter([{"input_ids": ids, "labels": ids}]))))
    weights = {name: value for name, value in whole_state(engine).items() if "/" not in name}
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize(("family", "size", "world", "stage"), [
    ("plain", 2, 2, 1), ("biases", 2, 4, 3), pytest.param("uneven", 2, 4, 2, marks=pytest.mark.full),
])  # fmt: skip
def test_muon_steps_each_expert(pool: WorkerPool, family: str, size: int, world: int, stage: int) -> None:
    """An expert's matrix is complete on its ranks, so the result equals that without expert parallelism."""
    wanted = pool.run(by_muon, world, family, 1, 1)[0]
    found = pool.run(by_muon, world, family, size, stage)[0]
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)


def size_of(ctx: RankContext, section: dict[str, Any]) -> tuple[int, str]:
    """Return (experts of a layer on this rank, the description of the ranks)."""
    config = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": section}
    engine: Any = launcher.initialize(model=model_of("plain"), config=config, device=DEVICE)[0]
    found = engine.module.model.layers[0].mlp.experts.num_experts, ranks(engine)
    engine.destroy()
    return found


@pytest.mark.key("expert_parallel.enabled")
@pytest.mark.key("expert_parallel.autoep_size")
def test_the_keys_of_deepspeed(pool: WorkerPool) -> None:
    (count, line), _ = pool.run(size_of, 2, {"enabled": True, "autoep_size": 2})
    assert count == 2 and "expert parallel 2" in line
    (count, line), _ = pool.run(size_of, 2, {"enabled": False, "autoep_size": 2})
    assert count == 4 and "experts" not in line


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"expert_parallel": {"size": 3}},
            "expert_parallel.size is 3, which does not divide the 4 ranks",
        ),
        (
            {"expert_parallel": {"size": 2, "enabled": True, "autoep_size": 4}},
            "size 2 contradicts autoep_size 4",
        ),
        (
            {
                "expert_parallel": {"size": 2},
                "tensor_parallel": {"autotp_size": 2, "sequence_parallel": True},
            },
            "expert parallelism needs whole sequences",
        ),
        ({"expert_parallel": {"size": 2}, "optimizer": {"type": "Lamb"}}, "Lamb needs the norms"),
        (
            {"expert_parallel": {"size": 2}, "compile": {"enabled": True}},
            "compile is not implemented with expert parallelism",
        ),
        ({"expert_parallel": {"size": 2, "top_k": 1}}, "it is set by the model's config"),
        (
            {"expert_parallel": {"size": 2}, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
            "hold different experts",
        ),
    ],
)
def test_what_does_not_go_together_is_said(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load({"train_micro_batch_size_per_gpu": 1, **config}).dp_degree(4)


def refused(ctx: RankContext, family: str, size: int) -> str:
    config = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"size": size}}
    model = of_sequences("grouped") if family == "dense" else model_of(family)
    with pytest.raises(ConfigError) as error:
        launcher.initialize(model=model, config=config, device=DEVICE)
    return str(error.value)


def test_models_that_cannot_be_spread_are_refused(pool: WorkerPool) -> None:
    assert "no experts that transformers calls" in pool.run(refused, 2, "dense", 2)[0]
    assert "expert_parallel.size 8 exceeds the 4 experts of model.layers.0.mlp.experts" in _raised(
        lambda: apply(model_of("plain"), Axis("ep", 8), Mesh.planned(DEVICE, 8, 0, dp=8))
    )


def _raised(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    return str(error.value)
