"""Sequence parallelism: losses, gradient norms and weights match one process in fp64 to 1e-6."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import launcher
from launcher.engine import report
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.sequence.families import BATCHES, FAMILIES, model_of
from tests.tensor.running import plain_steps, whole_state

STEPS, LR = 2, 0.01
TOLERANCE = 1e-6


class Case(NamedTuple):
    """A configuration of sequence parallelism."""

    ulysses: int
    ring: int
    layout: str = "zigzag"
    stage: int = 3
    length: int = 24
    batch: str = "plain"
    more: tuple[tuple[str, Any], ...] = ()  # sections of the JSON


def trained(ctx: RankContext, family: str, case: Case) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return (losses, gradient norms, weights) after a few steps."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "context_parallel": {"ulysses": case.ulysses, "ring": case.ring, "layout": case.layout},
        **dict(case.more),
    }
    engine: Any = launcher.initialize(model=model_of(family), config=config, device=DEVICE)[0]
    assert engine.mesh.axes["cp"].degree == case.ulysses * case.ring
    losses, norms = [], []
    for step in range(STEPS):
        batch = BATCHES[case.batch](step, case.length)
        losses.append(float(engine.train_batch(iter([batch] * engine.gradient_accumulation_steps()))))
        norms.append(engine.get_global_grad_norm())
    weights = {name: value for name, value in whole_state(engine).items() if "/" not in name}
    engine.destroy()
    return losses, norms, weights


@cache
def truth(
    family: str, batch: str, length: int, dtype: torch.dtype = torch.float64
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return the same from plain PyTorch on one process."""
    model = model_of(family).to(dtype)
    return plain_steps(model, lambda step: model(**BATCHES[batch](step, length)).loss, STEPS, LR)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def check(pool: WorkerPool, family: str, case: Case, world: int) -> None:
    losses, norms, weights = truth(family, case.batch, case.length)
    single = truth(family, case.batch, case.length, torch.float32)[2]
    for found in pool.run(trained, world, family, case):
        assert found[0] == pytest.approx(losses, rel=TOLERANCE)
        assert found[1] == pytest.approx(norms, rel=2 * TOLERANCE)
        for name, value in weights.items():
            # what starts at zero is all change: one process in fp32 is not nearer to fp64 there
            most = max(TOLERANCE, 2 * distance(single[name], value))
            assert distance(found[2][name], value) <= most, name


@pytest.mark.key("context_parallel.*")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("ways", [(2, 1), (1, 2)])
def test_a_llama_is_that_of_one_process(pool: WorkerPool, ways: tuple[int, int], batch: str) -> None:
    check(pool, "grouped", Case(*ways, batch=batch), 2)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "deep"])
def test_every_kind_of_attention(pool: WorkerPool, family: str) -> None:
    """On a ring, with a length that it does not divide."""
    check(pool, family, Case(1, 2, length=23), 2)


MATRIX = [
    ("grouped", Case(2, 2, batch="packed"), 4),
    ("grouped", Case(2, 2, "striped", stage=1, length=21), 4),
    ("grouped", Case(4, 1, stage=2, batch="left padded"), 4),
    ("one key head", Case(1, 4, "contiguous", stage=0, batch="packed"), 4),
    ("norms of q and k", Case(4, 1, length=17, batch="packed"), 4),
    ("sinks", Case(2, 2, batch="left padded", length=22), 4),
    ("latent", Case(2, 2, "contiguous", stage=2), 4),
    ("windows here and there", Case(1, 4, batch="packed", length=30), 4),
    ("experts", Case(2, 1, stage=1, batch="left padded"), 2),
    ("caps", Case(2, 1, batch="packed"), 2),
    ("rotary by length", Case(2, 1, length=24), 2),
    ("rotary of long", Case(1, 2, "contiguous", stage=1, length=24), 2),
    ("chunks", Case(1, 2, batch="packed"), 2),
    ("window", Case(1, 2, "striped", stage=2, batch="packed"), 2),
    ("grouped", Case(1, 2, more=(("gradient_accumulation_steps", 2),)), 2),
    ("grouped", Case(1, 2, more=(("activation_checkpointing", {}),)), 2),
    ("grouped", Case(1, 2, stage=2, batch="packed", more=(("tensor_parallel", {"autotp_size": 2}),)), 4),
    ("grouped", Case(2, 1, stage=1, length=23, more=(("pipeline", {"stages": 2}),)), 4),
]


@pytest.mark.parametrize(
    ("family", "case", "world"),
    [*MATRIX[:1], *(pytest.param(*row, marks=pytest.mark.full) for row in MATRIX[1:-4]), *MATRIX[-4:-2],
     *(pytest.param(*row, marks=pytest.mark.full) for row in MATRIX[-2:])],
)  # fmt: skip
def test_ways_to_share(pool: WorkerPool, family: str, case: Case, world: int) -> None:
    """A covering of degrees, layouts, stages, masks, accumulation, recomputation, tp and pp."""
    check(pool, family, case, world)


def chosen(ctx: RankContext, config: dict[str, Any], layout: str) -> tuple[int, int]:
    engine: Any = launcher.initialize(model=model_of("one key head"), config=config, device=DEVICE)[0]
    shared = engine.mesh.axes["cp"].degree, engine.mesh.dp.degree
    assert f"context parallel 2 ({layout}), " in report.ranks(engine)
    engine.destroy()
    return shared


@pytest.mark.key("sequence_parallel_size")
def test_deepspeeds_key(pool: WorkerPool) -> None:
    """The key alone is sufficient: heads are exchanged as far as there are heads."""
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2, "optimizer": {"type": "SGD"}}
    assert pool.run(chosen, 2, config, "Ulysses 2") == [(2, 1)] * 2
    ring = {**config, "context_parallel": {"ring": 2}}
    assert pool.run(chosen, 2, ring, "ring 2, zigzag") == [(2, 1)] * 2


def logits_of(ctx: RankContext) -> dict[str, Any]:
    """Return a script's `outputs.logits`: (with labels in training, with labels in eval, without labels)."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "context_parallel": {"ring": 2},
    }
    engine: Any = launcher.initialize(model=model_of("grouped"), config=config, device=DEVICE)[0]
    batch = BATCHES["plain"](0, 23)
    found = {"trained": engine(**batch).logits}
    engine.eval()
    with torch.no_grad():
        found["with labels"] = engine(**batch).logits
        found["without"] = engine(input_ids=batch["input_ids"]).logits
        found["hidden"] = engine(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states[-1]
    engine.destroy()
    return found


def test_outputs_are_those_of_the_whole_sequence(pool: WorkerPool) -> None:
    """Outputs of a slice are never returned."""
    with torch.no_grad():
        ids = BATCHES["plain"](0, 23)["input_ids"]
        outputs = model_of("grouped").eval()(input_ids=ids, output_hidden_states=True)
    want = outputs.logits
    for found in pool.run(logits_of, 2):
        assert found["trained"] is None
        torch.testing.assert_close(found["with labels"], want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["without"], want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["hidden"], outputs.hidden_states[-1], rtol=1e-5, atol=1e-5)


def test_ranks_of_a_group_with_other_batches_are_told(pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="context-parallel group"):
        pool.run(with_other_batches, 2)


def with_other_batches(ctx: RankContext) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "sequence_parallel_size": 2,
    }
    engine: Any = launcher.initialize(model=model_of("grouped"), config=config, device=DEVICE)[0]
    engine(**BATCHES["plain"](ctx.rank, 24))
