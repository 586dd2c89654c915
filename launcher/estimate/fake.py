"""Fake tensors: CPU tensors whose memory is mapped but never touched, so that they use no physical memory.

Inside `FakeMode`, an operation on large floating-point tensors allocates its outputs with the shapes, strides
and dtypes of its meta kernel, and computes nothing. Operations on integers, on small tensors and on views
run, so that the values that control flow depends on (positions, masks, flags) are real. Everything else
behaves as usual: addresses, storages, reference counts, process groups.
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

SMALL = 1 << 14  # elements: operations on tensors up to this size really run
INTEGERS = 1 << 22  # the same if none of the tensors is floating-point
_NORESERVE = 0x4000  # MAP_NORESERVE on Linux; `mmap` has no constant for it before Python 3.13
_NARROW_ON_META = {"_grouped_mm"}  # meta kernels that reject fp32, which the CPU kernels support
_ALWAYS_RUN = {"resize_", "set_", "record_stream", "_local_scalar_dense", "is_nonzero", "equal", "is_pinned"}


class _New(NamedTuple):
    """An output that is a new tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Same(NamedTuple):
    """An output that is one of the arguments, by its index in the flattened arguments."""

    argument: int


class _Writes(NamedTuple):
    """The arguments, by position or name, that an in-place operation writes, and how many it returns."""

    arguments: tuple[int | str, ...]
    returns: int


@contextmanager
def fused_dropout() -> Iterator[None]:
    """Make dropout inside the context one operation that saves a byte mask, as on GPUs, not a float mask.

    This patches the function, because a torch function mode is disabled in backward, where blocks are
    recomputed.
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
    """Runs the operations inside the context with fake tensors.

    Args:
        live: counts all tensors that are created.
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
        """Return fake outputs described by the meta kernel, which runs once per set of argument shapes."""
        key: Hashable = (func, spec, tuple(_described(leaf) for leaf in leaves))
        if key not in self._outputs:
            self._outputs[key] = _outputs_of(func, leaves, spec)
        outputs, shape = self._outputs[key]
        if outputs is None:
            args, kwargs = tree_unflatten(leaves, spec)
            return func(*args, **kwargs)
        return tree_unflatten([_made(output, leaves) for output in outputs], shape)


def _tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments, which are values or lists of values: no pytree is needed."""
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
    """Return a cache key for an argument: everything that the shapes of the outputs depend on."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype)
    if isinstance(leaf, Hashable):
        return (type(leaf), leaf)  # 1, 1.0 and True compare equal but are different arguments
    return repr(leaf)


def _outputs_of(func: Any, leaves: list[Any], spec: Any) -> tuple[list[Any] | None, Any]:
    """Return the flattened outputs and their structure.

    The outputs are None for a factory function of small tensors, which can run as it is.
    """
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
    """Move a tensor or device argument to meta; `dtype` replaces the dtype of floating-point tensors."""
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
    # Untouched pages read as zeros, and nothing writes to them, so every value computed from them is finite.
    memory = mmap.mmap(
        -1, extent * output.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    )
    return torch.frombuffer(memory, dtype=output.dtype).as_strided(output.size, output.stride)


def _given_back(writes: _Writes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if writes.returns == 0:
        return None
    given = [kwargs[at] if isinstance(at, str) else args[at] for at in writes.arguments]
    return given[0] if writes.returns == 1 else tuple(given)
