"""`deepspeed.io`: file writers for `torch.save(f=...)` that record write statistics."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.integrations.refused import NotHere

SIZE_BYTES = 8
"""Bytes of the optional header of a storage: its number of elements, as int64."""

StoredAs = tuple[torch.UntypedStorage, torch.dtype]


class MockFileWriter:
    """Counts what would be written; the file is created and stays empty.

    Args:
        file_path: path of the file.
    """

    def __init__(self, file_path: str | Path) -> None:
        self._file_path = file_path
        self._file = open(file_path, "wb", buffering=0)  # noqa: SIM115 - close() closes it
        self._stats: dict[str, Any] = dict.fromkeys(
            ("close", "fileno", "flush", "write", "bytes", "write_secs", "write_GB/s"), 0
        )
        self._stats |= {"save_storage": 0, "save_storage_bytes": 0}

    def file_path(self) -> str | Path:
        return self._file_path

    def fileno(self) -> int:
        """Return -1, so that torch writes through this object and not to the file descriptor."""
        self._stats["fileno"] += 1
        return -1

    def flush(self) -> None:
        self._stats["flush"] += 1

    def close(self) -> None:
        """Close the file, if it is open."""
        self._stats["close"] += 1
        self._file.close()

    def write(self, buffer: Any) -> int:
        """Write all bytes and return their number.

        Raises:
            OSError: the write failed.
        """
        began = time.perf_counter()
        data = memoryview(buffer).cast("B")
        self._put(data)
        self._stats["write_secs"] += time.perf_counter() - began
        self._stats["write"] += 1
        self._stats["bytes"] += len(data)
        return len(data)

    def save_torch_storage_object_list(self, storage_obj_list: Sequence[StoredAs], save_size: bool) -> int:
        """Write storages one after the other and return the number of bytes written.

        Args:
            storage_obj_list: pairs of a storage and the dtype of its elements.
            save_size: write the number of elements before each storage.
        """
        written = 0
        for storage, dtype in storage_obj_list:
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()
            if save_size:
                elements = storage.nbytes() // dtype.itemsize
                written += self.write(elements.to_bytes(SIZE_BYTES, "little", signed=True))
            written += self.write(flat.numpy())
            self._stats["save_storage"] += 1
            self._stats["save_storage_bytes"] += storage.nbytes()
        return written

    def _put(self, data: memoryview) -> None:
        """Write nothing."""

    def _dump_state(self) -> None:
        """Print the statistics."""
        if seconds := self._stats["write_secs"]:
            self._stats["write_GB/s"] = self._stats["bytes"] / seconds / (1 << 30)
        print(f"stats = {self._stats | {'path': self._file_path}}")


class PyFileWriter(MockFileWriter):
    """Writes through unbuffered file I/O.

    Args:
        file_path: path of the file.
    """

    def _put(self, data: memoryview) -> None:
        while data:  # a write may be partial, for example above 2 GiB
            data = data[self._file.write(data) :]


@dataclass
class FastFileWriterConfig:
    """Options of a `FastFileWriter`; only `num_parallel_writers` is used."""

    dnvme_handle: Any
    pinned_tensor: torch.Tensor
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter(PyFileWriter):
    """Writes like `PyFileWriter`, and syncs the file to disk on close().

    Args:
        file_path: path of the file.
        config: options of this writer.

    Raises:
        NotHere: `num_parallel_writers` is above 1.
    """

    def __init__(self, file_path: str | Path, config: FastFileWriterConfig) -> None:
        if config.num_parallel_writers > 1:
            raise NotHere(
                "parallel writers of one file are not supported",
                where="FastFileWriterConfig.num_parallel_writers",
                fix="set it to 1, or call engine.save_checkpoint(): each rank writes its own part",
            )
        super().__init__(file_path)

    def close(self) -> None:
        """Sync the file to disk and close it."""
        try:
            if not self._file.closed:
                os.fsync(self._file.fileno())
        finally:
            super().close()
