"""Ranks along the axes of the mesh, and the groups of each axis."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from launcher.comm import Mesh
from launcher.comm.mesh import AXES, warning_of_tp_over_nodes
from launcher.errors import ConfigError
from tests.pool import RankContext, RanksFailed, WorkerPool

CPU = torch.device("cpu")


def coordinates(ctx: RankContext, degrees: dict[str, int]) -> dict[str, tuple[int, int, list[int]]]:
    """Return (degree, rank on the axis, global ranks of its group) of every axis with more than one rank."""
    mesh = Mesh.build(CPU, **degrees)
    assert set(mesh.axes) == set(AXES)
    live = {name: axis for name, axis in mesh.axes.items() if axis.degree > 1}
    assert all(axis.group is None for axis in mesh.axes.values() if axis.degree == 1)
    return {
        name: (axis.degree, axis.rank, dist.get_process_group_ranks(axis.group))
        for name, axis in live.items()
    }


def test_dp_takes_what_is_left(pool: WorkerPool) -> None:
    for rank, axes in enumerate(pool.run(coordinates, 4, {})):
        assert axes == {"dp": (4, rank, [0, 1, 2, 3])}


def test_tp_ranks_are_neighbours(pool: WorkerPool) -> None:
    for rank, axes in enumerate(pool.run(coordinates, 4, {"tp": 2})):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert axes == {"dp": (2, rank // 2, [rank % 2, rank % 2 + 2]), "tp": (2, rank % 2, pair)}


def test_pp_is_outermost(pool: WorkerPool) -> None:
    axes = pool.run(coordinates, 4, {"pp": 2})[3]
    assert axes == {"pp": (2, 1, [1, 3]), "dp": (2, 1, [2, 3])}


@pytest.mark.parametrize("degrees", [{"tp": 3}, {"tp": 2, "dp": 4}])
def test_degrees_must_multiply_to_the_world_size(pool: WorkerPool, degrees: dict[str, int]) -> None:
    with pytest.raises(RanksFailed) as failed:
        pool.run(coordinates, 4, degrees)
    text = str(failed.value)
    assert ConfigError.__name__ in text and "there are 4 ranks" in text and "make their product equal" in text


@pytest.mark.parametrize(
    ("degree", "world", "node", "crosses"),
    [
        (1, 16, 8, False),
        (8, 16, 8, False),
        (8, 8, 8, False),
        (16, 16, 8, True),
        (4, 12, 6, True),
        (8, 8, 4, True),
    ],
)
def test_tp_over_nodes_is_told(degree: int, world: int, node: int, crosses: bool) -> None:
    warning = warning_of_tp_over_nodes(degree, world, node)
    assert (warning is not None) == crosses
    if warning:
        assert "4 reductions of tokens x hidden values" in warning and f"over {degree} ranks" in warning


def warned(ctx: RankContext, node: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        found: list[str] = []
        patch.setenv("LOCAL_WORLD_SIZE", str(node))
        patch.setattr("launcher.comm.mesh.logger.warning", found.append)
        Mesh.build(CPU, tp=2)
    return found


def test_rank_0_warns_of_nodes(pool: WorkerPool) -> None:
    assert [len(found) for found in pool.run(warned, 2, 1)] == [1, 0]
    assert [len(found) for found in pool.run(warned, 2, 2)] == [0, 0]
