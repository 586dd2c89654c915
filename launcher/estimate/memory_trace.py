"""A memory trace: what one microbatch does to memory, written down as it runs: segments between marks.

A segment says how much more memory there was at most than at its start, and how much more at its end. A mark says what
happened between two segments. Memory of parameters and of their gradients is not in it: who replays a trace knows it.
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
    LEAVE = "leave"  # it has ended
    TURN = "turn"  # the forward of the model has ended, and its backward begins
    ENTER = "enter"  # a gradient has reached the outputs of a module, or it is recomputed
    GRADIENT = "gradient"  # that of a parameter is there


@dataclass(frozen=True, slots=True)
class TraceSegment:
    """Bytes above those at its start: the most, and at its end."""

    peak: int
    change: int


@dataclass(frozen=True, slots=True)
class TraceMark:
    """An event.

    Args:
        name: of a module or a parameter; what begins with "." is inside of a block, and "" is the block.
        nbytes: of a gradient; 0: it is put off.
        own: its layer computes the gradient of its weight, and could add it in place (`weight_gradients.py`).
    """

    event: TraceEvent
    name: str = ""
    nbytes: int = 0
    own: bool = False


Items = list[TraceSegment | TraceMark]


@dataclass
class BlockTrace:
    """The events from the first mark of a block to that of the next one.

    Args:
        kept: bytes on the device from its forward to its backward.
    """

    forward: Items = field(default_factory=list)
    backward: Items = field(default_factory=list)

    @property
    def kept(self) -> int:
        return sum(item.change for item in self.forward if isinstance(item, TraceSegment))


@dataclass
class MemoryTrace:
    """One microbatch.

    Args:
        before: what runs in front of the blocks.
        blocks: in their order; the last gradients of what runs in front come with the first one.
        after: what runs behind them, to the loss and back.
    """

    before: BlockTrace = field(default_factory=BlockTrace)
    blocks: list[BlockTrace] = field(default_factory=list)
    after: BlockTrace = field(default_factory=BlockTrace)


class TraceRecorder:
    """Writes a trace.

    Args:
        live: sees all tensors.
        model: its parameters have values; their gradients are taken away as they come.
        blocks: names of modules.
        others: of the other modules whose use is marked.
        called: parameters that are marked under another name than their own.
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
        """Inside, a microbatch runs."""
        self.trace = MemoryTrace(blocks=[BlockTrace() for _ in self._blocks])
        self._into = self.trace.before.forward
        self._entered.clear()
        self._begin()
        self._on = True
        yield
        self.stop()

    def stop(self) -> None:
        """The microbatch is over."""
        if self._on:
            self._stretch()
            self._on = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the model's hooks are on."""
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
        """The backward begins."""
        self.mark(TraceEvent.TURN)

    def mark(self, event: TraceEvent, name: str = "", nbytes: int = 0, *, own: bool = False) -> None:
        """Something happens."""
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
        """Note that a layer computes the gradient of its weight; it leaves that to autograd. See `GradientBuffer`."""
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
    """Return the bytes that are held more after the items than before."""
    return sum(item.change for item in items if isinstance(item, TraceSegment))


def relative(items: Items, block: str) -> Items:
    """Return the same with names inside of a block that begin there."""
    return [
        replace(item, name=item.name.removeprefix(block))
        if isinstance(item, TraceMark) and (item.name == block or item.name.startswith(f"{block}."))
        else item
        for item in items
    ]


def absolute(mark: TraceMark, block: str) -> str:
    """Return the name of a mark, for a block."""
    inside = mark.name.startswith(".") or (not mark.name and mark.event is not TraceEvent.TURN)
    return block + mark.name if inside else mark.name
