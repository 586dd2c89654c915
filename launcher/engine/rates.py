"""The learning rate of a run that resumes from a checkpoint; a message says which counts if the JSON differs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from launcher.optim.schedules import Schedule

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

logger = logging.getLogger("launcher")


def tell_rates(engine: Engine, meta: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> None:
    """Rank 0 tells, in one line, which learning rate counts after a load of a checkpoint with other ones in its JSON.

    Args:
        meta: of the checkpoint.
        optimizer, scheduler: whether their states were loaded; they have learning rates.
    """
    if engine.global_rank or not (optimizer or scheduler):
        return
    if scheduler and engine.lr_scheduler is not None and meta["scheduler"] is None:
        logger.warning(
            "the checkpoint has no schedule state: the schedule of this run starts at its first step"
        )
        return
    if optimizer and engine.lr_scheduler is None and meta["scheduler"] is not None:
        rate = f"{engine.get_lr()[0]:g}"
        logger.warning(
            "the checkpoint had a schedule, and this run has none: the learning rate stays at %s", rate
        )
        return
    changes = list(_changes(meta.get("config"), engine.config))
    if not changes:
        return
    if scheduler and isinstance(engine.lr_scheduler, Schedule):
        what = "the schedule continues with the JSON's present values, after one more step at the checkpoint's rate"
    elif scheduler and engine.lr_scheduler is not None:
        what = "using the checkpoint's value, which its schedule keeps; load_lr_scheduler_states=False starts over"
    elif optimizer and engine.lr_scheduler is None:
        what = f"using the checkpoint's value, {engine.get_lr()[0]:g}; engine.set_lr(), or a scheduler, changes it"
    else:
        return
    logger.warning("learning rate: %s: %s", "; ".join(changes), what)


def _changes(was: Any, now: Any) -> Iterator[str]:
    for section in ("optimizer", "scheduler"):
        before, after = _params(was, section), _params(now, section)
        for key in sorted(before.keys() & after.keys()):
            if "lr" in key.split("_") and before[key] != after[key]:
                yield f"{section}.params.{key} was {before[key]} in the checkpoint and is {after[key]}"


def _params(config: Any, section: str) -> Mapping[str, Any]:
    found = config.get(section) if isinstance(config, Mapping) else None
    params = found.get("params") if isinstance(found, Mapping) else None
    return params if isinstance(params, Mapping) else {}
