"""Writing torch.distributed.checkpoint's files: one tensor in memory at a time, hashed on the way."""

from __future__ import annotations

from pathlib import Path
from typing import IO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from launcher.checkpoint.checksums import HashingFileSystem
from launcher.checkpoint.ranks import root_cause
from launcher.errors import CheckpointError


class CheckpointWriter(dcp.FileSystemWriter):
    """torch's writer with errors for people, and without this machine's path in the checkpoint.

    Attributes:
        fs: has the checksums of the files that were written.
    """

    def __init__(self, directory: Path, who: str) -> None:
        super().__init__(directory, sync_files=True, thread_count=1)
        self._who = who
        self.fs: HashingFileSystem = HashingFileSystem()

    def storage_meta(self) -> StorageMeta | None:
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has into one file. torch's own writer holds all tensors of a file until its end."""
        try:
            written = self._write_file(f"{plan.storage_data.prefix}0.distcp", plan.items, planner)
        except CheckpointError:  # what is written could not be read
            raise
        except Exception as error:
            raise CheckpointError(
                f"The checkpoint could not be written{self._who}: {root_cause(error)}",
                where=str(self.path),
                fix="free some space or save elsewhere; earlier checkpoints are intact",
            ) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        written = []
        with self.fs.written(Path(self.path) / name) as stream:
            for item in items:
                at, tensor = stream.tell(), planner.resolve_data(item)
                assert isinstance(tensor, Tensor)  # nothing else is in a checkpoint
                torch.save(_alone(tensor), cast("IO[bytes]", stream))
                del tensor
                size = stream.tell() - at
                written.append(WriteResult(item.index, size, _StorageInfo(name, at, size)))
            stream.finish()
        return written


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU with a storage of its own: torch.save writes whole storages."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
