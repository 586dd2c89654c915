"""PipeDream and PipeDream-2BW train like one process that uses equally old weights."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.errors import ConfigError
from tests.pipeline.delayed import of_language_model, seen_by, simulated
from tests.pipeline.running import advance, engine_of, whole_weights
from tests.pipeline.test_rows import loss_of, pairs, row
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import batch, tiny_llama

STEPS = 3
TOLERANCE = 1e-5
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "SGD": (
        {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.5}},
        partial(torch.optim.SGD, lr=0.3, momentum=0.5),
    ),
    "AdamW": (
        {"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1}},
        partial(torch.optim.AdamW, lr=0.003, weight_decay=0.1),
    ),
}


@dataclass(frozen=True)
class Case:
    """One run; ranks beyond the stages are data-parallel."""

    schedule: str
    stages: int
    microbatches: int
    optimizer: str = "AdamW"
    zero: int = 0
    tied: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        rest = f"{'-tied' * self.tied}{'-recompute' * self.recompute}"
        return f"{self.schedule}-{self.stages}x{self.microbatches}-{self.optimizer}-z{self.zero}{rest}"

    def config(self, **sections: Any) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_batch_size": 8,
            "gradient_accumulation_steps": self.microbatches,
            "optimizer": OPTIMIZERS[self.optimizer][0],
            "gradient_clipping": 0,
            "zero_optimization": {"stage": self.zero},
            "pipeline": {"stages": self.stages, "schedule": self.schedule},
            **sections,
        }
        return {**config, "activation_checkpointing": {}} if self.recompute else config

    @property
    def layers(self) -> int:
        return max(3, self.stages)


@dataclass(frozen=True)
class Found:
    """Results of a rank: losses, weights of all stages, the stages of its own, and its peak number of versions."""

    losses: list[float]
    weights: dict[str, Tensor]
    own: dict[str, int]
    versions: int
    promised: int


def train(ctx: RankContext, case: Case, rows: bool = False) -> Found:
    """Train; `rows`: a sequence of layers."""
    engine = engine_of(case.config(), row(case.tied) if rows else tiny_llama(case.tied, case.layers))
    losses = (
        [one_of_rows(engine, step) for step in range(STEPS)] if rows else advance(engine, range(STEPS))[0]
    )
    rank = engine.mesh.axes["pp"].rank
    promised = engine.runtime.schedule(case.microbatches).weight_versions[rank]
    own = dict.fromkeys(engine.zero.slots, rank)
    found = Found(losses, whole_weights(engine), own, engine.versions.most, promised)
    engine.destroy()
    return found


def one_of_rows(engine: Any, step: int) -> float:
    parts = pairs(step, 0, 1, engine.gradient_accumulation_steps())
    return float(engine.train_batch(iter(parts) if engine.is_first_stage() else None))


def off_by(found: list[Found], case: Case, seen: Any = None, rows: bool = False) -> float:
    """Return the largest relative difference of losses and weights from the simulation."""
    model: Any = row(case.tied).build(0, 9) if rows else tiny_llama(case.tied, case.layers)
    loss: Any = (lambda layers, ids: loss_of(layers(ids), ids)) if rows else of_language_model
    stages = {name: stage for of_rank in found for name, stage in of_rank.own.items()}
    losses = simulated(
        model,
        OPTIMIZERS[case.optimizer][1](model.parameters()),
        stages,
        seen or seen_by(case.schedule, case.stages, case.microbatches, STEPS),
        steps=STEPS,
        microbatches=case.microbatches,
        every=1 if case.schedule == "pipedream" else case.microbatches,
        loss_of=loss,
    )
    got = found[0]
    apart = [abs(a / b - 1) for a, b in zip(got.losses, losses, strict=True)]
    for name, weight in model.named_parameters():
        weight = weight.detach()
        apart.append(float((got.weights[name] - weight).norm() / weight.norm()))
    return max(apart)


CASES = [
    *[
        Case(name, stages, 2 * stages, optimizer)
        for name in ("pipedream", "2bw")
        for stages in (2, 4)
        for optimizer in OPTIMIZERS
    ],
    Case("pipedream", 2, 4, recompute=True),
    Case("2bw", 2, 4, tied=True, zero=2, recompute=True),
]


@pytest.mark.pairwise
@pytest.mark.key("pipeline.schedule")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_one_process_with_old_weights(pool: WorkerPool, case: Case) -> None:
    found = pool.run(train, case.stages, case)
    assert off_by(found, case) <= TOLERANCE
    assert [rank.versions for rank in found] == [rank.promised for rank in found]


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_beside_data_parallel_ranks(pool: WorkerPool, name: str, zero: int) -> None:
    """A microbatch of the simulation combines those of two ranks."""
    case = Case(name, 2, 4, zero=zero)
    found = pool.run(train, 4, case)
    assert off_by(found, case) <= TOLERANCE


@pytest.mark.parametrize("case", [Case("pipedream", 4, 4), Case("2bw", 2, 4, tied=True)], ids=str)
def test_a_row_of_layers(pool: WorkerPool, case: Case) -> None:
    assert off_by(pool.run(train, case.stages, case, True), case, rows=True) <= TOLERANCE


def test_the_age_of_weights_is_seen(pool: WorkerPool) -> None:
    """Checks the comparison itself: weights of another age give other results."""
    for case in (Case("pipedream", 2, 4), Case("2bw", 2, 4)):
        found = pool.run(train, 2, case)
        every = case.microbatches if case.schedule == "2bw" else 1
        newest = lambda stage, step, microbatch, m=case.microbatches, n=every: (step * m + microbatch) // n  # noqa: E731
        assert off_by(found, case, newest) > 100 * TOLERANCE


def resume(ctx: RankContext, directory: str, case: Case) -> list[Any]:
    """Return weights and losses of two steps, saved, and two more.

    And of the latter two after loading into the same engine, into another one, and into a synchronous one that takes
    only the first of them.
    """
    engine = engine_of(case.config(), tiny_llama(layers=case.layers))
    advance(engine, range(2))
    engine.save_checkpoint(directory)
    saved = whole_weights(engine)
    found: list[Any] = [saved, advance(engine, range(2, 4))[0]]
    engine.load_checkpoint(directory)
    loaded = whole_weights(engine)
    found += [loaded, advance(engine, range(2, 4))[0], engine.held_bytes()]
    engine.destroy()
    for schedule, steps in ((case.schedule, 2), ("1f1b", 1)):
        config = case.config(pipeline={"stages": case.stages, "schedule": schedule})
        other = engine_of(config, tiny_llama(layers=case.layers, seed=1))
        other.load_checkpoint(directory)
        found += [advance(other, range(2, 2 + steps))[0], other.held_bytes()]
        other.destroy()
    return found


def test_a_checkpoint_has_the_newest_weights(pool: WorkerPool, tmp_path: Path) -> None:
    """A load resets the delay: the first step after it uses the loaded weights, like a synchronous one."""
    for rank in pool.run(resume, 2, str(tmp_path), Case("2bw", 2, 4)):
        saved, went_on, loaded, again, held, elsewhere, _, synchronous, alone = rank
        assert all(torch.equal(saved[name], weight) for name, weight in loaded.items())
        assert again == elsewhere and again[:1] == synchronous
        assert abs(went_on[0] / again[0] - 1) > 1e-3
        assert held["parameters"] == 2 * alone["parameters"]  # between steps, too


def evaluate(ctx: RankContext, name: str) -> tuple[float, float, int]:
    """Return the loss of one microbatch: in stages after two steps, and in a model with the newest weights."""
    case = Case(name, 2, 4)
    engine = engine_of(case.config(), tiny_llama(layers=case.layers))
    advance(engine, range(2))
    model, ids = tiny_llama(layers=case.layers), batch(9, 2)
    model.load_state_dict(whole_weights(engine))
    if name == "2bw":  # which has older ones in use, until the step
        engine.run_microbatches([{"input_ids": ids, "labels": ids}] * 4, [0.25] * 4)
        engine.abandon_step()
    rows = iter([{"input_ids": ids, "labels": ids}])
    loss = engine.eval_batch(rows if engine.is_first_stage() else None, num_micro_batches=1)
    steps = engine.global_steps
    engine.destroy()
    return float(loss), float(model(input_ids=ids, labels=ids).loss), steps


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_evaluations_take_the_newest_weights(pool: WorkerPool, name: str) -> None:
    """This includes fewer microbatches than stages."""
    for got, want, steps in pool.run(evaluate, 2, name):
        assert got == pytest.approx(want, rel=1e-5) and steps == 2


def bf16(ctx: RankContext, name: str) -> tuple[list[float], list[float], dict[str, int], int]:
    """Return the losses in bf16 and in fp32 with the same delay, the bytes held in bf16, and the number of versions."""
    case = Case(name, 2, 4)
    section = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.003}}}
    losses = []
    for sections in (schedule, {**schedule, **section}):
        engine = engine_of(case.config(**sections), tiny_llama(layers=case.layers))
        losses.append(advance(engine, range(STEPS))[0])
        assert (
            engine.lr_scheduler.last_batch_iteration == STEPS - 1
        )  # once a step, however many updates it has
        held, versions = engine.held_bytes(), engine.versions.most
        engine.destroy()
    return losses[0], losses[1], held, versions


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_older_weights_have_the_dtype_of_the_model(pool: WorkerPool, name: str) -> None:
    for fp32, low, held, versions in pool.run(bf16, 2, name):
        assert low == pytest.approx(fp32, rel=5e-3) and low != fp32
        kept = versions if name == "2bw" else 1  # with pipedream older ones are kept inside of a step only
        assert held["parameters"] == kept * held["master"] // 2


def refused(ctx: RankContext, pipeline: dict[str, Any], tied: bool) -> str:
    config = Case("pipedream", 2, 4).config(pipeline=pipeline)
    with pytest.raises(ConfigError) as error:
        engine_of(config, tiny_llama(tied))
    return str(error.value)


def test_what_is_refused_for_a_model(pool: WorkerPool) -> None:
    (text, _) = pool.run(refused, 2, {"stages": 2, "schedule": "pipedream"}, True)
    assert "model.embed_tokens.weight is on several stages" in text and "would diverge" in text
    for name in ("pipedream", "2bw"):
        (text,) = pool.run(refused, 1, {"schedule": name}, False)
        assert "needs at least two pipeline stages" in text


def printed(ctx: RankContext, schedule: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        engine_of(Case(schedule, 2, 4).config(), tiny_llama()).destroy()
    return out.getvalue()


def test_a_run_says_that_it_is_not_synchronous(pool: WorkerPool) -> None:
    for name in ("pipedream", "2bw"):
        first, second = pool.run(printed, 2, name)
        assert f"{name}: NOT equal to training in one process" in first and "NOT" not in second
    assert "NOT" not in pool.run(printed, 2, "1f1b")[0]
