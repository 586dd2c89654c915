"""`FlatSlice`: a flat slice of a tensor or its TP shard that torch.distributed.checkpoint saves and loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from launcher.errors import ShardedParameterError
from launcher.tensor.split import Box, Split


class FlatSlice(torch.Tensor):
    """Elements [start, stop) of the flattened local part of a tensor, held in `data_1d`.

    It has the shape of the unsharded tensor and the memory of the slice. It is meant to be put into a state
    dict: through torch's `_Checkpointable` protocol it is saved as boxes of the unsharded tensor, and loaded
    in place into `data_1d`, whatever slicing was saved. Any torch operation on it raises an error.

    Args:
        data_1d: the slice, stop - start elements, 1-D and contiguous; loading writes into it.
        of: the elements of the unsharded, logical tensor that are local; a shape means all of them.
        start: flat index of the first element of the slice in the local tensor.
        stop: flat index after the last one. start == stop is a slice without elements.
        firsts_only: do not write elements of which another rank is the first holder. False if that rank may
            write to another directory.

    Raises:
        ValueError: `data_1d` is not 1-D and contiguous, or does not have stop - start elements, or the range
            is not inside the local tensor.
    """

    _data: Callable[[], torch.Tensor]
    of: Split
    start: int
    stop: int
    firsts_only: bool
    in_memory: bool
    """Whether `data_1d` is the permanent storage of the elements, not a temporary buffer."""
    _boxes: list[Box]

    @staticmethod
    def __new__(
        cls: type[FlatSlice],
        data_1d: torch.Tensor,
        of: Split | Sequence[int],
        start: int,
        stop: int,
        *,
        firsts_only: bool = True,
    ) -> FlatSlice:
        if data_1d.dim() != 1 or not data_1d.is_contiguous() or data_1d.numel() != stop - start:
            raise ValueError(
                f"flat range [{start}, {stop}) needs a contiguous 1-D tensor of {stop - start} elements, "
                f"not one of shape {tuple(data_1d.shape)}"
            )
        data_1d = data_1d.detach()
        place = of if isinstance(of, Split) else Split.whole(of), start, stop
        made = cls.lazily(
            lambda: data_1d, *place, dtype=data_1d.dtype, device=data_1d.device, firsts_only=firsts_only
        )
        made.in_memory = True
        return made

    @classmethod
    def lazily(
        cls,
        data: Callable[[], torch.Tensor],
        of: Split,
        start: int,
        stop: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        firsts_only: bool = True,
    ) -> FlatSlice:
        """Return a slice that requests its memory from `data` whenever it is read or written.

        Args:
            data: returns a contiguous 1-D tensor [stop - start], valid until the next slice requests memory.
        """
        made: FlatSlice = torch.Tensor._make_wrapper_subclass(cls, of.shape, dtype=dtype, device=device)
        made._data, made.of, made.start, made.stop = data, of, start, stop
        made.firsts_only, made.in_memory = firsts_only, False
        made._boxes = list(of.boxes(start, stop))
        return made

    @property
    def written_bytes(self) -> int:
        """Return the number of bytes that saving the slice writes."""
        return self.element_size() * sum(math.prod(chunk.sizes) for chunk in self._chunks_to_write())

    @property
    def data_1d(self) -> torch.Tensor:
        """Return the elements of the slice."""
        return self._data()

    def with_data(self, data_1d: torch.Tensor) -> FlatSlice:
        """Return the same slice, backed by other memory."""
        return FlatSlice(data_1d, self.of, self.start, self.stop, firsts_only=self.firsts_only)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ShardedParameterError(
            f"{func} was called on a FlatSlice, which holds only a part of a tensor.",
            fix="use its data_1d",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatSlice([{self.start}, {self.stop}) of {tuple(self.shape)}, {self.dtype}, {self.device})"

    # torch's _Checkpointable protocol

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks_to_write()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box in self._boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                return self.of.view(self.data_1d, self.start, box)
        if 0 in self.shape:
            return self.data_1d.view(self.shape)
        raise ValueError(f"{index.fqn}: {self!r} has no box at {index.offset}")

    def _chunks_to_write(self) -> list[ChunkStorageMetadata]:
        if math.prod(self.shape) == 0:
            # No rank owns an element, but the name and the shape have to be written.
            return [ChunkStorageMetadata(torch.Size([0] * self.dim()), self.shape)]
        return [_chunk(box) for box in self._boxes if box.part.first or not self.firsts_only]


def fill(tensor: torch.Tensor | FlatSlice, whole: torch.Tensor) -> None:
    """Copy the unsharded tensor `whole`, or the slice's part of it."""
    if isinstance(tensor, FlatSlice):
        tensor.data_1d.copy_(whole.reshape(-1)[tensor.start : tensor.stop])
    else:
        tensor.copy_(whole)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
