"""Reads a DeepSpeed checkpoint through torch.distributed.checkpoint's storage interface."""

from __future__ import annotations

import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from launcher.checkpoint.deepspeed.content import Content, open_content
from launcher.checkpoint.deepspeed.files import find
from launcher.checkpoint.deepspeed.layout import Part
from launcher.errors import CheckpointError


def metadata_of(directory: Path) -> Metadata:
    """Return the metadata of a DeepSpeed checkpoint: names, shapes, dtypes, and boxes."""
    return open_content(directory).metadata


def check_bytes(directory: Path, share: int = 0, shares: int = 1) -> None:
    """Verify torch.save's checksums of all files, or of share number `share` out of `shares`.

    Raises:
        CheckpointError: a file is damaged.
    """
    mine = find(directory).all[share::shares]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(_check_file, mine))


def _check_file(path: Path) -> None:
    if not zipfile.is_zipfile(path):
        return  # written by torch before 1.6, without checksums
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (
        OSError,
        zipfile.BadZipFile,
        EOFError,
        NotImplementedError,
        ValueError,
    ) as error:  # a corrupted header can cause any of these
        damaged = str(error)
    if damaged:
        raise CheckpointError(
            f"{path} is damaged ({damaged}).",
            where=str(path),
            fix="copy the file again, or load another checkpoint (tag)",
        )


class DeepSpeedReader(StorageReader):
    """Reads boxes of logical tensors from DeepSpeed's files."""

    def __init__(self, directory: Path) -> None:
        self._content: Content = open_content(directory)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is no state between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._content.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: there is no setup."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            stored = self._content.stored[item.storage_index.fqn]
            part: Part = stored.by_offsets[tuple(item.storage_index.offset or ())]
            data = part.data
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                data = data.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(data if part.scale == 1 else data / part.scale)
            planner.commit_tensor(item, target)
            self._content.mapping.let_go(data)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return Path(checkpoint_id).is_dir()
