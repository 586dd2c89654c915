"""Microbatches: accumulation boundaries, counters, and whole batches."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from launcher.errors import ConfigError, LauncherError, MisplacedCallError
from tests.engine.driving import (
    LR,
    ROWS,
    STAGES,
    advance,
    config_of,
    engine_of,
    microbatches,
    truth,
    whole_weights,
)
from tests.pool import RankContext, WorkerPool
from tests.zero.models import points, stack

STEPS = 4
Counts = list[tuple[int, int, int, bool]]


def counted(ctx: RankContext, stage: int, explicit: bool) -> tuple[list[float], dict[str, Tensor], Counts]:
    """Run two microbatches per step; return micro_steps, global_steps, global_samples and applied after each."""
    engine = engine_of(
        config_of(stage, 1 if explicit else 2, train_batch_size=ROWS // 2 if explicit else ROWS)
    )
    losses, counts = [], []
    for step in range(STEPS):
        parts = microbatches(ctx, step, 2)
        for index, part in enumerate(parts):
            if explicit:
                engine.set_gradient_accumulation_boundary(index == 1)
            assert engine.is_gradient_accumulation_boundary() == (index == 1)
            loss = engine(*part)
            assert float(engine.backward(loss / 2 if explicit else loss)) == float(loss) / 2
            losses.append(float(loss))
            engine.step()
            applied = engine.was_step_applied()
            counts.append((engine.micro_steps, engine.global_steps, engine.global_samples, applied))
    return losses, whole_weights(engine), counts


@pytest.mark.parametrize("stage", STAGES)
def test_counters(pool: WorkerPool, stage: int) -> None:
    _, _, counts = pool.run(counted, 2, stage, False)[0]
    assert counts[:4] == [(1, 0, 0, False), (2, 1, 8, True), (3, 1, 8, False), (4, 2, 16, True)]


@pytest.mark.parametrize("stage", STAGES)
def test_explicit_boundaries_give_the_same_numbers(pool: WorkerPool, stage: int) -> None:
    """The JSON sets one microbatch per step; the caller takes two, and weights their losses."""
    counting, explicit = (pool.run(counted, 2, stage, by_hand)[0] for by_hand in (False, True))
    assert explicit[0] == counting[0]
    for name, value in counting[1].items():
        assert torch.equal(explicit[1][name], value), name
    assert [c[:2] for c in explicit[2]] == [c[:2] for c in counting[2]]


def step_in_no_sync(ctx: RankContext, stage: int) -> tuple[list[float], list[float]]:
    """A step at a boundary is refused and not counted; outside of no_sync() it succeeds."""
    engine = engine_of(config_of(stage, 2))
    first, second = microbatches(ctx, 0, 2)
    with engine.no_sync():
        engine.backward(engine(*first))
        engine.step()  # no boundary yet
        with pytest.raises(LauncherError, match="call it outside no_sync"):
            engine.step()
        assert (engine.micro_steps, engine.global_steps) == (1, 0)
    engine.backward(engine(*second))
    engine.step()
    assert engine.was_step_applied()
    return advance(engine, ctx, range(1, STEPS)), advance(engine_of(config_of(stage, 2)), ctx, range(STEPS))[
        1:
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_step_inside_no_sync(pool: WorkerPool, stage: int) -> None:
    got, want = pool.run(step_in_no_sync, 2, stage)[0]
    assert got == pytest.approx(want, rel=1e-5)


def scaled_by_hand(ctx: RankContext, stage: int, fp16: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights after two steps that alternate `engine.backward(loss)` and `engine.scale(loss).backward()`."""
    section = {"fp16": {"enabled": True, "loss_scale": 64}} if fp16 else {}
    plain, by_turns = engines = [engine_of(config_of(stage, 2, **section)) for _ in range(2)]
    for step in range(2):
        for index, part in enumerate(microbatches(ctx, step, 2)):
            for engine in engines:
                loss = engine(*(value.half() if fp16 else value for value in part))
                if engine is by_turns and index == 0:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
                engine.step()
    for other in (torch.ones(2, requires_grad=True) * 2, torch.ones(())):
        with pytest.raises(MisplacedCallError, match="scalar tensor"):
            plain.scale(other)
    return whole_weights(plain), whole_weights(by_turns)


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_the_engine_scales_has_a_backward_of_its_own(
    pool: WorkerPool, stage: int, fp16: bool
) -> None:
    plain, by_hand = pool.run(scaled_by_hand, 2, stage, fp16)[0]
    assert all(torch.equal(by_hand[name], value) for name, value in plain.items())


def coalesced(ctx: RankContext, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Return the weights after two steps of two backwards each, with and without `coalesce_grad_reduction`, and the
    reductions of each backward and of the end of the `with`.
    """
    plain, engine = (engine_of(config_of(stage, 2)) for _ in range(2))
    advance(plain, ctx, range(2))
    reductions: list[int] = []
    reduce = engine.zero.reducer._reduce
    engine.zero.reducer._reduce = lambda *given: (reductions.append(1), reduce(*given))[1]  # type: ignore[method-assign]
    counts = []
    for step in range(2):
        with engine.coalesce_grad_reduction():
            for index, part in enumerate(microbatches(ctx, step, 2)):
                engine.set_gradient_accumulation_boundary(index == 1)
                engine.backward(engine(*part))
                counts.append(len(reductions))
            for nested in (engine.coalesce_grad_reduction, engine.no_sync):
                with pytest.raises(MisplacedCallError, match="nested"), nested():
                    pass
            with pytest.raises(AssertionError, match="no_sync"):
                engine.step()
        counts.append(len(reductions))
        reductions.clear()
        engine.step()
        assert engine.was_step_applied() and not reductions
    return whole_weights(plain), whole_weights(engine), counts


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_several_backwards_are_reduced_together(pool: WorkerPool, stage: int) -> None:
    plain, together, counts = pool.run(coalesced, 2, stage)[0]
    for name, value in plain.items():
        assert torch.allclose(together[name], value, rtol=1e-5, atol=1e-7), name
    assert [count > 0 for count in counts] == [False, False, True] * 2


def weighted(ctx: RankContext, stage: int) -> list[float]:
    """Train microbatches of 1 and 3 rows, weighted by the caller."""
    engine = engine_of(config_of(stage, 2))
    losses = []
    for step in range(STEPS):
        ((x, y),) = microbatches(ctx, step)
        total = torch.zeros((), dtype=torch.float64)
        for rows in (slice(0, 1), slice(1, 4)):
            loss = engine(x[rows], y[rows]) * (rows.stop - rows.start) / 4
            total += engine.backward(loss, scale_wrt_gas=False).double().cpu()
            engine.step()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / ctx.world)
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_losses_that_the_caller_weights(pool: WorkerPool, stage: int) -> None:
    model = stack()
    want = truth(torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1), model, range(STEPS))
    assert pool.run(weighted, 2, stage)[0] == pytest.approx(want, rel=1e-5)


# ---- whole batches ------------------------------------------------------------------------------


def whole_batches(ctx: RankContext, stage: int) -> tuple[list[float], list[float], list[float]]:
    """Train with train_batch and with a manual loop, with eval_batch between the steps of the first."""

    def stream(steps: range, form: type) -> Iterator[Any]:
        for step in steps:
            for x, y in microbatches(ctx, step, 2):
                yield {"x": x, "y": y} if form is dict else form((x, y))

    engine, by_hand = engine_of(config_of(stage, 2)), engine_of(config_of(stage, 2))
    data, held_out = stream(range(STEPS), dict), stream(range(90, 90 + STEPS), tuple)
    losses, evaluated = [], []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(data)))
        engine.eval()
        evaluated.append(float(engine.eval_batch(held_out)))
        assert not engine.training and not engine.module.training  # as it was
    for name, value in whole_weights(engine).items():
        assert value.grad_fn is None, name
    return losses, advance(by_hand, ctx, range(STEPS)), evaluated


@pytest.mark.parametrize("stage", STAGES)
def test_whole_batches_are_the_loop(pool: WorkerPool, stage: int) -> None:
    """Compares the mean over microbatches and ranks, with and without gradients."""
    model, ranks = stack(), pool.run(whole_batches, 2, stage)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    want = []
    for step in range(STEPS):
        truth(adamw, model, [step], 4)
        want.append(float(model(*points(90 + step)).detach()))
    for trained, by_hand, evaluated in ranks:
        assert trained == pytest.approx(by_hand, rel=1e-6)
        assert evaluated == pytest.approx(want, rel=1e-5)


def ended_data(ctx: RankContext, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[int, int]]:
    """Return the weights after a full step, with and without a preceding step whose data ended in the middle."""
    weights = []
    for ends in (False, True):
        engine = engine_of(config_of(stage, 2))
        if ends:
            with pytest.raises(StopIteration):
                engine.train_batch(iter(microbatches(ctx, 7, 2)[:1]))
        engine.train_batch(iter(microbatches(ctx, 0, 2)))
        weights.append(whole_weights(engine))
    return *weights, (engine.global_steps, engine.micro_steps)


@pytest.mark.parametrize("stage", STAGES)
def test_data_that_ends_within_a_step(pool: WorkerPool, stage: int) -> None:
    """The incomplete step's data is excluded from the next step."""
    for want, found, counts in pool.run(ended_data, 2, stage):
        assert all(torch.equal(want[name], found[name]) for name in want)
        assert counts == (1, 2)


class Hooked(torch.nn.Module):
    """A wrapper that scripts assign to `engine.module`."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args: Any) -> Any:
        self.calls += 1
        return self.inner(*args)


def called_through(ctx: RankContext) -> list[int]:
    engine = engine_of(config_of(2, 2))
    engine.module = Hooked(engine.module)
    calls = []
    for step in (
        lambda: engine(*microbatches(ctx, 0, 2)[0]),
        lambda: engine.train_batch(iter(microbatches(ctx, 0, 2))),
        lambda: engine.eval_batch(iter(microbatches(ctx, 0, 2))),
    ):
        step()
        calls.append(engine.module.calls)
    return calls


def test_whole_batches_call_the_module_that_the_engine_has(pool: WorkerPool) -> None:
    assert pool.run(called_through, 1)[0] == [1, 3, 5]


def evaluated_after_destroy(ctx: RankContext) -> None:
    engine = engine_of(config_of(3, 2))
    engine.destroy()
    parts = microbatches(ctx, 0, 2)
    with pytest.raises(LauncherError, match="has been destroyed"):
        engine.eval_batch(iter(parts))
    with pytest.raises(LauncherError, match="has been destroyed"):
        engine.eval_microbatches(parts, [0.5, 0.5])


def test_a_destroyed_engine_evaluates_nothing(pool: WorkerPool) -> None:
    pool.run(evaluated_after_destroy, 1)


class Outputs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        scores = self.layer(x)[:, 0]
        return scores if y is None else {"loss": (scores - y).square().mean(), "logits": scores}


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def batches_of_other_kinds(ctx: RankContext) -> list[Any]:
    x, y = microbatches(ctx, 0, 2)[0]
    engine = engine_of(config_of(0, 2), Outputs())
    losses = [
        float(engine.eval_batch(iter([batch] * 2)))
        for batch in ({"x": x, "y": y}, UserDict(x=x, y=y), (x, y), [x, y], Pair(x, y))
    ]
    scores = [
        engine.eval_batch(iter([batch] * 2), compute_loss=False, reduce_output=None)[0].tolist()
        for batch in ((x, y), Pair(x, y))
    ]
    with pytest.raises(ConfigError, match=r"a tensor of shape \(4,\) in place of a scalar loss"):
        engine.train_batch(iter([(x,)] * 2))
    return [losses, scores]


def test_batches_of_other_kinds(pool: WorkerPool) -> None:
    """Covers a mapping that is no dict, as from Hugging Face's collators; a named tuple; outputs without a loss."""
    losses, scores = pool.run(batches_of_other_kinds, 1)[0]
    assert len(set(losses)) == 1
    assert scores[0] == scores[1]


def dealt(ctx: RankContext, rows: int, batches: int) -> list[list[float]]:
    """Return the rows that train_batch reads from a data set, per call; x of each row is its index."""
    engine = engine_of(
        config_of(2, 2), Seeing(), training_data=[(torch.full((4,), float(i)), i) for i in range(rows)]
    )
    seen = []
    for _ in range(batches):
        engine.module.seen.clear()
        engine.train_batch()
        seen.append(list(engine.module.seen))
    return seen


class Seeing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 1), []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += x[:, 0].int().tolist()
        return self.layer(x).mean()


def test_a_data_set_is_dealt_out_anew_every_epoch(pool: WorkerPool) -> None:
    """Sixteen rows, four per rank and batch: an epoch is two batches; every row occurs once, in a new order."""
    first, second = pool.run(dealt, 2, 16, 4)
    epochs = [[*first[i], *first[i + 1], *second[i], *second[i + 1]] for i in (0, 2)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(16))
    assert epochs[0] != epochs[1]
    assert [len(batch) for batch in first] == [4, 4, 4, 4]


def resize(ctx: RankContext, stage: int) -> tuple[list[float], list[tuple[int, int]]]:
    engine = engine_of(config_of(stage, train_batch_size=ROWS // 2))
    assert engine.train_micro_batch_size_per_gpu() == 2
    sizes = []
    for wrong in (ROWS + 1, 2, 0):
        with pytest.raises(ConfigError, match="not a multiple of 4"):
            engine.set_train_batch_size(wrong)
    losses = []
    for step in range(STEPS):
        if step == 1:
            engine.set_train_batch_size(ROWS)
        x, y = points(step, engine.train_batch_size())
        accumulation = engine.gradient_accumulation_steps()
        parts = zip(x.chunk(2 * accumulation), y.chunk(2 * accumulation), strict=True)
        total = torch.zeros((), dtype=torch.float64)
        for part in list(parts)[ctx.rank :: 2]:
            total += engine.backward(engine(*part)).double().cpu()
            engine.step()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / 2)
        sizes.append((accumulation, engine.global_samples))
    assert engine.config["train_batch_size"] == ROWS
    return losses, sizes


@pytest.mark.parametrize("stage", STAGES)
def test_set_train_batch_size(pool: WorkerPool, stage: int) -> None:
    """The first step has four rows, the others eight."""
    losses, sizes = pool.run(resize, 2, stage)[0]
    model = stack()
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    want = []
    for step in range(STEPS):
        loss = model(*points(step, ROWS // 2 if step == 0 else ROWS))
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        want.append(loss.item())
    assert losses == pytest.approx(want, rel=1e-5)
    assert sizes == [(1, 4), (2, 12), (2, 20), (2, 28)]  # microbatches of a step, and rows so far


def whole_step_without_a_boundary(ctx: RankContext) -> list[float]:
    engine = engine_of(config_of(1, 2))
    engine.set_gradient_accumulation_boundary(False)
    data = iter(microbatches(ctx, 0, 2))
    with pytest.raises(LauncherError, match="runs a whole step"):
        engine.train_batch(data)
    assert engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(True)
    return [float(engine.train_batch(data))]


def test_a_whole_step_without_a_boundary_is_refused(pool: WorkerPool) -> None:
    pool.run(whole_step_without_a_boundary, 2)


def fewer_microbatches(ctx: RankContext) -> tuple[float, int, bool]:
    engine = engine_of(config_of(1, 4))
    loss = engine.run_microbatches(microbatches(ctx, 0, 2), [0.5, 0.5])
    engine.step()
    return loss, engine.global_steps, engine.was_step_applied()


def test_a_step_of_fewer_microbatches_is_a_step(pool: WorkerPool) -> None:
    _, steps, applied = pool.run(fewer_microbatches, 2)[0]
    assert (steps, applied) == (1, True)


def save_in_the_middle(ctx: RankContext, stage: int, directory: Path) -> None:
    """A checkpoint between boundaries contains the last full step, without gradients accumulated since."""
    engine = engine_of(config_of(stage, 2))
    advance(engine, ctx, [0])
    engine.save_checkpoint(directory, "boundary")
    want = advance(engine, ctx, [1, 2])
    for tag in ("boundary", "middle"):
        engine.load_checkpoint(directory, "boundary")
        engine.backward(engine(*microbatches(ctx, 9, 2)[0]))
        engine.step()
        engine.save_checkpoint(directory, "middle")
        engine.load_checkpoint(directory, tag)
        assert not engine.is_gradient_accumulation_boundary()
        assert advance(engine, ctx, [1, 2]) == want


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_between_boundaries(pool: WorkerPool, stage: int, tmp_path: Path) -> None:
    pool.run(save_in_the_middle, 2, stage, tmp_path)


def by_hand(ctx: RankContext, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    """Call loss.backward() instead of engine.backward(loss)."""
    engine = engine_of(config_of(stage, 2))
    losses = []
    for step in range(STEPS):
        for part in microbatches(ctx, step, 2):
            loss = engine(*part)
            loss.backward()
            losses.append(loss.item())
            engine.step()
    return losses, whole_weights(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_backward_by_hand_gives_the_mean_too(pool: WorkerPool, stage: int) -> None:
    losses, weights, _ = pool.run(counted, 2, stage, False)[0]
    by_hand_losses, by_hand_weights = pool.run(by_hand, 2, stage)[0]
    assert by_hand_losses == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(by_hand_weights[name], weight, rtol=1e-5, atol=1e-6)


def without_a_weight(ctx: RankContext) -> str:
    engine = engine_of(config_of(1, 2))
    with pytest.raises(ConfigError) as error:
        engine.run_microbatches(microbatches(ctx, 0, 2), [1.0])
    return str(error.value)


def test_each_microbatch_has_a_weight(pool: WorkerPool) -> None:
    assert "2 microbatches but 1 weights" in pool.run(without_a_weight, 1)[0]
