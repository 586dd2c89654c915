"""Atomic saves, and errors that reach every rank."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher.checkpoint.slices import FlatSlice
from launcher.checkpoint.store import latest_tag, list_tags, load, load_meta, save
from launcher.errors import CheckpointError
from tests.checkpoint.sharding import SHAPES, share, whole
from tests.pool import RankContext, RanksFailed, WorkerPool


def _save(directory: Path, tag: str, value: float = 1.0, **meta: Any) -> None:
    save(directory, tag, {"w": torch.full((4, 3), value)}, meta)


def _value(directory: Path, tag: str) -> float:
    w = torch.zeros(4, 3)
    load(directory, tag, {"w": w})
    assert (w == w[0, 0]).all()
    return w[0, 0].item()


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_meta_comes_back_and_latest_moves(tmp_path: Path) -> None:
    assert load_meta(tmp_path, missing_ok=True) is None
    _save(tmp_path, "step1", step=1, lr=[1e-3], name="é")
    _save(tmp_path, "step2", step=2)
    assert load_meta(tmp_path) == ("step2", {"step": 2})
    assert load_meta(tmp_path, "step1") == ("step1", {"step": 1, "lr": [1e-3], "name": "é"})
    assert list_tags(tmp_path) == ["step1", "step2"]
    assert _names(tmp_path) == {"step1", "step2", "latest"}


def test_a_tag_can_be_saved_again(tmp_path: Path) -> None:
    _save(tmp_path, "best", 1.0, step=1)
    _save(tmp_path, "best", 2.0, step=2)
    assert _value(tmp_path, "best") == 2.0
    assert load_meta(tmp_path) == ("best", {"step": 2})
    assert _names(tmp_path) == {"best", "latest"}


@pytest.mark.parametrize("tag", ["", "..", "a/b", "../a", ".hidden", "latest", "a b", "a\n", "-x", "x" * 300])
def test_odd_tags_are_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match=r"is not a valid checkpoint tag|cannot be a tag"):
        _save(tmp_path, tag)
    assert _names(tmp_path) == set()


def test_nothing_to_load_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no file 'latest'"):
        load_meta(tmp_path)
    _save(tmp_path, "step1")
    with pytest.raises(CheckpointError, match=r"'step2'[\s\S]*load one of: step1"):
        load_meta(tmp_path, "step2")
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="latest does not name a checkpoint"):
        latest_tag(tmp_path)


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    _save(tmp_path, "a")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, "a", {"w": torch.zeros(3, 4), "bias": torch.zeros(1)})
    assert "1 missing: bias" in str(caught.value)
    assert "w is (3, 4) in the model and (4, 3) in the checkpoint" in str(caught.value)
    kept, w = torch.full((1,), 7.0), torch.zeros(4, 3)
    load(tmp_path, "a", {"w": w, "bias": kept}, strict=False)
    assert kept.item() == 7.0 and w.sum().item() == 12.0


def test_slices_that_leave_a_hole_are_no_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, "good")
    with pytest.raises(CheckpointError, match="do not cover all elements: w"):
        save(tmp_path, "bad", {"w": FlatSlice(torch.zeros(5), (4, 3), 0, 5)}, {})
    assert _names(tmp_path) == {"good", "latest"}


def test_meta_that_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="JSON"):
        save(tmp_path, "a", {}, {"tensor": torch.zeros(1)})


def test_format_of_the_future(tmp_path: Path) -> None:
    _save(tmp_path, "a")
    meta = tmp_path / "a" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load_meta(tmp_path, "a")


# Killed saves


def save_and_die(ctx: RankContext, directory: Path, tag: str, after: int) -> int:
    """Save step 2, and die before the system call number `after` of those that order disk writes."""
    calls = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "fsync"):
            patch.setattr(os, name, dying(getattr(os, name)))
        _save(directory, tag, 2.0, step=2)
    return calls


@pytest.mark.parametrize("tag", [pytest.param("step1", marks=pytest.mark.full), "step2"])
def test_a_save_killed_anywhere_spoils_nothing(pool: WorkerPool, tmp_path: Path, tag: str) -> None:
    """Saves the same tag again, and another one."""
    _save(tmp_path / "whole", "step1", 1.0, step=1)
    (total,) = pool.run(save_and_die, 1, tmp_path / "whole", tag, 10**6)
    assert total >= 8
    # Another tag is renamed once only, at the end; the same one goes aside first.
    for after in range(total) if tag == "step1" else range(total - 5, total, 2):
        directory = tmp_path / str(after)
        _save(directory, "step1", 1.0, step=1)
        with pytest.raises(RanksFailed, match="exit code -9"):
            pool.run(save_and_die, 1, directory, tag, after)
        found, meta = load_meta(directory)
        # The old one or the new one, whole, and meta and tensors of the same.
        assert meta["step"] in (1, 2)
        assert _value(directory, found) == float(meta["step"])
        _save(directory, "step3", 3.0, step=3)
        assert load_meta(directory) == ("step3", {"step": 3})
        assert _names(directory) <= {"step1", "step2", "step3", "latest"}, "leftovers are cleaned"
        assert {"step1", "step3"} <= set(list_tags(directory))


# Ranks that fail


def fail_on_one_rank(ctx: RankContext, directory: Path, how: str) -> str:
    """Make a good save, a failing one, and then a collective: every rank must recover from the failure."""
    tensors = {name: share(name, ctx.rank, ctx.world) for name in SHAPES}
    tensors["big"] = FlatSlice(torch.zeros(40_000), (80_000,), ctx.rank * 40_000, (ctx.rank + 1) * 40_000)
    save(directory, "good", tensors, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    message, tag, meta = "", "bad", {"step": 2}
    if ctx.rank == 1 and how == "disk":
        # No file may grow beyond this: what a full disk looks like to one rank.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    if ctx.rank == 1 and how == "shape":
        tensors["matrix"] = FlatSlice(torch.zeros(0), (7, 6), 0, 0)
    if how == "tag":
        tag = f"bad{ctx.rank}"
    try:
        save(directory, tag, tensors, meta)
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    if ctx.rank == 0:
        assert _names(directory) == {"good", "latest"}, _names(directory)
    matrix = torch.zeros(SHAPES["matrix"])
    load(directory, "good", {"matrix": matrix})
    assert torch.equal(matrix, whole("matrix"))
    assert load_meta(directory) == ("good", {"step": 1})
    return message


def test_disk_full_on_one_rank_is_an_error_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    messages = pool.run(fail_on_one_rank, 2, tmp_path, "disk")
    assert len(messages) == 2
    for message in messages:
        assert "could not be written on rank 1: [Errno 27] File too large" in message
        assert "earlier checkpoints are intact" in message


def test_ranks_that_disagree_about_the_tag(pool: WorkerPool, tmp_path: Path) -> None:
    messages = pool.run(fail_on_one_rank, 2, tmp_path, "tag")
    assert all("disagree about the tag" in message for message in messages), messages


def load_what_one_rank_cannot(ctx: RankContext, directory: Path) -> str:
    try:
        load(directory, "a", {"w": torch.zeros(4, 3 + ctx.rank)})
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_load_that_fails_on_one_rank_fails_on_all(pool: WorkerPool, tmp_path: Path) -> None:
    _save(tmp_path, "a")
    messages = pool.run(load_what_one_rank_cannot, 2, tmp_path)
    assert all("w is (4, 4) in the model" in message for message in messages), messages


def save_in_subgroup(ctx: RankContext, directory: Path) -> float:
    group = dist.new_group([1, 2])
    if ctx.rank == 0:
        return 0.0
    part = FlatSlice(torch.full((6,), float(ctx.rank)), (12,), (ctx.rank - 1) * 6, ctx.rank * 6)
    save(directory, "a", {"w": part}, {}, group=group)
    w = torch.zeros(12)
    load(directory, "a", {"w": w}, group=group)
    return w.sum().item()


def test_a_group_without_rank_0(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(save_in_subgroup, 3, tmp_path) == [0.0, 18.0, 18.0]


def test_nothing_of_this_machine_is_in_a_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, "a")
    for file in (tmp_path / "a").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()
