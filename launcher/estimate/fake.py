"""Fake tensors: tensors of the CPU whose memory is there and is never touched, so that it takes none.

Inside of `FakeMode`, an operation on floats of some size makes its outputs with the shapes, strides and dtypes that its
meta kernel gives, and computes nothing. Operations on integers, on small tensors and on views run: what decides where
a program goes on (positions, masks, flags) is real. All else that a program sees is as ever: addresses, storages,
reference counts, process groups.
"""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from launcher.estimate.live import LiveBytes, LiveBytesMode

SMALL = 1 << 14  # elements: operations on no more than these run
INTEGERS = 1 << 22  # the same where no tensor has floats
_NORESERVE = 0x4000  # of Linux: memory that is not set aside; Python has no name for it before 3.13
_NARROW_ON_META = {"_grouped_mm"}  # their meta kernels refuse fp32, which those of the CPU take
_ALWAYS_RUN = {"resize_", "set_", "record_stream", "_local_scalar_dense", "is_nonzero", "equal", "is_pinned"}


class _New(NamedTuple):
    """An output that is a new tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Same(NamedTuple):
    """An output that is an argument, by its place among all."""

    argument: int


class _Writes(NamedTuple):
    """The arguments that an operation in place writes to, by position or name; and how many of them it gives back."""

    arguments: tuple[int | str, ...]
    returns: int


@contextmanager
def fused_dropout() -> Iterator[None]:
    """Inside, dropout is one operation that keeps a mask of bytes, as on devices; on CPUs it keeps one of numbers.

    A torch function mode would not do: it is off inside of a backward, where blocks are recomputed.
    """
    plain = functional.dropout

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0 < p < 1:
            return plain(input, p, training, inplace)
        made: Tensor = torch.native_dropout(input, p, True)[0]
        return made

    functional.dropout = dropout
    try:
        yield
    finally:
        functional.dropout = plain


class FakeMode(LiveBytesMode):
    """The mode.

    Args:
        live: sees all tensors that are made.
    """

    def __init__(self, live: LiveBytes) -> None:
        super().__init__(live)
        self._outputs: dict[Hashable, tuple[list[Any] | None, Any]] = {}
        self._writes: dict[Any, _Writes | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.is_view or func.namespace != "aten" or func._opname in _ALWAYS_RUN:
            return func(*args, **kwargs)
        tensors = _tensors_of(args, kwargs)
        if not tensors and (
            not _is_cpu(kwargs.get("device")) or not any(a.name == "device" for a in func._schema.arguments)
        ):
            return func(*args, **kwargs)
        if tensors and (_is_light(tensors) or not all(_is_cpu(tensor.device) for tensor in tensors)):
            return func(*args, **kwargs)
        writes = self._writes_of(func)
        if writes is not None:
            return _given_back(writes, args, kwargs)
        return self._hollow(func, *tree_flatten((args, kwargs)))

    def _writes_of(self, func: Any) -> _Writes | None:
        if func not in self._writes:
            schema = func._schema
            written = tuple(
                argument.name if argument.kwarg_only else place
                for place, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
            only = written and all(output.alias_info is not None for output in schema.returns)
            self._writes[func] = _Writes(written, len(schema.returns)) if only else None
        return self._writes[func]

    def _hollow(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """Return new outputs, by the meta kernel; it is asked once for arguments of the same shapes."""
        key: Hashable = (func, spec, tuple(_described(leaf) for leaf in leaves))
        if key not in self._outputs:
            self._outputs[key] = _outputs_of(func, leaves, spec)
        outputs, shape = self._outputs[key]
        if outputs is None:
            args, kwargs = tree_unflatten(leaves, spec)
            return func(*args, **kwargs)
        return tree_unflatten([_made(output, leaves) for output in outputs], shape)


def _tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of an operation. Its arguments are values and lists of values: no tree has to be walked."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, Tensor)]
    return found


def _is_cpu(device: torch.device | None) -> bool:
    return device is None or device.type == "cpu"


def _is_light(tensors: list[Tensor]) -> bool:
    largest = max(tensor.numel() for tensor in tensors)
    return largest <= SMALL or (
        largest <= INTEGERS and not any(tensor.is_floating_point() for tensor in tensors)
    )


def _described(leaf: Any) -> Hashable:
    """Return what the shapes of outputs depend on."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype)
    if isinstance(leaf, Hashable):
        return (type(leaf), leaf)  # 1 and 1.0 and True are other arguments
    return repr(leaf)


def _outputs_of(func: Any, leaves: list[Any], spec: Any) -> tuple[list[Any] | None, Any]:
    """Return the outputs, flat, and their structure; None: the operation makes something light out of nothing, and may
    run."""
    wide = func._opname in _NARROW_ON_META and _wide(leaves)
    on_meta = [_on_meta(leaf, torch.bfloat16 if wide else None) for leaf in leaves]
    args, kwargs = tree_unflatten(on_meta, spec)
    from_nothing = not any(isinstance(leaf, Tensor) for leaf in leaves)
    if from_nothing:
        kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
    outputs, shape = tree_flatten(func(*args, **kwargs))
    if from_nothing and _is_light(outputs):
        return None, shape
    place = {id(leaf): at for at, leaf in enumerate(on_meta) if isinstance(leaf, Tensor)}
    found = [_described_output(output, place) for output in outputs]
    if wide:
        found = [one._replace(dtype=torch.float32) if isinstance(one, _New) else one for one in found]
    return found, shape


def _wide(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype is torch.float32 for leaf in leaves)


def _described_output(output: Any, place: dict[int, int]) -> Any:
    if not isinstance(output, Tensor):
        return output
    if id(output) in place:
        return _Same(place[id(output)])
    return _New(tuple(output.shape), output.stride(), output.dtype)


def _on_meta(leaf: Any, dtype: torch.dtype | None = None) -> Any:
    """Move tensors to meta.
    dtype: of floats, in place of their own.
    """
    if isinstance(leaf, Tensor):
        own = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=own, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _made(output: Any, leaves: list[Any]) -> Any:
    if isinstance(output, _Same):
        return leaves[output.argument]
    if not isinstance(output, _New):
        return output
    extent = 1 + sum((n - 1) * step for n, step in zip(output.size, output.stride, strict=True))
    if extent <= SMALL or 0 in output.size:
        return torch.zeros(extent, dtype=output.dtype).as_strided(output.size, output.stride)
    # Fresh pages read as zeros until somebody writes, and nobody does: no sum of them is anything but finite.
    memory = mmap.mmap(
        -1, extent * output.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    )
    return torch.frombuffer(memory, dtype=output.dtype).as_strided(output.size, output.stride)


def _given_back(writes: _Writes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if writes.returns == 0:
        return None
    given = [kwargs[at] if isinstance(at, str) else args[at] for at in writes.arguments]
    return given[0] if writes.returns == 1 else tuple(given)
