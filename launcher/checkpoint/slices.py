"""A flat slice of a logical tensor that torch.distributed.checkpoint saves and loads by rectangles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from launcher.errors import ShardedParameterError
from launcher.tensor.rectangles import Rectangle, rectangles


class FlatSlice(torch.Tensor):
    """Elements [start, stop) of the flattened tensor of `shape`, held in `data_1d`.

    It has the shape of the whole tensor and the memory of the slice. It is there to be put into a state dict:
    through torch's `_Checkpointable` protocol it is written as rectangles of the whole tensor, and read in
    place into `data_1d` from whatever slicing wrote it. Any arithmetic on it is an error.

    Args:
        data_1d: the slice, stop - start elements, 1-D and contiguous; loading writes into it.
        shape: of the whole, logical tensor.
        start: flat index of the first element of the slice.
        stop: flat index after the last one. start == stop is a slice without elements.

    Raises:
        ValueError: `data_1d` is not 1-D and contiguous, or does not have stop - start elements, or the
            range is
            not inside the tensor.
    """

    data_1d: torch.Tensor
    start: int
    stop: int
    _rectangles: list[Rectangle]

    @staticmethod
    def __new__(
        cls: type[FlatSlice], data_1d: torch.Tensor, shape: Sequence[int], start: int, stop: int
    ) -> FlatSlice:
        if data_1d.dim() != 1 or not data_1d.is_contiguous() or data_1d.numel() != stop - start:
            raise ValueError(
                f"flat range [{start}, {stop}) needs a contiguous 1-D tensor of {stop - start} elements, "
                f"not one of shape {tuple(data_1d.shape)}"
            )
        made: FlatSlice = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=data_1d.dtype, device=data_1d.device
        )
        made.data_1d, made.start, made.stop = data_1d.detach(), start, stop
        made._rectangles = rectangles(shape, start, stop)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ShardedParameterError(
            f"{func} was called on a FlatSlice, which holds a part of a tensor only.",
            fix="work with its data_1d",
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
        return [_chunk(box) for box in self._rectangles]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box in self._rectangles:
            if index.offset is None or tuple(index.offset) == box.offsets:
                part = self.data_1d[box.flat_start - self.start : box.flat_stop - self.start]
                return part.view(box.sizes)
        if 0 in self.shape:
            return self.data_1d.view(self.shape)
        raise ValueError(f"{index.fqn}: {self!r} has no rectangle at {index.offset}")

    def _chunks_to_write(self) -> list[ChunkStorageMetadata]:
        if math.prod(self.shape) == 0:
            # Nobody owns an element; the name and the shape have to be written all the same.
            return [ChunkStorageMetadata(torch.Size([0] * self.dim()), self.shape)]
        return self.__create_chunk_list__()


def _chunk(box: Rectangle) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
