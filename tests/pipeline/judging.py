"""What becomes of a causal-LM type that is cut into pipeline stages, found by training its tiny model.

Beside plain PyTorch in one process: losses and gradient norms of each step, and the weights after them. What misses
that in fp32 is tried once more in float64, as for tensor parallelism.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from launcher.engine import assemble
from launcher.engine.dtypes import DTYPES
from launcher.engine.policy import policy_of
from launcher.errors import ConfigError
from launcher.pipeline.hf.parts import parts_of
from launcher.zero import ZeroPolicy
from tests.pipeline.running import engine_of, whole_weights
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.tensor.judging import EXACTLY, TOLERANCES, WORKS, InFloat64, Outcome, Verdict, in_dtype, word
from tests.tensor.transparency import LR, all_ranks, relative
from tests.tensor.zoo import batch_of, tiny_model

STEPS, MICROBATCHES, LENGTH = 3, 2, 12
DEEP = 4  # stages, of models that have as many blocks
LIMIT_S = 60.0

Batch = dict[str, Tensor]


def judged(pool: WorkerPool, verdict: Verdict) -> Verdict:
    """The verdict with what becomes of the type in stages."""
    found = _outcomes(pool, verdict.type, 2)
    said = word(found)
    if said in (WORKS, EXACTLY) and len(parts_of(tiny_model(verdict.type, seed=0)).blocks) >= DEEP:
        deep = word(_outcomes(pool, verdict.type, DEEP))
        said = deep if said == WORKS or deep != WORKS else said
    reason = next((o.refusal for o in found[torch.float32] if o.refusal), "").partition(": ")[2]
    return replace(verdict, stages=said, uncut=reason)


def _outcomes(pool: WorkerPool, kind: str, stages: int) -> dict[torch.dtype, list[Outcome]]:
    """Of all ranks, by dtype."""
    try:
        ranks = pool.run(compare, stages, kind, timeout=LIMIT_S)
    except RanksFailed as failed:
        return {torch.float32: [Outcome(error=str(failed).splitlines()[0])]}
    return {dtype: [found[dtype] for found in ranks] for dtype in ranks[0]}


def compare(ctx: RankContext, kind: str) -> dict[torch.dtype, Outcome]:
    """Train a type in as many stages as there are ranks."""
    found: dict[torch.dtype, Outcome] = {}
    for dtype, tolerance in TOLERANCES.items():
        with _computing_in(dtype):
            found[dtype] = _compared(kind, dtype, ctx.world)
        if max(all_ranks(found[dtype].difference)) <= tolerance:
            break
    return found


@contextlib.contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    """The engine's "fp32" is `dtype`, in the weights that it steps, too."""
    if dtype == torch.float32:
        yield
        return

    def own_weights(config: Any, model: Any) -> ZeroPolicy:
        return replace(policy_of(config, model), fp32_master=False)

    with InFloat64(), patch.dict(DTYPES, fp32=dtype), patch.object(assemble, "policy_of", own_weights):
        yield


def _compared(kind: str, dtype: torch.dtype, stages: int) -> Outcome:
    steps = [_microbatches(kind, step, dtype) for step in range(STEPS)]
    staged, model = (in_dtype(tiny_model(kind, seed=0), {}, dtype)[0] for _ in range(2))
    try:
        losses, norms, weights = _train(staged, steps, stages)
    except ConfigError as error:  # before the first step, on all ranks
        return Outcome(refusal=error.what)
    outcome = Outcome()
    for name, found, expected in _pairs((losses, norms, weights), _train_plain(model, steps)):
        difference = relative(found, expected)
        if not difference <= outcome.difference:
            outcome.difference, outcome.worst = difference, name
    return outcome


def _pairs(found: Any, expected: Any) -> list[tuple[str, Tensor, Tensor]]:
    pairs = []
    for name, mine, theirs in zip(("losses", "norms"), found, expected, strict=False):
        pairs.append((name, torch.tensor(mine).double(), torch.tensor(theirs).double()))
    missing = torch.full((), torch.inf)
    return pairs + [(name, found[2].get(name, missing), value) for name, value in expected[2].items()]


def _microbatches(kind: str, step: int, dtype: torch.dtype) -> list[Batch]:
    batch = batch_of(kind, seed=step, rows=MICROBATCHES, length=LENGTH)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    return [{k: v.chunk(MICROBATCHES)[m].contiguous() for k, v in batch.items()} for m in range(MICROBATCHES)]


def _train(model: nn.Module, steps: list[list[Batch]], stages: int) -> tuple[Any, Any, dict[str, Tensor]]:
    config = {
        "train_batch_size": MICROBATCHES,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "pipeline": {"stages": stages, "schedule": "1f1b", "partition": "uniform"},
    }
    with contextlib.redirect_stdout(io.StringIO()):
        engine = engine_of(config, model)
    losses, norms = [], []
    for batches in steps:
        losses.append(float(engine.train_batch(iter(batches) if engine.is_first_stage() else None)))
        norms.append(float(engine.get_global_grad_norm()))
    weights = whole_weights(engine)
    engine.destroy()
    return losses, norms, weights


def _train_plain(model: nn.Module, steps: list[list[Batch]]) -> tuple[Any, Any, dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    for batches in steps:
        optimizer.zero_grad()
        parts = [model(**batch).loss / MICROBATCHES for batch in batches]
        for loss in parts:
            loss.backward()
        losses.append(float(sum(parts)))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(nn.utils.get_total_norm(gradients)))
        optimizer.step()
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}
