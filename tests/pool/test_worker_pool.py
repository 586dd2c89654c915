"""The pool of ranks: results, default group, errors with their rank, hangs with stacks, and no rank left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankContext, RanksFailed, WorkerPool


def describe(ctx: RankContext, add: float, scale: float = 1.0) -> dict[str, object]:
    total = torch.tensor(add + ctx.rank)
    dist.all_reduce(total)
    return {
        "rank": ctx.rank,
        "env": (os.environ["RANK"], os.environ["WORLD_SIZE"]),
        "default": (dist.get_rank(), dist.get_world_size()),
        "group": dist.get_world_size(ctx.group),
        "total": total * scale,
        "random": torch.rand(1).item(),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_runs_on_a_default_group_of_the_asked_size(pool: WorkerPool, world: int) -> None:
    results = pool.run(describe, world, 10.0, scale=2.0)
    assert len(results) == world
    for rank, result in enumerate(results):
        assert result["rank"] == rank
        assert result["env"] == (str(rank), str(world))
        assert result["default"] == (rank, world)
        assert result["group"] == world
        assert result["total"] == 2 * sum(10 + r for r in range(world))
        assert result["threads"] == 1


def pid(ctx: RankContext) -> int:
    torch.set_default_dtype(torch.float64)
    os.environ["RANK"] = "spoiled"
    torch.rand(3)
    return os.getpid()


def test_ranks_stay_and_start_every_function_from_the_same_state(pool: WorkerPool) -> None:
    before = pool.run(describe, 2, 0.0)
    pids = pool.run(pid, 2)
    after = pool.run(describe, 2, 0.0)
    assert pids == pool.pids(2) == pool.run(pid, 2)
    assert before == after


def fail_on(ctx: RankContext, rank: int) -> None:
    print(f"rank {ctx.rank} was here")
    if ctx.rank == rank:
        raise ValueError(f"boom on {rank}")
    dist.barrier()


def test_an_error_names_its_rank_and_the_pool_goes_on(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailed, match="rank 1 failed: ValueError: boom on 1") as caught:
        pool.run(fail_on, 2, 1)
    assert 'raise ValueError(f"boom on {rank}")' in caught.value.failures[1]
    assert "rank 1 was here" in caught.value.failures[1]
    assert len(pool.run(pid, 2)) == 2


def hang_on(ctx: RankContext, rank: int) -> None:
    if ctx.rank == rank:
        oversleep()
    dist.barrier()


def oversleep() -> None:
    time.sleep(60)


def test_a_hang_ends_with_the_stacks_of_all_ranks(pool: WorkerPool) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="no answer within 1 s from rank 0, 1") as caught:
        pool.run(hang_on, 2, 0, timeout=1)
    assert time.monotonic() - start < 10
    assert "oversleep" in caught.value.failures[0]
    assert "barrier" in caught.value.failures[1]
    assert len(pool.run(pid, 2)) == 2


def crash_on(ctx: RankContext, rank: int) -> None:
    if ctx.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_dead_rank_is_named(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(crash_on, 2, 1)
    assert "the process ended, exit code -9" in caught.value.failures[1]


def leave_a_collective(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.all_reduce(torch.zeros(3), async_op=True)


def test_a_collective_left_over_fails_its_own_test(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailed, match="leave_a_collective"):
        pool.run(leave_a_collective, 2, timeout=1)


def destroy_group(ctx: RankContext) -> str:
    dist.destroy_process_group()
    return "gone"


def test_a_destroyed_group_replaces_the_ranks(pool: WorkerPool) -> None:
    assert pool.run(destroy_group, 2) == ["gone", "gone"]
    assert len(pool.run(describe, 2, 0.0)) == 2


def unpicklable(ctx: RankContext) -> object:
    return lambda: None


def test_a_result_that_cannot_travel_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        pool.run(unpicklable, 1)


def test_a_local_function_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="not at module level"):
        pool.run(lambda ctx: None, 1)


@pytest.mark.full
def test_ranks_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal
        from tests.pool import WorkerPool
        from tests.pool.test_worker_pool import pid
        if __name__ == "__main__":
            pool = WorkerPool(preload=())
            print(*pool.run(pid, 2), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    root = str(Path(__file__).parents[2])
    environment = dict(os.environ, PYTHONPATH=root)
    parent = subprocess.run([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)
    pids = [int(text) for text in parent.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + 5
    while (left := [p for p in pids if Path(f"/proc/{p}").exists()]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
