"""The keys for batch, clipping and printed line, each with two values and their effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.driving import advance_one, config_of, engine_of, microbatches, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import points

TRIPLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def steps_taken(ctx: RankContext, keys: dict[str, int]) -> tuple[int, int, int, list[int]]:
    """Return the engine's batch sizes, and after which of 8 microbatches it stepped."""
    engine = engine_of(config_of(2, 1, **{key: keys.get(key) for key in TRIPLE}))
    x, y = points(0, engine.train_micro_batch_size_per_gpu())
    stepped = []
    for microbatch in range(8):
        engine.backward(engine(x, y))
        engine.step()
        if engine.was_step_applied():
            stepped.append(microbatch)
    return engine.train_batch_size(), len(x), engine.gradient_accumulation_steps(), stepped


@pytest.mark.key("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ((8, None, None), (8, 4, 1, [0, 1, 2, 3, 4, 5, 6, 7])),
        ((16, None, 2), (16, 4, 2, [1, 3, 5, 7])),
        ((None, 2, 4), (16, 2, 4, [3, 7])),
        ((16, 1, None), (16, 1, 8, [7])),
    ],
)
def test_any_two_of_the_three_say_when_a_step_is_due(
    pool: WorkerPool, keys: tuple[Any, ...], found: tuple[Any, ...]
) -> None:
    given = {key: value for key, value in zip(TRIPLE, keys, strict=True) if value is not None}
    assert pool.run(steps_taken, 2, given) == [found] * 2


def moved(ctx: RankContext, clip: float) -> tuple[float, torch.Tensor]:
    """Return the norm before clipping, and the distance of an SGD step with learning rate 1."""
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    engine = engine_of(config_of(2, gradient_clipping=clip, optimizer=sgd))
    before = whole_weights(engine)
    x, y = points(0, 8)
    advance_one(engine, [(x, y)])
    after = whole_weights(engine)
    squares = [(after[name] - before[name]).double().square().sum() for name in before]
    return engine.get_global_grad_norm(), torch.stack(squares).sum().sqrt()


@pytest.mark.key("gradient_clipping")
def test_the_step_is_as_long_as_clipping_lets_it_be(pool: WorkerPool) -> None:
    norm, length = pool.run(moved, 2, 0.0)[0]
    assert float(length) == pytest.approx(norm, rel=1e-5)
    for clip in (0.5 * norm, 0.1 * norm):
        again, length = pool.run(moved, 2, clip)[0]
        assert again == pytest.approx(norm, rel=1e-6)
        assert float(length) == pytest.approx(clip, rel=1e-4)


@pytest.mark.key("steps_per_print")
@pytest.mark.parametrize(("every", "lines"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (float("inf"), []), (None, [])])
def test_a_line_every_so_many_steps(pool: WorkerPool, every: Any, lines: list[int]) -> None:
    printed = pool.run(printed_lines, 1, every)[0]
    assert [int(line.split(",")[0].removeprefix("step=")) for line in printed] == lines
    assert all("lr=[0.01]" in line for line in printed)


@pytest.mark.parametrize(("every", "lines"), [(2, [2, 4]), (None, [])])
def test_train_batch_prints_its_loss(pool: WorkerPool, every: Any, lines: list[int]) -> None:
    """DeepSpeed's pipeline engine prints it in addition to the line of every engine."""
    first, second = pool.run(printed_batches, 2, every)
    assert [line for line in second if line.startswith("steps:")] == []
    said = [line.split() for line in first if line.startswith("steps: ")]
    losses = [float(line.removeprefix("loss ")) for line in first if line.startswith("loss ")]
    assert [int(words[1]) for words in said] == lines
    for words, step in zip(said, lines, strict=True):
        assert words[2:4] == ["loss:", f"{losses[step - 1]:.4f}"]
        assert words[4:7] == ["iter", "time", "(s):"] and float(words[7]) > 0
        assert words[8] == "samples/sec:" and float(words[9]) > 0


def printed_batches(ctx: RankContext, every: Any) -> list[str]:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        engine = engine_of(config_of(1, steps_per_print=every))
        for step in range(4):
            loss = engine.train_batch(iter(microbatches(ctx, step)))
            print(f"loss {float(loss):.10f}")
    return out.getvalue().splitlines()


def printed_lines(ctx: RankContext, every: Any) -> list[str]:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        engine = engine_of(config_of(1, steps_per_print=every))
        for step in range(4):
            advance_one(engine, [points(step, 8)])
    return [line for line in out.getvalue().splitlines() if line.startswith("step=")]
