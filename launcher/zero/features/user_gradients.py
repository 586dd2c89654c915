"""Gradients that user code discards or sets between backward and step.

At stages 0 and 1 `.grad` is a view of the kept gradient, and `FlatGradient` detects changes through it. If
the kept gradient is sharded or wider than the parameter, `.grad` is None between backwards and cannot reveal
a `zero_grad()`. Therefore torch's two `zero_grad` methods are wrapped, and the parameters that users hold are
`GradientElsewhere` objects, which intercept `p.grad = None`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from launcher.errors import LauncherError
from launcher.models.gradients import put_gradient, seen_gradient

if TYPE_CHECKING:
    from launcher.zero.model import ZeroModel


_DATA: Any = torch.Tensor.data


class WatchedLeaf(nn.Parameter):
    """A leaf with separate master weights. It records access to `.data`, which may be used to edit it."""

    zero_touched: bool

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        self.zero_touched = True
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)


logger = logging.getLogger("launcher")
Parameters = Callable[[Any], Iterable[Tensor]]

_models: Callable[[], Iterable[ZeroModel]] = list
engine_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""The optimizers that engines step."""


@cache
def follow_torch(models: Callable[[], Iterable[ZeroModel]]) -> None:
    """Wrap `zero_grad()` of modules and torch optimizers and the registration of gradient hooks, and hook the
    steps of other optimizers, so that ZeRO models are notified of them. The wrappers are on the classes,
    because `zero_grad()` may be called on any module that contains our parameters, at any depth.

    Args:
        models: returns the current models.
    """
    global _models
    _models = models
    _follow(nn.Module, lambda module: module.parameters())
    _follow(torch.optim.Optimizer, _parameters_of)
    _follow_hooks()
    register_optimizer_step_pre_hook(_refuse_foreign_step)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return chain(*(group["params"] for group in optimizer.param_groups))


def _follow(cls: Any, parameters_of: Parameters) -> None:
    torchs = cls.zero_grad

    @wraps(torchs)
    def zero_grad(self: Any, *args: Any, **keywords: Any) -> None:
        torchs(self, *args, **keywords)
        for model in _models():
            model.forget(parameters_of(self))

    cls.zero_grad = zero_grad


def _follow_hooks() -> None:
    """Keep user hooks on gradients ahead of ours, so that they run before the gradient is collected."""
    cls: Any = Tensor
    torchs = cls.register_post_accumulate_grad_hook

    @wraps(torchs)
    def register_post_accumulate_grad_hook(self: Any, hook: Callable[[Tensor], None]) -> Any:
        handle = torchs(self, hook)
        for model in _models():
            model.hooks.come_last(self)
        return handle

    cls.register_post_accumulate_grad_hook = register_post_accumulate_grad_hook


def _refuse_foreign_step(optimizer: torch.optim.Optimizer, args: object, keywords: object) -> None:
    """Raise before a step of an optimizer that the engine does not know, if it steps ZeRO parameters."""
    if optimizer in engine_optimizers:
        return
    models = list(_models())
    for parameter in _parameters_of(optimizer):
        if any(model.find_slot(parameter) is not None for model in models):
            raise LauncherError(
                f"{type(optimizer).__name__}.step() was called on parameters of an engine, with an "
                "optimizer that is not registered with the engine: gradients would be missing or only "
                "this rank's shard",
                where="optimizer.step()",
                fix="pass it as initialize(optimizer=...) and call engine.step(), or remove its step()",
            )


@cache
def warn_of_discard_once(rank: int) -> None:
    """Log a warning, once, that gradients of an unfinished step were discarded."""
    if rank == 0:
        logger.warning(
            "zero_grad() between the microbatches of a step discarded their gradients, as in PyTorch; "
            "if this is not intended, remove the call: step() clears the gradients itself (reported "
            "once)"
        )


class GradientElsewhere:
    """A parameter whose gradient is kept elsewhere: `.grad` is None between backwards. `p.grad = None`
    discards the kept gradient; setting a tensor raises an error."""

    @property
    def grad(self) -> Tensor | None:
        return seen_gradient(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise LauncherError(
                "a gradient cannot be set with p.grad = ...: the engine stores it sharded or in "
                "another dtype",
                where="zero_optimization.stage",
                fix="call deepspeed.utils.safe_set_full_grad(p, tensor) (launcher.engine.fragments) after backward",
            )
        put_gradient(self, None)
        for model in _models():
            model.forget([self])  # type: ignore[list-item]


class LeafElsewhere(GradientElsewhere, WatchedLeaf):
    """The class of a leaf whose gradient is kept elsewhere; copies of it are plain parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copy = nn.Parameter(self.data.clone(), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


class ClaimedLeaves:
    """Changes the class of plain leaves to one of ours until `remove`; leaves of other parameter classes are
    not changed.

    Args:
        elsewhere: leaves whose gradients are kept elsewhere.
        watched: leaves of which the optimizer steps another copy.
    """

    def __init__(self, elsewhere: Iterable[nn.Parameter], watched: Iterable[nn.Parameter]) -> None:
        self._leaves: list[nn.Parameter] = []
        for leaves, kind in ((elsewhere, LeafElsewhere), (watched, WatchedLeaf)):
            for leaf in leaves:
                if type(leaf) is nn.Parameter:
                    leaf.__class__ = kind
                    self._leaves.append(leaf)

    def remove(self) -> None:
        """Make the leaves plain parameters again."""
        for leaf in self._leaves:
            leaf.__class__ = nn.Parameter
