"""Minor training keys of the JSON: who counts microbatches, messages, and data loading."""

from __future__ import annotations

import gc
import io
import logging
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stdout
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.errors import ConfigError, MisplacedCallError
from tests.engine.driving import ROWS, STAGES, advance, config_of, engine_of, microbatches, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.zero.models import points

STEPS = 3
SAMPLING = "data_efficiency.data_sampling"

# ---- managed_gradient_accumulation ----------------------------------------------------------


def run_of(
    ctx: RankContext, stage: int, managed: bool, sync: bool = True
) -> tuple[list[float], dict[str, Tensor], tuple[int, int, int]]:
    """Train two microbatches per step; return losses, weights, (global steps, samples, schedule steps)."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    engine = engine_of(config_of(stage, 2, managed_gradient_accumulation=managed, scheduler=schedule))
    losses = []
    for step in range(STEPS):
        with nullcontext() if sync else engine.no_sync():
            for part in microbatches(ctx, step, 2):
                losses.append(float(engine.backward(engine(*part))))
                if managed:
                    engine.step()
        if not managed:
            engine.step()
            assert engine.was_step_applied()
    counters = (engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration)
    return losses, whole_weights(engine), counters


@pytest.mark.key("managed_gradient_accumulation")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("sync", [True, False])
def test_the_caller_decides_when_to_step(pool: WorkerPool, stage: int, sync: bool) -> None:
    counted = pool.run(run_of, 2, stage, True)[0]
    for rank, (losses, weights, counters) in enumerate(pool.run(run_of, 2, stage, False, sync)):
        if rank == 0:
            assert losses == pytest.approx(counted[0], rel=1e-6)
        assert counters == counted[2] == (STEPS, STEPS * ROWS, STEPS - 1)
        for name, value in counted[1].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def uneven(ctx: RankContext) -> list[int]:
    """Step after one, two and three microbatches; the JSON sets two."""
    engine = engine_of(config_of(1, 2, managed_gradient_accumulation=False))
    assert not engine.is_gradient_accumulation_boundary()
    with pytest.raises(MisplacedCallError, match="every step"):
        engine.set_gradient_accumulation_boundary(True)
    samples = []
    for count in (1, 2, 3):
        for part in (microbatches(ctx, count, 2) * 2)[:count]:
            engine.backward(engine(*part))
        engine.step()
        samples.append(engine.global_samples)
    return [*samples, engine.global_steps]


@pytest.mark.key("managed_gradient_accumulation")
def test_any_number_of_microbatches_is_a_step(pool: WorkerPool) -> None:
    assert pool.run(uneven, 2)[0] == [4, 12, 24, 3]


def whole_batches(ctx: RankContext, managed: bool) -> tuple[float, int]:
    engine = engine_of(config_of(2, 2, managed_gradient_accumulation=managed))
    return float(engine.train_batch(iter(microbatches(ctx, 0, 2)))), engine.global_steps


def test_train_batch_is_one_step_either_way(pool: WorkerPool) -> None:
    assert pool.run(whole_batches, 2, True) == pool.run(whole_batches, 2, False)


# ---- what is said ---------------------------------------------------------------------------


def printed(ctx: RankContext, sections: dict[str, Any], steps: int = 4) -> str:
    out = io.StringIO()
    level = logging.getLogger("launcher").level
    with redirect_stdout(out):
        engine = engine_of(config_of(1, **sections))
        advance(engine, ctx, range(steps))
        logging.getLogger("launcher.data.pack").info("packing")
    logging.getLogger("launcher").setLevel(level)
    return out.getvalue()


@pytest.mark.key("log_level")
def test_log_level_silences_the_step_lines(pool: WorkerPool) -> None:
    said = [
        pool.run(printed, 1, {"steps_per_print": 2, "log_level": level})[0] for level in ("info", "warning")
    ]
    assert "step=2," in said[0] and "step=4," in said[0]
    assert said[0].endswith("launcher.data.pack: packing\n")  # what other packages log is heard, too
    assert said[1] == ""


@pytest.mark.key("timers", "timers.throughput", "timers.throughput.enabled", "timers.throughput.synchronized")
def test_samples_per_second_are_printed(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    on = pool.run(printed, 1, {"steps_per_print": 2})[0]
    assert (
        on.count("samples/s: ") == 2 and on.count(", mean ") == 1
    )  # the first two steps are not in the mean
    off = pool.run(printed, 1, {"steps_per_print": 2, "timers": {"throughput": {"enabled": False}}})[0]
    assert "samples/s" not in off and off.count("step=") == 2
    assert "samples/s" not in pool.run(printed, 1, {})[0]

    from launcher.monitor.throughput import Throughput

    waits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    for synchronized in (True, False):
        timer = Throughput(enabled=True, synchronized=synchronized, device=torch.device("cuda"))
        timer.start()
        timer.stop(8)
    assert len(waits) == 2


def test_samples_per_second_are_of_the_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.monitor import throughput

    clock = iter([0.0, 100.0, 200.0, 300.0, 400.0, 402.0, 500.0, 504.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    timer = throughput.Throughput(enabled=True, synchronized=True, device=torch.device("cpu"))
    for _ in range(4):
        timer.start()
        timer.stop(8)
        timer.update_epoch_count()
    assert timer.line() == "samples/s: 2.00, mean 2.67"
    assert timer.avg_samples_per_sec() == pytest.approx(16 / 6)
    assert (timer.global_step_count, timer.epoch_count) == (4, 4)


@pytest.mark.key("dump_state")
def test_the_state_is_dumped_once(pool: WorkerPool) -> None:
    first, second = pool.run(printed, 2, {"dump_state": True}, 1)
    for words in (
        "engine of Stack at ZeRO stage 1",
        "flat buffer",
        "param group    AdamW",
        '"train_batch_size": 8',
    ):
        assert first.count(words) >= 1, words
    assert first.count("engine of Stack") == 1 and second == ""
    assert pool.run(printed, 2, {}, 1) == ["", ""]


# ---- garbage --------------------------------------------------------------------------------


def collector(ctx: RankContext) -> list[bool]:
    """Return whether the collector is enabled: without the key, with one engine, with two, after each is destroyed."""
    on = [gc.isenabled()]
    first, second = (engine_of(config_of(0, disable_python_gc=True)) for _ in range(2))
    on.append(gc.isenabled())
    ring: list[Any] = []
    ring.append(ring)
    del ring
    assert first.collect_python_gc() > 0
    first.destroy()
    first.destroy()
    on.append(gc.isenabled())
    second.destroy()
    return [*on, gc.isenabled()]


@pytest.mark.key("disable_python_gc")
def test_the_collector_is_off_while_an_engine_wants_it(pool: WorkerPool) -> None:
    assert pool.run(collector, 1)[0] == [True, False, False, True]


# ---- data -----------------------------------------------------------------------------------


class Rows:
    """Row i is point i, with the id of the process that read it."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int, int]:
        worker = torch.utils.data.get_worker_info()
        x, y = points(index, 1)
        return x[0], y[0], index, -1 if worker is None else worker.id


def dealt(ctx: RankContext, sections: dict[str, Any]) -> list[tuple[list[int], set[int]]]:
    """Return (rows, workers) of every batch of an epoch."""
    _, _, loader, _ = initialized(sections)
    return [(rows.tolist(), set(workers.tolist())) for _, _, rows, workers in loader]


def initialized(sections: dict[str, Any]) -> Iterable[Any]:
    import launcher
    from tests.zero.models import stack

    return launcher.initialize(
        model=stack(), config=config_of(0, **sections), training_data=Rows(), device=DEVICE
    )


@pytest.mark.key("dataloader_drop_last")
def test_a_short_last_batch_is_dropped_when_asked(pool: WorkerPool) -> None:
    sizes = [
        [len(rows) for rows, _ in pool.run(dealt, 2, {"dataloader_drop_last": drop})[0]]
        for drop in (False, True)
    ]
    assert sizes == [[4, 4, 2], [4, 4]]


def sampling(seed: int = 1234, **keys: Any) -> dict[str, Any]:
    return {"data_efficiency": {"enabled": True, "seed": seed, "data_sampling": {"enabled": True, **keys}}}


@pytest.mark.key("data_efficiency.seed")
def test_the_seed_orders_the_data(pool: WorkerPool) -> None:
    orders = [pool.run(dealt, 1, sampling(seed))[0] for seed in (1234, 1234, 7)]
    assert orders[0] == orders[1] != orders[2]
    assert [sorted(row for rows, _ in order for row in rows) for order in orders] == [list(range(20))] * 3


@pytest.mark.key(f"{SAMPLING}.num_workers")
def test_workers_load_the_data(pool: WorkerPool) -> None:
    plain, helped = (pool.run(dealt, 1, sampling(num_workers=count))[0] for count in (0, 2))
    assert [rows for rows, _ in plain] == [rows for rows, _ in helped]
    assert set().union(*(workers for _, workers in plain)) == {-1}
    assert set().union(*(workers for _, workers in helped)) == {0, 1}


def pinned(ctx: RankContext) -> list[bool]:
    return [list(initialized(sampling(pin_memory=pin)))[2].pin_memory for pin in (False, True)]


@pytest.mark.key(f"{SAMPLING}.pin_memory")
def test_batches_are_pinned(pool: WorkerPool) -> None:
    assert pool.run(pinned, 1)[0] == [False, True]


def epochs(ctx: RankContext, count: int) -> int:
    """Return the number of steps until the data ends."""
    engine, *_ = initialized(sampling(num_epochs=count))
    engine.set_batch_fn(lambda batch: batch[:2])
    with pytest.raises(ConfigError, match="num_epochs"):
        while True:
            engine.train_batch()
    return int(engine.global_steps)


@pytest.mark.key(f"{SAMPLING}.num_epochs")
def test_the_data_is_over_after_so_many_passes(pool: WorkerPool) -> None:
    assert [pool.run(epochs, 1, count)[0] for count in (1, 2)] == [3, 6]
