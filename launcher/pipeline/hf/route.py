"""The way of one forward through a model of which a rank has some blocks only: it is entered at a block, with what
another stage sent, and left at a block, whose arguments are what the next stage needs.

The model's own code runs on every stage: it makes masks, positions and rotary tables from the token ids. What crosses
from stage to stage are arguments of blocks that were computed by parts and blocks (`origins.py`): those of the next
block, and those of later ones that are there already, as the embeddings of every layer are in some models. The first
forward of each kind of batch looks ahead for these, through stand-ins to the last block. What a block gets of a
stand-in and what nobody sent is found then, too, and refused.
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

BlockArgument = tuple[int, ArgumentPath]  # number of a block, and where in its arguments


@travels
@dataclass
class StageInputs(StageBoundary):
    """The facts that earlier stages tell later ones of a model's forward.

    Attributes:
        returns: class of a block -> what it returns, with a `TensorShape` for each tensor.
        outputs: module in front of the blocks -> what it returned.
        places: of each tensor that crosses, in order.
        others: sums of the values that each stage makes itself, in the arguments of the first block behind the cut.
        slicing: how sequences are sliced over tp.
    """

    returns: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    places: list[list[BlockArgument]] = field(default_factory=list)
    others: dict[ArgumentPath, float] = field(default_factory=dict)
    slicing: tuple[bool, int] | None = None

    def returns_of(self, kind: type) -> Any:
        """Return the blocks of one model that were not seen yet return what the others do."""
        return self.returns.get(kind.__qualname__, next(reversed(self.returns.values()), None))


class StageOutputs(Exception):
    """Ends a forward: everything that the next stage needs was seen."""


class Route:
    """The route of the forward under way.

    Args:
        names: of the blocks.
        like: a parameter of this rank, for device and dtype.

    Attributes:
        enter, leave: numbers of blocks; `leave` is the number of blocks where the forward goes to its end.
        arriving: what the stage before told.
        learned: the same with what is found here.
        origins: while `learned` is not known for this kind of batch; else None.
        running: a forward is under way.
        looking_ahead: it is behind this stage's blocks.
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
        """Begin a forward, which runs inside of what is returned.

        Args:
            received: for the places of `arriving`.
            learned: None: this is the first batch of its kind.
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
        """Return zeros for a tensor that is elsewhere; they take no memory."""
        zero: Tensor = torch.zeros((), dtype=shape.dtype, device=self.like().device)
        if zero.is_floating_point():
            return cast(Tensor, self.marked(zero, Origin.STAND_IN)).expand(shape.size)
        return cast(Tensor, self.marked(zero.expand(shape.size), Origin.STAND_IN))

    # ---- blocks of this stage ---------------------------------------------------------------

    def enter_at(self, index: int, call: CallArguments) -> CallArguments:
        """Return the arguments of a block that runs here, with what was received in its places."""
        arrived = self._arrived.get(index, {})
        if self.origins is not None:
            own = {slot: value for slot, value in slots_of(call).items() if slot not in arrived}
            for slot, value in own.items():
                if isinstance(value, Tensor) and Origin.STAND_IN in self.origins.of(value):
                    what = f"{_in_words(slot)} of {self.names[index]} was made by blocks other than the one before"
                    raise _uncuttable(self.names[self.enter], what)
            if index == self.enter > 0:
                self._check_others(own)
        return filled(call, arrived)

    def check_output(self, output: Any) -> None:
        """Check that what the whole model returns, on the last stage, does not lead back to a stand-in."""
        if self.origins is None or not self.enter:
            return
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and Origin.STAND_IN in self.origins.of(value):
                what = "what runs after the blocks uses more than the output of the last one"
                raise _uncuttable(self.names[self.enter], what)

    def _check_others(self, own: dict[ArgumentPath, Any]) -> None:
        """Check that what a stage makes itself is what the stage before it has."""
        others = self.arriving.others
        tensors = {slot: value for slot, value in own.items() if isinstance(value, Tensor)}
        for slot in {**others, **tensors}:
            if slot not in others or slot not in tensors or _sum(tensors[slot]) != others[slot]:
                what = f"{_in_words(slot)} is not the same on both sides"
                raise _uncuttable(self.names[self.enter], what)

    # ---- blocks behind it -------------------------------------------------------------------

    def leave_at(self, index: int, call: CallArguments) -> None:
        """Note that a block of a later stage was called. Raises `StageOutputs` where no other needs to be looked at."""
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
        """Find, the first time, which arguments of a block cross."""
        for slot, value in slots_of(call).items():
            if not isinstance(value, Tensor):
                continue
            origin = origins.of(value)
            if index == self.leave and origin == Origin.HERE | Origin.STAND_IN:
                what = f"{_in_words(slot)} is made of outputs of blocks on several stages"
                raise _uncuttable(self.names[index], what)
            if index == self.leave and origin == Origin.NOTHING:
                self.learned.others[slot] = _sum(value)
            # later blocks take from what is shared what blocks before them put there
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
        """Return what the next stage needs, in the order of `learned.places`."""
        if not any(block == self.leave for places in self.learned.places for block, _ in places):
            raise _uncuttable(
                self.names[self.leave], "none of its arguments is the output of the block before"
            )
        self.learned.shapes = tuple(TensorShape.of(tensor) for tensor in self._crossing)
        found, self._crossing = tuple(self._crossing), []
        return found

    def end(self) -> None:
        """Let go of the tensors of this forward."""
        self.running, self._arrived, self._crossing, self.origins = False, {}, [], None


NO_PIPELINE = "take this model without pipeline stages, or write it as a PipelineModule"


def _sum(tensor: Tensor) -> float:
    return float(tensor.detach().double().nan_to_num().sum())


def _in_words(slot: ArgumentPath) -> str:
    return f"its argument {'.'.join(map(str, slot[1:]))}"


def _uncuttable(name: str, why: str) -> LauncherError:
    return LauncherError(
        f"the model cannot be cut before {name}: {why}", where="pipeline.stages", fix=NO_PIPELINE
    )
