"""Two saves into one directory do not affect each other."""

import fcntl
import os
from pathlib import Path

import pytest
import torch

from launcher.checkpoint import store, tags
from launcher.checkpoint.slices import FlatSlice
from launcher.errors import CheckpointError
from launcher.tensor.split import Split


def test_what_another_process_writes_stays(tmp_path: Path) -> None:
    theirs = tmp_path / ".tmp-other"
    theirs.mkdir()
    handle = os.open(theirs, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    mine = tags.start(tmp_path, "mine")
    assert theirs.is_dir()
    with pytest.raises(CheckpointError, match=r"Another process is writing .*other"):
        tags.start(tmp_path, "other")
    with pytest.raises(CheckpointError, match="Another process is writing"):
        store.save(tmp_path, "other", {"w": torch.ones(2)}, {})
    assert theirs.is_dir()
    os.close(handle)  # the process has ended
    assert tags.start(tmp_path, "mine") == mine  # of a save that was interrupted: it begins anew
    assert not theirs.exists()
    tags.finish(tmp_path, "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "mine"]


def test_a_child_does_not_keep_the_place(tmp_path: Path) -> None:
    tags.start(tmp_path, "a")
    if (child := os.fork()) == 0:
        tags.let_go(tmp_path / ".tmp-a")  # it has nothing to let go of
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(CheckpointError, match="Another process"):
        tags._clean(tmp_path, tmp_path / ".tmp-a")
    tags.discard(tmp_path, "a")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Cannot write to") as told:
        tags.start(tmp_path / "file" / "out", "a")
    assert "fix: choose a directory" in str(told.value)


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> torch.Tensor:
        raise KeyboardInterrupt

    place = Split.whole((2,)), 0, 2
    lazy = FlatSlice.lazily(interrupt, *place, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        store.save(tmp_path, "a", {"w": lazy}, {})
    assert not list(tmp_path.iterdir())
