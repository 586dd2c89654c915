"""The way of one forward through a model of which a rank has some blocks only: it is entered at a block, with what
another stage sent, and left at a block, whose arguments are what the next stage needs.

The model's own code runs on every stage: it makes masks, positions and rotary tables from the token ids. What crosses
from stage to stage are the arguments of a block that depend on the embeddings, found by asking autograd.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from launcher.errors import ElsewhereError, LauncherError
from launcher.pipeline.crossing import Crossing, Shape

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Learned(Crossing):
    """What earlier stages tell later ones of a model's forward.

    Attributes:
        returns: class of a block -> what it returns, with a `Shape` for each tensor.
        outputs: module in front of the blocks -> what it returned.
        leaves: number of leaves in the arguments of a block.
        positions: which of them cross.
        others: sums of the leaves that each stage makes itself, by position.
        slicing: how sequences are sliced over tp.
    """

    returns: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    leaves: int = 0
    positions: tuple[int, ...] = ()
    others: dict[int, float] = field(default_factory=dict)
    slicing: tuple[bool, int] | None = None


class Left(Exception):
    """Ends a forward: the block after the last one of this stage was called."""

    def __init__(self, call: Call) -> None:
        self.call = call


class Route:
    """Of the forward under way.

    Attributes:
        enter, leave: numbers of blocks; `leave` is the number of blocks where the forward goes to its end.
        received: stands in for the arguments of block `enter` that cross, as `arriving` says.
        learned: what earlier stages told, and what is found here.
        first_time: `learned` was not known for this kind of batch.
    """

    def __init__(self) -> None:
        self.enter = self.leave = 0
        self.received: tuple[Tensor, ...] = ()
        self.arriving = self.learned = Learned()
        self.first_time = False

    def entered(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments of the first block here, with what was received in its places."""
        leaves, spec = tree_flatten((args, kwargs))
        arriving = self.arriving
        if len(leaves) != arriving.leaves:
            raise _crosses_more(name, f"it gets {arriving.leaves} values there and {len(leaves)} here")
        if self.first_time:
            _check_others(name, leaves, arriving.others)
        for position, tensor in zip(arriving.positions, self.received, strict=True):
            leaves[position] = tensor
        call: Call = tree_unflatten(leaves, spec)
        return call

    def crossing(self, name: str, call: Call) -> tuple[Tensor, ...]:
        """What the next stage needs of the arguments of its first block; finds out which they are the first time."""
        leaves, _ = tree_flatten(call)
        if self.first_time:
            positions = tuple(
                i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
            )
            if not positions:
                raise _crosses_more(name, "none of its arguments depends on the embeddings")
            self.learned.leaves, self.learned.positions = len(leaves), positions
            self.learned.others = {
                i: _sum(leaf)
                for i, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and i not in positions
            }
        crossing = tuple(leaves[position] for position in self.learned.positions)
        self.learned.shapes = tuple(Shape.of(tensor) for tensor in crossing)
        return crossing


class Elsewhere(nn.Module):
    """Stands for a module that does not run in this forward. It has its plain attributes: models ask blocks for the
    kind of their attention.

    Args:
        where: the module's name and stage, in words.
    """

    def __init__(self, module: nn.Module, where: str, route: Route) -> None:
        super().__init__()
        own = set(self.__dict__)
        self.__dict__.update({key: value for key, value in module.__dict__.items() if key not in own})
        self.__dict__.pop("forward", None)
        self.where, self.route = where, route

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise ElsewhereError(
                f"{self.__dict__.get('where')}: here is no {name!r} of it",
                fix="ask on the ranks of that stage, or for the whole model: engine.save_16bit_model()",
            ) from None


class BlockElsewhere(Elsewhere):
    """A block."""

    def __init__(self, block: nn.Module, where: str, route: Route, index: int) -> None:
        super().__init__(block, where, route)
        self.of, self.index = type(block).__qualname__, index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.index == self.route.leave:
            raise Left((args, kwargs))
        if self.index > self.route.enter:
            raise LauncherError(f"block {self.index} runs out of turn", where="pipeline", fix=_NO_PIPELINE)
        states = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
        template = self.route.learned.returns[self.of]
        return tree_map(lambda value: states if isinstance(value, Shape) else value, template)


class PartElsewhere(Elsewhere):
    """A part before or after the blocks. In front of the blocks it gives zeros of the shape that the part gave on the
    first stage: what they lead to is replaced at the first block."""

    def __init__(self, part: nn.Module, where: str, route: Route, name: str, *, before: bool) -> None:
        super().__init__(part, where, route)
        self.name, self.before = name, before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        template = self.route.learned.outputs.get(self.name) if self.before else None
        if template is None:
            raise LauncherError(
                f"{self.name} runs on a stage that does not have it", where="pipeline", fix=_NO_PIPELINE
            )
        device = next(
            (leaf.device for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)), None
        )

        def zeros(value: Any) -> Any:
            if not isinstance(value, Shape):
                return value
            return torch.zeros((), dtype=value.dtype, device=device).expand(value.size)

        return tree_map(zeros, template)


_NO_PIPELINE = "take this model without pipeline stages, or write it as a PipelineModule"


def _sum(tensor: Tensor) -> float:
    return float(tensor.detach().double().nan_to_num().sum())


def _check_others(name: str, leaves: list[Any], others: dict[int, float]) -> None:
    """What a stage makes itself must be what the stage before it has."""
    for position, total in others.items():
        leaf = leaves[position]
        if not isinstance(leaf, Tensor) or _sum(leaf) != total:
            raise _crosses_more(name, f"its argument {position} is another one than on the stage before")


def _crosses_more(name: str, why: str) -> LauncherError:
    return LauncherError(
        f"the model cannot be cut before {name}: {why}", where="pipeline.stages", fix=_NO_PIPELINE
    )
