"""`MMapIndexedDataset` of `deepspeed.runtime.data_pipeline`: Megatron's token datasets, stored in two files.

NAME.bin contains the rows back to back; NAME.idx contains their sizes, offsets, and the document boundaries.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from launcher.errors import ConfigError

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
TYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64)
"""Supported dtypes, in the order of their codes, which start at 1."""
Array = np.ndarray[Any, np.dtype[Any]]


def data_file_path(prefix_path: str) -> str:
    return f"{prefix_path}.bin"


def index_file_path(prefix_path: str) -> str:
    return f"{prefix_path}.idx"


def code(dtype: Any) -> int:
    """Return the code of a dtype."""
    return [np.dtype(one) for one in TYPES].index(np.dtype(dtype)) + 1


class MMapIndexedDataset(torch.utils.data.Dataset[Array]):
    """Rows that are memory-mapped and read from disk on access.

    Args:
        path: NAME, without an extension.
        skip_warmup: unused; nothing is read ahead.

    Raises:
        ConfigError: the files have another format, or are truncated.
    """

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        self._path = path
        index = np.memmap(index_file_path(path), mode="r", dtype=np.uint8)
        try:
            self._read(index)
        except (ValueError, IndexError) as error:
            raise ConfigError(
                f"not a valid dataset index, or a truncated one: {error}",
                where=index_file_path(path),
                fix="create it with MMapIndexedDatasetBuilder, or Megatron's preprocess_data.py",
            ) from None

    def _read(self, index: Array) -> None:
        version, kind, rows, documents = (
            int(index[begin:end].view(of)[0])
            for begin, end, of in (
                (9, 17, np.uint64),
                (17, 18, np.uint8),
                (18, 26, np.uint64),
                (26, 34, np.uint64),
            )
        )
        if index[:9].tobytes() != MAGIC or version != VERSION or not 1 <= kind <= len(TYPES):
            raise ValueError("unexpected magic number, version or dtype code in the header")
        self.dtype = np.dtype(TYPES[kind - 1])
        at = 34
        self.sizes, at = index[at : at + 4 * rows].view(np.int32), at + 4 * rows
        self._begins, at = index[at : at + 8 * rows].view(np.int64), at + 8 * rows
        self.doc_idx = index[at : at + 8 * documents].view(np.int64)
        if len(self.doc_idx) != documents:
            raise ValueError("the end is missing")
        size = Path(data_file_path(self._path)).stat().st_size
        needed = int(self._begins[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if rows else 0
        if size < needed:
            raise ValueError(f"{data_file_path(self._path)} has {size} bytes, but {needed} are expected")
        empty: Array = np.empty(0, np.uint8)
        self._data = np.memmap(data_file_path(self._path), mode="r", dtype=np.uint8) if size else empty

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self.__init__(path)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, idx: int | slice) -> Any:
        """Return a row, or for a slice with step 1 the list of its rows."""
        if not isinstance(idx, slice):
            return self.get(idx)
        if idx.indices(len(self))[2] != 1:
            raise ValueError("slices with a step other than 1 are not supported")
        return [self.get(row) for row in range(*idx.indices(len(self)))]

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Array:
        """Return a row, or `length` elements of it starting at `offset`."""
        count = int(self.sizes[idx]) - offset if length is None else length
        begin = int(self._begins[idx]) + offset * self.dtype.itemsize
        return self._data[begin : begin + count * self.dtype.itemsize].view(self.dtype)

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    def get_doc_idx(self) -> Array:
        return self.doc_idx

    def set_doc_idx(self, doc_idx_: Array) -> None:
        self.doc_idx = doc_idx_

    @property
    def supports_prefetch(self) -> bool:
        return False

    @staticmethod
    def exists(path: str) -> bool:
        return Path(index_file_path(path)).exists() and Path(data_file_path(path)).exists()


class MMapIndexedDatasetBuilder:
    """Writes an indexed dataset, row by row.

    Args:
        out_file: NAME.bin.
        dtype: dtype of the elements.
    """

    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        self._file, self._dtype = open(out_file, "wb"), np.dtype(dtype)  # noqa: SIM115  (finalize() closes it)
        self._sizes: list[int] = []
        self._doc_idx = [0]

    def add_item(self, tensor: Tensor) -> None:
        self.add_item_numpy(tensor.numpy())

    def add_items(self, arr_list: list[Array]) -> None:
        for array in arr_list:
            self.add_item_numpy(array)

    def add_item_numpy(self, np_array: Array) -> None:
        self._file.write(np_array.astype(self._dtype).tobytes())
        self._sizes.append(np_array.size)

    def end_document(self) -> None:
        """End the document: the next row starts a new one."""
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, another_file: str) -> None:
        """Append all rows of another dataset, given as NAME.

        Raises:
            ConfigError: its dtype is different.
        """
        other = MMapIndexedDataset(another_file)
        if other.dtype != self._dtype:
            raise ConfigError(f"its dtype is {other.dtype}, not {self._dtype}", where=another_file)
        self._doc_idx += [len(self._sizes) + int(row) for row in other.doc_idx[1:]]
        self._sizes += other.sizes.tolist()
        with open(data_file_path(another_file), "rb") as source:
            shutil.copyfileobj(source, self._file)

    def finalize(self, index_file: str) -> None:
        """Write NAME.idx."""
        self._file.close()
        sizes = np.array(self._sizes, np.int32)
        ends = np.cumsum(sizes, dtype=np.int64) * self._dtype.itemsize
        begins = np.concatenate([np.zeros(1, np.int64), ends])[: len(sizes)]
        head = np.array([len(sizes), len(self._doc_idx)], np.uint64)
        parts = (
            np.uint64(VERSION),
            np.uint8(code(self._dtype)),
            head,
            sizes,
            begins,
            np.array(self._doc_idx, np.int64),
        )
        Path(index_file).write_bytes(MAGIC + b"".join(part.tobytes() for part in parts))
