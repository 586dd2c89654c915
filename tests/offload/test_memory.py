"""With everything on NVMe, memory depends on the largest unit and not on the number of units."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from launcher.offload.offloaded import OffloadedSlice, PrefetchWindow
from tests.engine.driving import advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

NVME = {"device": "nvme"}


def json_of(directory: Path, **sections: Any) -> dict[str, Any]:
    config = config_of(3, 2, **sections)
    place = NVME | {"nvme_path": str(directory)}
    config["zero_optimization"] |= {
        "offload_param": place | {"max_in_cpu": 0, "buffer_count": 2},
        "offload_optimizer": place | {"buffer_count": 2},
    }
    return config


def most_in_use(ctx: RankContext, config: dict[str, Any], depth: int) -> tuple[int, int]:
    """Return the peak bytes of buffers in use at once, and the bytes of all buffers after some steps."""
    engine = engine_of(config, stack(width=64, depth=depth))
    advance(engine, ctx, range(3))
    engine.zero.placements.buffers.wait_for_writes()
    idle = engine.zero.placements.buffers.idle
    found = idle.most, idle.nbytes
    engine.destroy()
    return found


def test_a_deeper_model_needs_no_more_buffers(pool: WorkerPool, tmp_path: Path) -> None:
    few, many = (pool.run(most_in_use, 2, json_of(tmp_path), depth)[0] for depth in (8, 24))
    assert max(many) <= 1.2 * max(few), "three times the blocks"
    assert few[1] <= few[0]


def first_states(ctx: RankContext, config: dict[str, Any]) -> int:
    """Return the bytes of states that were allocated outside of the memory that is written to NVMe."""
    engine = engine_of(config, stack())
    made: list[int] = []
    real = torch.zeros_like

    def counting(tensor: torch.Tensor, **keywords: Any) -> torch.Tensor:
        made.append(tensor.numel())
        return real(tensor, **keywords)

    with patch.object(torch, "zeros_like", counting):
        advance(engine, ctx, range(1))
    engine.destroy()
    return sum(made)


def test_states_are_made_in_the_memory_that_goes_to_nvme(pool: WorkerPool, tmp_path: Path) -> None:
    """Otherwise the first step leaves malloc with as much memory as all states."""
    assert pool.run(first_states, 1, json_of(tmp_path))[0] == 0
    assert pool.run(first_states, 1, config_of(3))[0] == 0


def checkpointed(ctx: RankContext, config: dict[str, Any], depth: int, directory: str) -> tuple[int, int]:
    """Return the peak bytes while a checkpoint was written and read, and the bytes of its contents."""
    engine = engine_of(config, stack(width=64, depth=depth))
    advance(engine, ctx, range(1))
    engine.zero.placements.buffers.wait_for_writes()
    held: list[int] = []
    real = PrefetchWindow.load

    def watching(window: PrefetchWindow, part: OffloadedSlice) -> torch.Tensor:
        found = real(window, part)
        held.append(sum(engine.held_bytes().values()))
        return found

    with patch.object(PrefetchWindow, "load", watching):
        engine.save_checkpoint(directory)
        engine.load_checkpoint(directory)
    engine.destroy()
    return max(held), sum(3 * 4 * slot.numel for slot in engine.zero.slots.values())


def test_checkpoints_bring_in_a_few_tensors_at_a_time(pool: WorkerPool, tmp_path: Path) -> None:
    config = json_of(tmp_path)
    found = [pool.run(checkpointed, 2, config, depth, str(tmp_path / f"{depth}"))[0] for depth in (6, 18)]
    assert found[0][0] == found[1][0], "three times the blocks"
    assert found[1][0] < found[1][1] / 2 / 4, "of all that a rank has"
