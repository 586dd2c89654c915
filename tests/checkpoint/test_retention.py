"""Which checkpoints are kept."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from launcher.checkpoint.retention import delete_old
from launcher.checkpoint.store import list_tags, save


def _saved(directory: Path, *names: str) -> None:
    for name in names:
        save(directory, name, {"model/w": torch.ones(2)}, {})


def _steps(*numbers: int) -> list[str]:
    return [f"global_step{number}" for number in numbers]


def test_the_newest_and_the_latest_stay(tmp_path: Path) -> None:
    _saved(tmp_path, *_steps(9, 10, 11, 12))
    (tmp_path / "latest").write_text("global_step9\n")
    assert delete_old(tmp_path, 2) == _steps(10)
    assert list_tags(tmp_path) == _steps(9, 11, 12)
    assert {path.name for path in tmp_path.iterdir()} == {*_steps(9, 11, 12), "latest"}


def test_every_so_many_steps_one_stays_and_so_does_what_somebody_has_named(tmp_path: Path) -> None:
    _saved(tmp_path, "best", "global_step5_loss_scale_exhausted", *_steps(100, 150, 200, 250, 300))
    assert delete_old(tmp_path, 1, 100) == _steps(150, 250)
    assert list_tags(tmp_path) == ["best", "global_step5_loss_scale_exhausted", *_steps(100, 200, 300)]


def test_steps_that_are_done_again_are_newer_than_those_that_were_given_up(tmp_path: Path) -> None:
    _saved(tmp_path, *_steps(10, 20, 30, 15))  # resumed from 10
    assert delete_old(tmp_path, 1) == _steps(10, 20, 30)


def test_what_cannot_be_deleted_is_told_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _saved(tmp_path, *_steps(1, 2))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with caplog.at_level(logging.WARNING, "launcher"):
        assert delete_old(tmp_path, 1) == []
    assert "Permission denied" in caplog.text and list_tags(tmp_path) == _steps(1, 2)
