"""Memory traces: the memory use of one microbatch, recorded as it runs, as segments between marks.

A segment contains the peak and the final change in memory relative to its start. A mark is the event between
two segments. The memory of parameters and their gradients is not included: the replay of a trace adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from launcher.estimate.live import LiveBytes
from launcher.models.activation import recomputing


class TraceEvent(StrEnum):
    """The kind of a mark."""

    USE = "use"  # the forward of a module begins
    LEAVE = "leave"  # the forward of a module has ended
    TURN = "turn"  # the forward of the model has ended, and its backward begins
    ENTER = "enter"  # a gradient has reached the outputs of a module, or its recomputation begins
    GRADIENT = "gradient"  # the gradient of a parameter is ready


@dataclass(frozen=True, slots=True)
class TraceSegment:
    """Bytes relative to the start of the segment: the peak, and the change at the end."""

    peak: int
    change: int


@dataclass(frozen=True, slots=True)
class TraceMark:
    """An event.

    Args:
        name: name of a module or a parameter; relative to the block if it starts with ".", "" for the block.
        nbytes: bytes of a gradient; 0 if the gradient is deferred.
        own: whether the layer itself could add the weight gradient in place (`weight_gradients.py`).
    """

    event: TraceEvent
    name: str = ""
    nbytes: int = 0
    own: bool = False


Items = list[TraceSegment | TraceMark]


@dataclass
class BlockTrace:
    """The events from the first mark of a block to the first mark of the next block.

    Attributes:
        kept: bytes saved on the device from the block's forward to its backward.
    """

    forward: Items = field(default_factory=list)
    backward: Items = field(default_factory=list)

    @property
    def kept(self) -> int:
        return sum(item.change for item in self.forward if isinstance(item, TraceSegment))


@dataclass
class MemoryTrace:
    """The events of one microbatch.

    Args:
        before: forward before the first block.
        blocks: one trace per block, in order; that of the first block includes the rest of the backward.
        after: everything after the blocks, to the loss and back.
    """

    before: BlockTrace = field(default_factory=BlockTrace)
    blocks: list[BlockTrace] = field(default_factory=list)
    after: BlockTrace = field(default_factory=BlockTrace)


class TraceRecorder:
    """Records a trace.

    Args:
        live: counts all tensors.
        model: model with parameter values; each gradient is removed as soon as it is ready.
        blocks: names of the blocks.
        others: names of the other modules whose use is marked.
        called: parameter name -> the name to record for it, where they differ.
    """

    def __init__(
        self,
        live: LiveBytes,
        model: nn.Module,
        blocks: list[str],
        others: list[str],
        called: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._live, self._blocks = live, {name: place for place, name in enumerate(blocks)}
        self._model, self._others, self._called = model, others, called
        self._entered: set[str] = set()
        self._on = False
        self._own: set[int] = set()
        self.trace = MemoryTrace()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the microbatch that runs inside the context."""
        self.trace = MemoryTrace(blocks=[BlockTrace() for _ in self._blocks])
        self._into = self.trace.before.forward
        self._entered.clear()
        self._begin()
        self._on = True
        yield
        self.stop()

    def stop(self) -> None:
        """Stop recording at the end of the microbatch."""
        if self._on:
            self._stretch()
            self._on = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Register the hooks on the model inside the context."""
        handles: list[Any] = []
        for name in (*self._blocks, *self._others):
            module = self._model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(self._before(name), prepend=True))
            handles.append(module.register_forward_hook(self._after(name)))
        for own, leaf in self._model.named_parameters():
            name = self._called.get(own, own)
            if leaf.requires_grad:
                handles.append(leaf.register_post_accumulate_grad_hook(self._arrival(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def turn(self) -> None:
        """Mark the end of the model's forward and the start of its backward."""
        self.mark(TraceEvent.TURN)

    def mark(self, event: TraceEvent, name: str = "", nbytes: int = 0, *, own: bool = False) -> None:
        """Append the segment up to now and a mark."""
        if not self._on:
            return
        self._stretch()
        place = self._blocks.get(name)
        trace = self.trace
        if event is TraceEvent.USE and place is not None:
            self._into = trace.blocks[place].forward
        elif event is TraceEvent.TURN:
            self._into = trace.after.backward
        elif event is TraceEvent.ENTER and place is not None:
            self._into = trace.blocks[place].backward
        self._into.append(TraceMark(event, name, nbytes, own))
        if event is TraceEvent.LEAVE and place == len(self._blocks) - 1:
            self._into = trace.after.forward

    # ---- hooks ------------------------------------------------------------------------------

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if recomputing():
                self._enter(name)
            else:
                self.mark(TraceEvent.USE, name)

        return before

    def _after(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if recomputing():
                return
            self.mark(TraceEvent.LEAVE, name)
            outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            if outputs:
                register_multi_grad_hook(outputs, lambda _: self._enter(name), mode="any")

        return after

    def _enter(self, name: str) -> None:
        if name not in self._entered:
            self._entered.add(name)
            self.mark(TraceEvent.ENTER, name)

    def note_own(self, leaf: Tensor) -> None:
        """Note that a layer could add its weight gradient in place, and decline (see `GradientBuffer`)."""
        self._own.add(id(leaf))

    def _arrival(self, name: str) -> Callable[[Tensor], None]:
        def arrived(leaf: Tensor) -> None:
            grad, leaf.grad = leaf.grad, None
            nbytes = 0 if grad is None else grad.numel() * grad.element_size()
            del grad
            self.mark(TraceEvent.GRADIENT, name, nbytes, own=id(leaf) in self._own)

        return arrived

    # ---- segments --------------------------------------------------------------------------

    def _begin(self) -> None:
        self._live.restart()
        self._start = self._live.now

    def _stretch(self) -> None:
        self._into.append(TraceSegment(self._live.peak - self._start, self._live.now - self._start))
        self._begin()


def change_of(items: Items) -> int:
    """Return the total change in bytes over the items."""
    return sum(item.change for item in items if isinstance(item, TraceSegment))


def relative(items: Items, block: str) -> Items:
    """Return the items with names inside a block made relative to the block."""
    return [
        replace(item, name=item.name.removeprefix(block))
        if isinstance(item, TraceMark) and (item.name == block or item.name.startswith(f"{block}."))
        else item
        for item in items
    ]


def absolute(mark: TraceMark, block: str) -> str:
    """Return the full name of a mark in a block's trace."""
    inside = mark.name.startswith(".") or (not mark.name and mark.event is not TraceEvent.TURN)
    return block + mark.name if inside else mark.name
