"""Access to the fp32 weights, optimizer states and gradient of one parameter, wherever they are stored.

These are DeepSpeed's functions, under the same names. "full" is the unsharded local parameter as one tensor
of its shape (a slice along tp if layers are split), assembled from all dp ranks: a collective that every rank
must call. "local" is the flat piece that this rank's optimizer steps; it is empty if the rank owns none of
the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.comm import all_reduce
from launcher.errors import LauncherError
from launcher.offload.offloaded import OffloadedSlice
from launcher.zero.features.discard import local_gradient
from launcher.zero.gradients import FlatGradient
from launcher.zero.slot import ParamSlot

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
"""All engines of this process."""


# ---- full ----------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return the full master weights, or None if the parameter belongs to no engine."""
    return _full(param, _weights)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return the full optimizer state of a key such as "exp_avg", or None before it exists."""
    return _full(param, lambda place: _state(place, optim_state_key))


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the full gradient, or None if there is none.

    From the end of backward at an accumulation boundary until the step, this is the mean over dp. Before
    that, it is the local gradient that this rank has accumulated since the last reduction.
    """
    place = _found(param)
    return _own(place) if place is not None and place.local else _full(param, _gradient)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the master weights and the parameter. Every rank passes the same full value."""
    _set(param, _weights, value)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set an optimizer state from a full value."""
    _set(param, lambda place: _state(place, optim_state_key), value)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the gradient (mean over dp) for the step; before the reduction, this rank's local gradient."""
    _set(param, _gradient, value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Replace the gradients of parameters that have one by `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


# ---- local ---------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """Return this rank's piece of the master weights, flat [owned elements]."""
    return _local(param, _weights)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return this rank's piece of an optimizer state."""
    return _local(param, lambda place: _state(place, optim_state_key))


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """Return this rank's piece of the gradient; see `safe_get_full_grad`."""
    place = _found(param)
    if place is None or not place.local:
        return _local(param, _gradient)
    own = _own(place)
    return None if own is None else own.reshape(-1)[place.start : place.stop].float()


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set this rank's piece of the master weights, and update the parameter. Every rank must call it."""
    _set(param, _weights, value, local=True)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's piece of an optimizer state."""
    _set(param, lambda place: _state(place, optim_state_key), value, local=True)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Set this rank's piece of the gradient."""
    _set(param, _gradient, value, local=True)


# ---- lookup --------------------------------------------------------------------------------------


class _ParamFragment:
    """A trainable parameter of an engine.

    Attributes:
        start, stop: the range of its elements that this rank's optimizer steps.
    """

    def __init__(self, engine: Engine, slot: ParamSlot) -> None:
        self.engine, self.slot, self.flat = engine, slot, slot.flat
        found = [(start, stop) for one, start, stop in self.flat.overlaps(self.flat.owned) if one is slot]
        self.start, self.stop = found[0] if found else (0, 0)
        self.size = self.stop - self.start

    @property
    def gradient(self) -> FlatGradient:
        return next(one for one in self.engine.zero.gradients if one.flat is self.flat)

    @property
    def local(self) -> bool:
        """Return whether its gradient has not been reduced yet."""
        return self.engine.zero.reducer.holds_local(self.gradient)

    @property
    def divisor(self) -> float:
        """Return the divisor that turns the stored gradient into the mean, or, before the reduction, into
        this rank's own gradient."""
        return self.engine.divisor_of_local() if self.local else self.engine.gradient_divisor()

    @property
    def at(self) -> slice:
        """Return its slice within the owned range of the flat buffer."""
        first = self.slot.offset - self.flat.owned.start
        return slice(first + self.start, first + self.stop)


FragmentGetter = Callable[[_ParamFragment], Any]


def _found(param: Tensor) -> _ParamFragment | None:
    for engine in ENGINES:
        slot = engine.zero.slot_of(param)
        if slot is not None and slot.flat.trainable and engine.optimizer is not None:
            return _ParamFragment(engine, slot)
    return None


def _place_of(param: Tensor) -> _ParamFragment:
    place = _found(param)
    if place is None:
        raise LauncherError(
            f"a tensor of shape {tuple(param.shape)} is not a trainable parameter of an engine with an optimizer",
            fix="pass one of engine.module.parameters()",
        )
    return place


@contextmanager
def _weights(place: _ParamFragment) -> Iterator[Tensor]:
    yield place.flat.master[place.at]
    place.flat.rest(changed=True)


@contextmanager
def _state(place: _ParamFragment, key: str) -> Iterator[Tensor | None]:
    assert place.engine.optimizer is not None
    states = place.engine.optimizer.state_slices().get(place.slot.name, {})
    value = states.get(key)
    if isinstance(value, OffloadedSlice):
        yield value.load()
        value.of.write_back()
    else:
        yield value


@contextmanager
def _gradient(place: _ParamFragment) -> Iterator[Tensor | None]:
    gradient = place.gradient
    gradient.sync_with_leaves()
    yield gradient.owned[place.at] if gradient.kept else None
    if gradient.kept:
        gradient.rest()


def _own(place: _ParamFragment) -> Tensor | None:
    found = local_gradient(place.gradient, place.slot)
    return None if found is None else found.view(place.slot.shape) / place.divisor


def _full(param: Tensor, held: FragmentGetter) -> Tensor | None:
    place = _found(param)
    if place is None:
        return None
    flat, slot = place.flat, place.slot
    with held(place) as mine:
        one = mine is not None and mine.dim() == 0  # a 0-dim state, copied on each rank that owns elements
        there = mine is not None and (held is not _gradient or slot.used)
        whole = torch.zeros(slot.numel + 2, dtype=torch.float32, device=flat.pool.device)
        whole[-2:] = torch.tensor([float(there), float(there and one)])
        if mine is not None and (flat.shards_optim or flat.axis.rank == 0):
            whole[slice(0, 1) if one else slice(place.start, place.stop)] = mine.to(whole)
    all_reduce(whole, flat.axis, f"{flat.name}/fragment").wait()
    ranks, copies = whole[-2:].tolist()
    if not ranks:
        return None
    if copies:
        return whole[0] / (copies if flat.shards_optim else 1)
    return whole[:-2].view(slot.shape) / (place.divisor if held is _gradient else 1)


def _local(param: Tensor, held: FragmentGetter) -> Tensor | None:
    place = _found(param)
    if place is None:
        return None
    with held(place) as mine:
        if mine is None:  # a rank that owns none of the parameter has an empty piece
            return torch.empty(0, device=place.engine.device) if place.size == 0 else None
        return mine.float() / (place.divisor if held is _gradient else 1.0)


def _set(param: Tensor, held: FragmentGetter, value: Tensor, *, local: bool = False) -> None:
    """Copy a full value, or this rank's piece of one, and update the values that depend on it."""
    place = _place_of(param)
    _check(place, value, torch.Size([place.size]) if local else place.slot.shape)
    if held is _gradient and place.local:
        found = local_gradient(place.gradient, place.slot)
        whole = None if found is None else found.view(-1)
        mine = whole if whole is None or not local else whole[place.start : place.stop]
        _copy(mine, value.reshape(-1) * place.divisor, place, kept=found is not None)
        return
    with held(place) as mine:
        piece = value if local else value.reshape(-1)[place.start : place.stop]
        kept = held is not _gradient or place.gradient.kept
        _copy(mine, piece * place.divisor if held is _gradient else piece, place, kept=kept)
    if held is _gradient:
        place.slot.used = True
    if held is _weights:
        for pending in place.flat.publish():
            pending.wait()


def _check(place: _ParamFragment, value: Tensor, shape: torch.Size) -> None:
    if value.shape != shape:
        raise LauncherError(
            f"{place.slot.name} has shape {tuple(shape)} on this rank, but the value has shape "
            f"{tuple(value.shape)}",
            fix="pass a value of the same shape",
        )


def _copy(mine: Tensor | None, value: Tensor, place: _ParamFragment, *, kept: bool = True) -> None:
    """Copy the value into this rank's piece.

    Args:
        kept: False if no rank has the value now. Otherwise `mine` may be None on ranks that own no elements.
    """
    if mine is None and (place.size or not kept):
        raise LauncherError(
            f"{place.slot.name} does not have this value yet",
            fix="optimizer states exist after the first step, gradients after backward at an "
            "accumulation boundary",
        )
    if mine is not None:
        mine.copy_(value)
