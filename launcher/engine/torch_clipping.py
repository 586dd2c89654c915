"""Redirects `torch.nn.utils.clip_grad_norm_()` on an engine's parameters to the engine.

The parameters' `.grad` is only this rank's share, or None. So the engine computes the norm, and clips when it
steps.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.engine.fragments import ENGINES
from launcher.errors import LauncherError
from launcher.zero.slot import ParamSlot

if TYPE_CHECKING:
    from launcher.engine.core import EngineCore

logger = logging.getLogger("launcher")


@cache
def follow_clipping() -> None:
    """Redirect torch's clipping functions to the engines, under every name that a module has for them."""
    torchs = torch.nn.utils.clip_grad_norm_

    @wraps(torchs)
    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = _as_list(parameters)
        for engine, slots in _owners(given):
            norm = clip_step(engine, slots, float(max_norm), float(norm_type))
            if error_if_nonfinite and not math.isfinite(norm):
                raise RuntimeError(f"the norm of the gradients is {norm}, so they cannot be clipped")
            return torch.tensor(norm, device=engine.device)
        return torchs(given, max_norm, norm_type, error_if_nonfinite, foreach)

    others = [getattr(torch.nn.utils, name, None) for name in ("clip_grad_value_", "clip_grads_with_norm_")]
    _replace({torchs: clip_grad_norm_} | {other: _refusing(other) for other in others if other is not None})


def _refusing(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `torchs` that raises LauncherError for parameters of an engine."""

    @wraps(torchs)
    def refuse(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = _as_list(parameters)
        for _ in _owners(given):
            raise LauncherError(
                f"{torchs.__name__}() is not supported: the engine owns the gradients of these parameters",
                where=f"{torchs.__name__}()",
                fix="clip by norm with gradient_clipping in the JSON or clip_grad_norm_(), or change "
                "individual gradients with deepspeed.utils.safe_get_full_grad() and "
                "safe_set_full_grad()",
            )
        return torchs(given, *args, **kwargs)

    return refuse


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _owners(parameters: list[Tensor]) -> Iterator[tuple[EngineCore, set[ParamSlot]]]:
    """Yield each engine that owns some of these parameters, with their slots."""
    for engine in list(ENGINES):
        slots = {slot for slot in map(engine.zero.find_slot, parameters) if slot is not None}
        if slots:
            yield engine, slots


def _replace(functions: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replace functions in all modules, in a single pass, because there are about 100,000 names."""
    by = {id(function): other for function, other in functions.items()}
    for module in list(sys.modules.values()):
        names: dict[str, Any] = getattr(module, "__dict__", {})
        # nearly always, and no Python code runs for each name
        if by.keys().isdisjoint(map(id, names.values())):
            continue
        for name in [name for name, value in names.items() if id(value) in by]:
            names[name] = by[id(names[name])]


def clip_step(engine: EngineCore, slots: set[ParamSlot], limit: float, norm_type: float) -> float:
    """Clip the next step; return the norm of its gradients.

    Args:
        slots: the slots of the given parameters.

    Raises:
        LauncherError: another norm than the 2-norm was requested, or only a part of the model was given.
    """
    if norm_type != 2.0:
        raise _refusal(f"with norm_type {norm_type:g}", "omit norm_type: the engine clips by the 2-norm")
    if not engine.zero.policy.compute_norm:
        raise _refusal("with zero_optimization.compute_grad_norm false", "set it to true, or remove the call")
    left = [slot for g in engine.zero.gradients for slot in g.flat.slots if slot not in slots]
    if left:
        raise _refusal(
            f"for a part of the model ('{left[0].name}' is not in it)",
            "pass engine.module.parameters(), or change individual gradients with "
            "deepspeed.utils.safe_get_full_grad() and safe_set_full_grad()",
        )
    if engine.managed_gradient_accumulation() and not engine.is_gradient_accumulation_boundary():
        _tell_of_microbatches(engine.mesh.rank)
        return engine.get_global_grad_norm() or 0.0
    engine.zero.reducer.flush()
    norm = engine.clipping.grad_norm(engine)
    engine.clipping.set_max_norm(limit)
    return norm


def _refusal(what: str, fix: str) -> LauncherError:
    return LauncherError(
        f"clip_grad_norm_() {what} is not supported: the engine owns these gradients",
        where="clip_grad_norm_()",
        fix=fix,
    )


@cache
def _tell_of_microbatches(rank: int) -> None:
    if rank == 0:
        logger.warning(
            "clip_grad_norm_() between the microbatches of a step has no effect: the accumulated "
            "gradients are clipped in the step (reported once)"
        )
