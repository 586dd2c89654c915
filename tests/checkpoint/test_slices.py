"""A logical tensor is the same, whichever numbers of ranks write and read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.checkpoint.slices import FlatSlice
from launcher.checkpoint.store import load, save
from launcher.errors import ShardedParameterError
from launcher.tensor.split import DimSlice, Split
from tests.checkpoint.sharding import SHAPES, blank, bounds, share, whole
from tests.pool import RankContext, WorkerPool


def write(ctx: RankContext, directory: Path, dtype: torch.dtype) -> None:
    tensors = {name: share(name, ctx.rank, ctx.world, dtype) for name in SHAPES}
    save(directory, "step1", {**tensors, "plain": torch.arange(6.0), "ranks": torch.tensor(2)}, {"step": 1})


def read(ctx: RankContext, directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    mine = {name: blank(name, ctx.rank, ctx.world, dtype) for name in SHAPES}
    start, stop = bounds(6, ctx.rank, ctx.world)
    plain = FlatSlice(torch.zeros(stop - start), (6,), start, stop)
    load(directory, "step1", {**mine, "plain": plain})
    return {name: part.data_1d for name, part in {**mine, "plain": plain}.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_write_three_two_and_one_read(pool: WorkerPool, tmp_path: Path, dtype: torch.dtype) -> None:
    """Also covers slices without elements, a tensor without elements, and a plain tensor read as slices."""
    pool.run(write, 2, tmp_path, dtype)
    for world in (3, 2, 1):
        parts = pool.run(read, world, tmp_path, dtype)
        for name in SHAPES:
            flat = torch.cat([part[name] for part in parts])
            assert flat.dtype == dtype
            assert torch.equal(flat, whole(name, dtype).reshape(-1)), (name, world)
        assert torch.equal(torch.cat([part["plain"] for part in parts]), torch.arange(6.0))


def test_read_as_plain_tensors_without_a_process_group(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(write, 2, tmp_path, torch.float32)
    plain = {name: torch.full(SHAPES[name], -1.0) for name in SHAPES}
    ranks = torch.tensor(0)
    load(tmp_path, "step1", {**plain, "ranks": ranks})
    for name in SHAPES:
        assert torch.equal(plain[name], whole(name)), name
    assert ranks.item() == 2


def test_slices_may_be_uneven_and_overlap_exactly(pool: WorkerPool, tmp_path: Path) -> None:
    """Replicas hold the same slices (stage 0, hybrid sharding); each rectangle is written once."""
    pool.run(write_replicated, 2, tmp_path)
    plain = torch.zeros(7, 5)
    load(tmp_path, "r", {"matrix": plain})
    assert torch.equal(plain, whole("matrix"))


def write_replicated(ctx: RankContext, directory: Path) -> None:
    save(directory, "r", {"matrix": share("matrix", 0, 1)}, {})


def test_converted_to_the_dtype_of_the_reader(tmp_path: Path) -> None:
    save(tmp_path, "a", {"cube": share("cube", 0, 1)}, {})
    target = blank("cube", 1, 2, torch.bfloat16)
    load(tmp_path, "a", {"cube": target})
    assert torch.equal(target.data_1d, whole("cube", torch.bfloat16).view(-1)[30:60])


def test_it_looks_like_the_whole_tensor_and_refuses_arithmetic() -> None:
    part = share("cube", 1, 2, torch.bfloat16)
    assert part.shape == (3, 4, 5) and part.dtype == torch.bfloat16
    assert "[30, 60)" in repr(part)
    with pytest.raises(ShardedParameterError, match="data_1d"):
        part + 1


COLUMNS = [  # of a 4 x 6 matrix: two ranks share columns 4 and 5
    Split(torch.Size((4, 6)), (DimSlice(0, 2), DimSlice(4, 6, holders=2)), dim=1, padded_numel=16),
    Split(
        torch.Size((4, 6)), (DimSlice(2, 4), DimSlice(4, 6, holders=2, first=False)), dim=1, padded_numel=16
    ),
]


def columns(rank: int, firsts_only: bool = True) -> FlatSlice:
    local = COLUMNS[rank].take(torch.arange(24.0).view(4, 6)).reshape(-1)
    return FlatSlice(local.clone(), COLUMNS[rank], 0, 16, firsts_only=firsts_only)


def write_columns(ctx: RankContext, directory: Path) -> None:
    save(directory, "columns", {"w": columns(ctx.rank)}, {})


def test_parts_along_another_dim_are_boxes_of_the_whole(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(write_columns, 2, tmp_path)
    plain = torch.zeros(4, 6)
    load(tmp_path, "columns", {"w": plain})
    assert torch.equal(plain, torch.arange(24.0).view(4, 6))
    for rank in (0, 1):
        want = columns(rank).data_1d[3:14]
        part = FlatSlice(torch.zeros(11), COLUMNS[rank], 3, 14)
        load(tmp_path, "columns", {"w": part})
        assert torch.equal(part.data_1d, want)


def test_what_another_rank_is_the_first_holder_of_is_read_but_not_written() -> None:
    part, alone = columns(1), columns(1, firsts_only=False)
    written = [item.tensor_data.chunk for item in part.__create_write_items__("w", part)]
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in written] == [((0, 2), (4, 2))]
    assert len(part.__create_chunk_list__()) == 2
    for copied in (alone, alone.with_data(torch.zeros(16))):  # its node has a directory of its own
        assert len(copied.__create_write_items__("w", copied)) == 2


@pytest.mark.parametrize(
    ("data", "start", "stop"),
    [
        (torch.zeros(3), 0, 4),
        (torch.zeros(2, 2), 0, 4),
        (torch.zeros(8)[::2], 0, 4),
        (torch.zeros(4), 18, 22),
    ],
)
def test_wrong_slices_are_refused(data: torch.Tensor, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="flat range"):
        FlatSlice(data, (4, 5), start, stop)
