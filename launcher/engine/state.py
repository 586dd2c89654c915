"""The contents of a checkpoint, by logical parameter, and their conversion from and to an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.checkpoint.place_in_schedule import steps_in_schedule
from launcher.checkpoint.slices import FlatSlice
from launcher.checkpoint.tags import tag_path
from launcher.cluster.secret import without_secrets
from launcher.comm.plain import decode, encode
from launcher.engine import report
from launcher.engine.fitting import Stored, look, parts_of, stored_name
from launcher.engine.random_state import random_states, restore_random_states
from launcher.engine.rates import state_at, tell_options, tell_rates
from launcher.engine.whole import tied_names
from launcher.errors import CheckpointError
from launcher.models.settings import settings_of
from launcher.models.state_names import persistent_buffers
from launcher.offload.offloaded import OffloadedSlice, PrefetchWindow, in_turn
from launcher.optim.saved_groups import saved_groups, schedule_of
from launcher.zero import ParamSlice

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

logger = logging.getLogger("launcher")

# Names in a checkpoint: model/<parameter>, buffer/<buffer>, optimizer/<state>/<parameter> (shaped like the
# parameter), scalar/<state>/<parameter> (0-dim: step counts), number/<state>/<parameter> (Python numbers),
# rng*/<place>
LogicalTensors = dict[str, Tensor | FlatSlice]


def save_state(
    engine: Engine,
    directory: Path,
    tag: str,
    client_state: dict[str, Any],
    *,
    exclude_frozen: bool = False,
    latest: bool = True,
) -> None:
    """Write the checkpoint DIRECTORY/TAG: each rank writes its slices of its stage. Collective."""
    with in_turn() as window:
        tensors = _all_tensors(engine, window, exclude_frozen=exclude_frozen)
        engine.saver.save(directory, tag, tensors, _meta(engine, client_state), latest)


def keep_state(engine: Engine, client_state: dict[str, Any], then: Callable[[], None] = lambda: None) -> None:
    """Store the state in the memory of the nodes (`PeerMemory`), then call `then`. Collective."""
    with in_turn() as window:
        tensors = _all_tensors(engine, window)
        engine.saver.keep(engine.global_steps, tensors, _meta(engine, client_state), then)


def _all_tensors(engine: Engine, window: PrefetchWindow, *, exclude_frozen: bool = False) -> LogicalTensors:
    tensors: LogicalTensors = {}
    for piece in _written(engine):
        if not (exclude_frozen and not engine.zero.slots[piece.name].leaf.requires_grad):
            tensors[f"model/{piece.name}"] = _flat_slice(engine, piece, piece.part, window)
    return tensors | _buffers(engine) | _optimizer_state(engine, window) | _random_states(engine)


def load_state(
    engine: Engine,
    directory: Path,
    tag: str | None,
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    counters: bool,
    frozen: bool = True,
    allow_model_changes: bool = False,
) -> tuple[str | None, dict[str, Any]]:
    """Load the checkpoint DIRECTORY/TAG (default: the latest). Collective. See Engine.load_checkpoint."""
    found = engine.saver.find(directory, tag, missing_ok=tag is None)
    if found is None:
        return None, {}
    tag, meta = found[0], decode(found[1])
    path = tag_path(directory, tag)
    stepper = engine.optimizer if optimizer else None
    stored = look(  # before anything is changed
        engine, path, meta,
        strict=strict, optimizer=stepper is not None, scheduler=scheduler, frozen=frozen,
        allow_model_changes=allow_model_changes,
    )  # fmt: skip
    engine.zero.reshard_all()
    engine.abandon_step()
    with in_turn(changed=True) as window:
        tensors: LogicalTensors = {
            f"model/{piece.name}": _flat_slice(engine, piece, piece.part, window)
            for piece in engine.zero.slices()
            if frozen or engine.zero.slots[piece.name].leaf.requires_grad
        }
        tensors |= {stored_name(name, stored): buffer for name, buffer in _buffers(engine).items()}
        if stepper is not None:
            tensors |= _empty_optimizer_state(engine, stored, window)
            tell_options(engine, meta)
            stepper.load_state_dict(meta["optimizer"])
        rng = _rng_to_load(engine, stored) if counters else {}
        engine.saver.load(directory, tag, {**tensors, **rng}, strict)
        if stepper is not None:
            _take_numbers(engine, tensors)
    engine.zero.publish()
    engine.bit_checks.forget()
    if scheduler and engine.lr_scheduler is not None and (state := _schedule(engine, meta)) is not None:
        engine.lr_scheduler.load_state_dict(state)
    tell_rates(engine, meta, optimizer=stepper is not None, scheduler=scheduler)
    if counters:
        _restore(engine, meta, rng)
        report.other_batch(engine, meta)
    report.loaded(engine, path, meta)
    return str(path), meta["client_state"]


def _written(engine: Engine) -> list[ParamSlice]:
    """Return the slices that this rank writes; with node-local storage, all that it owns."""
    return engine.zero.slices() if engine.saver.node_local else engine.zero.written_slices()


def _flat_slice(
    engine: Engine, piece: ParamSlice, data: Tensor | OffloadedSlice, window: PrefetchWindow
) -> FlatSlice:
    """Return `data` as a parameter slice. With node-local storage, a first holder may be on another node."""
    place, firsts_only = (piece.split, piece.start, piece.stop), not engine.saver.node_local
    if isinstance(data, OffloadedSlice) and not data.of.is_offloaded:
        data = data.load()
    if isinstance(data, Tensor):
        return FlatSlice(data, *place, firsts_only=firsts_only)
    get = partial(window.load, data)
    return FlatSlice.lazily(get, *place, dtype=data.of.dtype, device=data.of.device, firsts_only=firsts_only)


def _meta(engine: Engine, client_state: dict[str, Any]) -> dict[str, Any]:
    meta = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "loss_scale": engine.loss_scaler.state_dict(),
        "scheduler": engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None,
        "optimizer": {"type": engine.get_type()[0], **engine.optimizer.state_dict()}
        if engine.optimizer
        else None,
        "world_size": engine.world_size,
        "config": without_secrets(engine.config),
        "model": settings_of(engine.module),
        "tied": tied_names(engine),
        "client_state": client_state,
    }
    return {key: encode(value) for key, value in meta.items()}


def _restore(engine: Engine, meta: dict[str, Any], rng: dict[str, Tensor]) -> None:
    for name in ("global_steps", "global_samples", "micro_steps", "skipped_steps"):
        setattr(engine, name, meta[name])
    engine.loss_scaler.load_state_dict(meta["loss_scale"])
    restore_random_states(rng, engine.device)


def _schedule(engine: Engine, meta: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state of the schedule, mapped to this run's param groups; None if there is none."""
    state, optimizer = meta["scheduler"], meta["optimizer"]
    if state is None:
        return None
    if (steps := steps_in_schedule(state)) is not None:
        return state_at(engine.lr_scheduler, steps)
    if optimizer is None or engine.optimizer is None:
        return dict(state)
    groups, count = saved_groups(optimizer, engine.optimizer.group_names()), len(optimizer["param_groups"])
    if groups != list(range(count)) and engine.global_rank == 0:
        logger.warning(
            "the param groups differ from those in the checkpoint: options and learning rates follow "
            "their parameters, and a list in the JSON's scheduler applies to the groups of this run"
        )
    return schedule_of(state, groups, count)


def _rng_to_load(engine: Engine, stored: Stored) -> dict[str, Tensor]:
    """Return the random states to load. Ranks that did not exist when saving keep their own."""
    return {name: state for name, state in _random_states(engine).items() if name in stored}


def _random_states(engine: Engine) -> dict[str, Tensor]:
    """Return the random states. They differ between ranks with different tokens, and between pipeline stages.
    The first stage uses the same names as a run without stages."""
    stage, rank = engine.mesh.axes["pp"].rank, engine.mesh.dp_cp.rank
    place = f"{rank}/stage{stage}" if stage else str(rank)
    return random_states(place, engine.device)


def _buffers(engine: Engine) -> LogicalTensors:
    return {f"buffer/{name}": buffer for name, buffer in persistent_buffers(engine.module)}


def _optimizer_state(engine: Engine, window: PrefetchWindow) -> LogicalTensors:
    if engine.optimizer is None:
        return {}
    written = {piece.name: piece for piece in _written(engine)}
    tensors: LogicalTensors = {}
    slices = engine.optimizer.slices
    for name, state in engine.optimizer.state_slices().items():
        owned, piece = slices[name], written.get(name)
        for key, value in state.items():
            if isinstance(value, bool | int | float):  # some optimizers count steps in Python numbers
                tensors[f"number/{key}/{name}"] = torch.tensor(value)
            elif value is None:
                continue
            elif isinstance(value, OffloadedSlice):
                if piece is not None:
                    part = value.part(piece.start - owned.start, piece.stop - owned.start)
                    tensors[f"optimizer/{key}/{name}"] = _flat_slice(engine, piece, part, window)
            elif not isinstance(value, Tensor) or value.shape not in ((), (owned.part.numel,)):
                raise CheckpointError(
                    f"The optimizer's state {key!r} of {name} is neither a scalar nor shaped like the "
                    "parameter, so it cannot be saved in a topology-independent checkpoint.",
                    where=engine.get_type()[0],
                    fix="use a torch.optim optimizer",
                )
            elif value.dim() == 0:
                tensors[f"scalar/{key}/{name}"] = value
            elif piece is not None:
                elements = value[piece.start - owned.start : piece.stop - owned.start]
                tensors[f"optimizer/{key}/{name}"] = _flat_slice(engine, piece, elements, window)
    return tensors


def _empty_optimizer_state(engine: Engine, stored: Stored, window: PrefetchWindow) -> LogicalTensors:
    """Return empty state tensors for all states in the checkpoint of parameters that this rank owns."""
    assert engine.optimizer is not None
    inner, slices = engine.optimizer.inner, engine.optimizer.slices
    inner.state.clear()
    # torch's fused and capturable kernels read step counts on the device
    on_device = {
        id(p)
        for group in inner.param_groups
        for p in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    tensors: LogicalTensors = {}
    for full_name, entry in stored.items():
        kind, key, name = parts_of(full_name)
        if kind not in ("optimizer", "scalar", "number") or name not in slices:
            continue
        piece, tensor, dtype = slices[name], engine.optimizer.tensors[name], entry.properties.dtype
        if kind == "optimizer":
            if dtype.is_floating_point:  # may have been saved in another precision
                dtype = engine.optimizer.dtype_of(name)
            state = engine.optimizer.start_state(name, key, dtype)
            tensors[full_name] = _flat_slice(engine, piece, state, window)
        else:
            device = piece.part.of.device if kind == "scalar" and id(tensor) in on_device else None
            value = tensors[full_name] = torch.zeros((), dtype=dtype, device=device)
            inner.state[tensor][key] = value
    return tensors


def _take_numbers(engine: Engine, tensors: LogicalTensors) -> None:
    """Convert the states that were stored as tensors back to Python numbers."""
    assert engine.optimizer is not None
    for full_name, value in tensors.items():
        kind, key, name = parts_of(full_name)
        if kind == "number" and isinstance(value, Tensor):
            engine.optimizer.inner.state[engine.optimizer.tensors[name]][key] = value.item()
