"""Routes a forward through a model of which this rank has only some blocks: it enters at a block, with the
tensors that another stage sent, and leaves at a block, whose arguments are sent to the next stage.

The model's own code runs on every stage: it computes masks, positions and rotary tables from the token ids.
The tensors that cross between stages are block arguments computed by parts and blocks (`origins.py`): those
of the next block, and those of later blocks that exist already, such as the per-layer embeddings of some
models. The first forward of each kind of batch looks ahead for these, through stand-ins up to the last block.
It also rejects models in which a block argument derives from a stand-in and is not sent by another stage.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from launcher.errors import LauncherError
from launcher.pipeline.crossing import StageBoundary, TensorShape
from launcher.pipeline.hf.origins import Origin, Origins
from launcher.pipeline.hf.slots import ArgumentPath, CallArguments, filled, in_shared, slots_of
from launcher.pipeline.plain import travels

BlockArgument = tuple[int, ArgumentPath]  # index of a block, and a path in its arguments


@travels
@dataclass
class StageInputs(StageBoundary):
    """Facts about a model's forward that earlier stages send to later ones.

    Attributes:
        returns: class of a block -> its output, with a `TensorShape` for each tensor.
        outputs: module before the blocks -> its output, likewise.
        places: for each tensor that crosses, in order, the block arguments it is used as.
        others: checksums of the arguments that each stage computes itself, for the first block after the cut.
        slicing: how sequences are sliced over tp.
    """

    returns: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    places: list[list[BlockArgument]] = field(default_factory=list)
    others: dict[ArgumentPath, float] = field(default_factory=dict)
    slicing: tuple[bool, int] | None = None

    def returns_of(self, kind: type) -> Any:
        """Return the output of a block class; for one not seen yet, that of the others."""
        return self.returns.get(kind.__qualname__, next(reversed(self.returns.values()), None))


class StageOutputs(Exception):
    """Raised to end a forward once everything that the next stage needs is known."""


class Route:
    """The route of the current forward.

    Args:
        names: names of the blocks.
        like: returns a parameter of this rank, for device and dtype.

    Attributes:
        enter, leave: block indices; `leave` is the number of blocks if the forward runs to the end.
        arriving: facts received from the previous stage.
        learned: these facts, with those of this stage added.
        origins: set while `learned` is not known for this kind of batch; else None.
        running: whether a forward is running.
        looking_ahead: whether the forward is past this stage's blocks.
    """

    def __init__(self, names: list[str], like: Callable[[], Tensor]) -> None:
        self.names, self.like = names, like
        self.enter = self.leave = 0
        self.arriving = self.learned = StageInputs()
        self.origins: Origins | None = None
        self.running = self.looking_ahead = False
        self._arrived: dict[int, dict[ArgumentPath, Tensor]] = {}
        self._crossing: list[Tensor] = []

    def start(
        self,
        enter: int,
        leave: int,
        received: tuple[Tensor, ...],
        arriving: StageInputs,
        learned: StageInputs | None,
    ) -> AbstractContextManager[Any]:
        """Begin a forward, and return the context manager in which to run it.

        Args:
            received: the tensors for the places of `arriving`.
            learned: None for the first batch of its kind.
        """
        self.enter, self.leave, self.arriving = enter, leave, arriving
        self.origins = Origins() if learned is None else None
        self.learned = learned or StageInputs(dict(arriving.returns), dict(arriving.outputs))
        self.running, self.looking_ahead, self._crossing, self._arrived = True, False, [], {}
        probing = torch.enable_grad() if learned is None else nullcontext()
        with probing:
            received = self.marked(received, Origin.HERE)
        for tensor, places in zip(received, arriving.places, strict=True):
            for block, slot in places:
                self._arrived.setdefault(block, {})[slot] = tensor
        return probing

    def marked(self, values: Any, origin: Origin) -> Any:
        return values if self.origins is None else self.origins.mark(values, origin)

    def zeros(self, shape: TensorShape) -> Tensor:
        """Return zeros in place of a tensor of another stage; expanded from a scalar, they take no memory."""
        zero: Tensor = torch.zeros((), dtype=shape.dtype, device=self.like().device)
        if zero.is_floating_point():
            return cast(Tensor, self.marked(zero, Origin.STAND_IN)).expand(shape.size)
        return cast(Tensor, self.marked(zero.expand(shape.size), Origin.STAND_IN))

    # ---- blocks of this stage ---------------------------------------------------------------

    def enter_at(self, index: int, call: CallArguments) -> CallArguments:
        """Return the arguments of a block of this stage, with the received tensors in their places."""
        arrived = self._arrived.get(index, {})
        if self.origins is not None:
            own = {slot: value for slot, value in slots_of(call).items() if slot not in arrived}
            for slot, value in own.items():
                if isinstance(value, Tensor) and Origin.STAND_IN in self.origins.of(value):
                    what = (
                        f"{_in_words(slot)} of {self.names[index]} is computed by blocks other than "
                        "the previous one"
                    )
                    raise _uncuttable(self.names[self.enter], what)
            if index == self.enter > 0:
                self._check_others(own)
        return filled(call, arrived)

    def check_output(self, output: Any) -> None:
        """Check that the model's output, on the last stage, does not derive from a stand-in."""
        if self.origins is None or not self.enter:
            return
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and Origin.STAND_IN in self.origins.of(value):
                what = "the modules after the blocks use more than the output of the last block"
                raise _uncuttable(self.names[self.enter], what)

    def _check_others(self, own: dict[ArgumentPath, Any]) -> None:
        """Check that the arguments a stage computes itself equal those of the previous stage."""
        others = self.arriving.others
        tensors = {slot: value for slot, value in own.items() if isinstance(value, Tensor)}
        for slot in {**others, **tensors}:
            if slot not in others or slot not in tensors or _sum(tensors[slot]) != others[slot]:
                what = f"{_in_words(slot)} differs between the two stages"
                raise _uncuttable(self.names[self.enter], what)

    # ---- blocks of later stages -------------------------------------------------------------

    def leave_at(self, index: int, call: CallArguments) -> None:
        """Handle the call of a block of a later stage. Raises `StageOutputs` when no further block is
        needed."""
        call = filled(call, self._arrived.get(index, {}))
        if self.origins is not None:
            self._find(index, call, self.origins)
            self.looking_ahead = True
            if index == len(self.names) - 1:
                raise StageOutputs
            return
        values = slots_of(call)
        while len(self._crossing) < len(self.learned.places):
            block, slot = self.learned.places[len(self._crossing)][0]
            if block != index:
                return
            self._crossing.append(values[slot])
        raise StageOutputs

    def _find(self, index: int, call: CallArguments, origins: Origins) -> None:
        """Determine, in the first forward, which arguments of a block cross to the next stage."""
        for slot, value in slots_of(call).items():
            if not isinstance(value, Tensor):
                continue
            origin = origins.of(value)
            if index == self.leave and origin == Origin.HERE | Origin.STAND_IN:
                what = f"{_in_words(slot)} is computed from outputs of blocks on several stages"
                raise _uncuttable(self.names[index], what)
            if index == self.leave and origin == Origin.NOTHING:
                self.learned.others[slot] = _sum(value)
            # Later blocks read shared containers themselves: their contents cross once, at the first block.
            if origin == Origin.HERE and (index == self.leave or not in_shared(call, slot)):
                self._let_cross(value, (index, slot))

    def _let_cross(self, value: Tensor, place: BlockArgument) -> None:
        for tensor, places in zip(self._crossing, self.learned.places, strict=True):
            if tensor is value:
                places.append(place)
                return
        self._crossing.append(value)
        self.learned.places.append([place])

    def crossing(self) -> tuple[Tensor, ...]:
        """Return the tensors that the next stage needs, in the order of `learned.places`."""
        if not any(block == self.leave for places in self.learned.places for block, _ in places):
            raise _uncuttable(
                self.names[self.leave], "none of its arguments is the output of the previous block"
            )
        self.learned.shapes = tuple(TensorShape.of(tensor) for tensor in self._crossing)
        found, self._crossing = tuple(self._crossing), []
        return found

    def end(self) -> None:
        """Release the tensors of this forward."""
        self.running, self._arrived, self._crossing, self.origins = False, {}, [], None


NO_PIPELINE = "train this model without pipeline stages, or rewrite it as a PipelineModule"


def _sum(tensor: Tensor) -> float:
    return float(tensor.detach().double().nan_to_num().sum())


def _in_words(slot: ArgumentPath) -> str:
    return f"its argument {'.'.join(map(str, slot[1:]))}"


def _uncuttable(name: str, why: str) -> LauncherError:
    return LauncherError(
        f"the model cannot be split before {name}: {why}", where="pipeline.stages", fix=NO_PIPELINE
    )
