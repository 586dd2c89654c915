"""Copies of the state in the memory of two nodes: what remains after one of them, or both, is lost.

Nodes are directories here, and GROUP_RANK determines which node a rank is on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.checkpoint import tags
from launcher.checkpoint.peer_memory import PeerMemory
from launcher.checkpoint.ranks import node_groups
from tests.checkpoint.sharding import SHAPES, blank, share
from tests.pool import RankContext, WorkerPool

WORLD = 4


def of_node(ctx: RankContext, place: Path, nodes: int) -> PeerMemory:
    number = ctx.rank * nodes // ctx.world
    os.environ["GROUP_RANK"] = str(number)
    directory = place / f"node{number}"
    directory.mkdir(exist_ok=True)
    return PeerMemory(directory, *node_groups())


def keep(ctx: RankContext, place: Path, *steps: int, nodes: int = 2, plus: float = 0.0) -> list[bool]:
    memory = of_node(ctx, place, nodes)
    kept = []
    for step in steps:
        tensors: dict[str, Any] = {name: share(name, ctx.rank, ctx.world) for name in SHAPES}
        for tensor in tensors.values():
            tensor.data_1d.add_(plus)
        tensors[f"rng/{ctx.rank}"] = torch.tensor([ctx.rank, step])
        kept.append(memory.keep(step, tensors, {"global_steps": step, "by": ctx.rank}))
    return kept


def resume(
    ctx: RankContext, place: Path, after: int, nodes: int = 2
) -> tuple[str | None, dict[str, Any] | None, bool]:
    """Return (tag, meta, whether all elements are there)."""
    memory = of_node(ctx, place, nodes)
    found = memory.find(after)
    if found is None:
        return None, None, False
    tensors: dict[str, Any] = {name: blank(name, ctx.rank, ctx.world) for name in SHAPES}
    if ctx.rank < WORLD:
        tensors[f"rng/{ctx.rank}"] = torch.zeros(2, dtype=torch.int64)
    memory.load(found[0], tensors, True)
    right = all(torch.equal(tensors[n].data_1d, share(n, ctx.rank, ctx.world).data_1d) for n in SHAPES)
    step = int(found[0].removeprefix("global_step"))
    return *found, right and tensors[f"rng/{ctx.rank}"].tolist() == [ctx.rank, step]


def files(place: Path, node: int, step: int) -> set[str]:
    return {path.name for path in (place / f"node{node}" / f"global_step{step}").iterdir()}


def test_what_each_node_holds(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(keep, WORLD, tmp_path, 3, 6) == [[True, True]] * WORLD
    everything = {"meta.json", ".metadata", *(f"__{rank}_0.distcp" for rank in range(WORLD))}
    assert files(tmp_path, 0, 6) == files(tmp_path, 1, 6) == everything
    assert {path.name for path in (tmp_path / "node0").iterdir()} == {"global_step6"}


def test_a_single_node_has_no_copies(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(keep, 2, tmp_path, 1, nodes=1)
    assert files(tmp_path, 0, 1) == {"meta.json", ".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_of_four_nodes_each_holds_two_parts(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(keep, WORLD, tmp_path, 1, nodes=4)
    for node in range(4):
        mine = {f"__{node}_0.distcp", f"__{(node - 1) % 4}_0.distcp"}
        assert files(tmp_path, node, 1) == {"meta.json", ".metadata", *mine}


def lost(node: int) -> Callable[[Path], None]:
    return lambda place: shutil.rmtree(place / f"node{node}")


def damaged(name: str) -> Callable[[Path], None]:
    def damage(place: Path) -> None:
        with (place / "node0" / "global_step6" / name).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))

    return damage


@pytest.mark.parametrize(
    "break_it",
    [
        lambda place: None,
        lost(0),
        lost(1),
        damaged("__0_0.distcp"),
        damaged(".metadata"),
        damaged("meta.json"),
    ],
    ids=["whole", "without node0", "without node1", "damaged file", "damaged .metadata", "damaged meta.json"],
)
@pytest.mark.parametrize("nodes", [2, 4])
def test_going_on_after_a_loss(
    pool: WorkerPool, tmp_path: Path, break_it: Callable[[Path], None], nodes: int
) -> None:
    pool.run(keep, WORLD, tmp_path, 6, nodes=nodes)
    break_it(tmp_path)
    expected = ("global_step6", {"global_steps": 6, "by": 0}, True)
    assert pool.run(resume, WORLD, tmp_path, 5, nodes) == [expected] * WORLD


def test_on_fewer_ranks_and_nodes(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(keep, WORLD, tmp_path, 6, nodes=4)
    shutil.rmtree(tmp_path / "node2")
    shutil.move(tmp_path / "node3", tmp_path / "node2")  # the others are numbered anew
    for tag, _, right in pool.run(resume, 3, tmp_path, -1, 3):
        assert tag == "global_step6" and right


def test_what_cannot_be_used(pool: WorkerPool, tmp_path: Path) -> None:
    nothing = [(None, None, False)] * WORLD
    assert pool.run(resume, WORLD, tmp_path, -1) == nothing  # nothing was kept
    pool.run(keep, WORLD, tmp_path, 6, nodes=4)
    assert pool.run(resume, WORLD, tmp_path, 6, 4) == nothing  # the disk has it
    for node in (0, 1):  # the part of node0, and its copy
        shutil.rmtree(tmp_path / f"node{node}")
    assert pool.run(resume, WORLD, tmp_path, -1, 4) == nothing


def test_a_copy_that_was_not_finished(pool: WorkerPool, tmp_path: Path) -> None:
    """Killed when one node had finished a step and the other had not: the previous step remains."""
    pool.run(keep, WORLD, tmp_path, 3, nodes=4)
    shutil.copytree(tmp_path, tmp_path / "saved")
    pool.run(keep, WORLD, tmp_path, 6, nodes=4, plus=1.0)
    for node in range(4):
        shutil.copytree(
            tmp_path / "saved" / f"node{node}" / "global_step3", tmp_path / f"node{node}" / "global_step3"
        )
        if node != 2:
            new = tmp_path / f"node{node}" / "global_step6"
            new.rename(new.with_name(f"{tags.TMP}global_step6"))
    for tag, _, right in pool.run(resume, WORLD, tmp_path, -1, 4):
        assert tag == "global_step3" and right
    pool.run(keep, WORLD, tmp_path, 9, nodes=4)
    assert {path.name for path in (tmp_path / "node0").iterdir()} == {"global_step9"}


def no_room(ctx: RankContext, place: Path) -> tuple[list[bool], bool]:
    usage = shutil.disk_usage
    if ctx.rank == 3:
        shutil.disk_usage = lambda path: usage(path)._replace(free=100)
    try:
        kept = keep(ctx, place, 6)
    finally:
        shutil.disk_usage = usage
    return kept, resume(ctx, place, -1)[0] is None


def test_without_room_nothing_is_kept_and_the_run_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(no_room, WORLD, tmp_path) == [([False], True)] * WORLD
