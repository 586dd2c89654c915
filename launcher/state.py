"""What a checkpoint of a run holds, by logical parameter, and the way from an engine to it and back."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.checkpoint import export, store
from launcher.checkpoint.reader import read_metadata, shapes_of
from launcher.checkpoint.slices import FlatSlice
from launcher.checkpoint.tags import tag_path

if TYPE_CHECKING:
    from launcher.engine import Engine

# Names in a checkpoint: model/<parameter>, buffer/<buffer>, optimizer/<state>/<parameter> (shaped like the parameter),
# scalar/<state>/<parameter> (step counts), rng/<rank>
Tensors = dict[str, Tensor | FlatSlice]


def save_state(
    engine: Engine, directory: Path, tag: str, client_state: dict[str, Any], exclude_frozen: bool
) -> None:
    """Write the checkpoint DIRECTORY/TAG: each rank writes its slice of everything. Collective."""
    tensors: Tensors = {}
    for piece in engine.zero.written_slices():
        if not (exclude_frozen and not engine.zero.slots[piece.name].leaf.requires_grad):
            tensors[f"model/{piece.name}"] = FlatSlice(piece.data, piece.shape, piece.start, piece.stop)
    tensors |= _buffers(engine)
    tensors |= _optimizer_state(engine)
    tensors[f"rng/{engine.global_rank}"] = torch.get_rng_state()
    if engine.device.type == "cuda":
        tensors[f"rng_cuda/{engine.global_rank}"] = torch.cuda.get_rng_state(engine.device)
    store.save(directory, tag, tensors, _meta(engine, client_state))


def load_state(
    engine: Engine,
    directory: Path,
    tag: str | None,
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    counters: bool,
) -> tuple[str | None, dict[str, Any]]:
    """Load the checkpoint DIRECTORY/TAG (default: the latest). Collective. See Engine.load_checkpoint."""
    found = store.load_meta(directory, tag, missing_ok=tag is None)
    if found is None:
        return None, {}
    tag, meta = found
    path = tag_path(directory, tag)
    stored = shapes_of(read_metadata(path))
    engine.zero.free_gathered()
    engine.zero.zero_grad()
    tensors: Tensors = {
        f"model/{piece.name}": FlatSlice(piece.data, piece.shape, piece.start, piece.stop)
        for piece in engine.zero.slices()
    }
    tensors |= _buffers(engine)
    if optimizer and engine.optimizer is not None:
        tensors |= _empty_optimizer_state(engine, stored)
        engine.optimizer.load_state_dict(meta["optimizer"])
    rng = _rng_to_load(engine, stored) if counters else {}
    store.load(directory, tag, {**tensors, **rng}, strict=strict)
    engine.zero.publish()
    if scheduler and engine.lr_scheduler is not None and meta["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(meta["scheduler"])
    if counters:
        _restore(engine, meta, rng)
    return str(path), meta["client_state"]


def export_model(engine: Engine, directory: Path, exclude_frozen: bool = False) -> None:
    """Write HF safetensors and config.json, one unit in memory at a time. Collective."""
    writer = engine.global_rank == 0
    values = engine.zero.full_parameters()
    entries = []

    def fetch() -> Tensor:
        return next(values)[1]

    for unit in engine.zero.units:  # the order in which full_parameters() goes
        for slot in [slot for flat in unit.flats for slot in flat.slots]:
            entries.append((slot.name, slot.leaf.dtype, tuple(slot.shape), fetch))
    entries += [
        (name, buffer.dtype, tuple(buffer.shape), partial(_itself, buffer))
        for name, buffer in _persistent_buffers(engine).items()
    ]
    directory.mkdir(parents=True, exist_ok=True)
    export.write_safetensors(directory, entries, writer=writer)
    config: Any = getattr(engine.module, "config", None)
    if writer and hasattr(config, "save_pretrained"):
        config.architectures = [type(engine.module).__name__]
        config.save_pretrained(directory)


def _meta(engine: Engine, client_state: dict[str, Any]) -> dict[str, Any]:
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "loss_scale": engine.loss_scaler.state_dict(),
        "scheduler": engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None,
        "optimizer": engine.optimizer.state_dict() if engine.optimizer else None,
        "world_size": engine.world_size,
        "python_rng": random.getstate(),
        "config": engine.config,
        "client_state": client_state,
    }


def _restore(engine: Engine, meta: dict[str, Any], rng: Tensors) -> None:
    for name in ("global_steps", "global_samples", "micro_steps", "skipped_steps"):
        setattr(engine, name, meta[name])
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    engine.loss_scaler.load_state_dict(meta["loss_scale"])
    version, numbers, gauss = meta["python_rng"]
    random.setstate((version, tuple(numbers), gauss))
    for name, state in rng.items():
        torch.cuda.set_rng_state(state, engine.device) if name.startswith(
            "rng_cuda"
        ) else torch.set_rng_state(state)


def _rng_to_load(engine: Engine, stored: dict[str, Any]) -> Tensors:
    """Random states are of ranks, not of the model: a rank that was not there when saving keeps its own."""
    wanted: Tensors = {f"rng/{engine.global_rank}": torch.get_rng_state()}
    if engine.device.type == "cuda":
        wanted[f"rng_cuda/{engine.global_rank}"] = torch.cuda.get_rng_state(engine.device)
    return {name: state for name, state in wanted.items() if name in stored}


def _buffers(engine: Engine) -> Tensors:
    return {f"buffer/{name}": buffer for name, buffer in _persistent_buffers(engine).items()}


def _persistent_buffers(engine: Engine) -> dict[str, Tensor]:
    found = {}
    for prefix, module in engine.module.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _optimizer_state(engine: Engine) -> Tensors:
    if engine.optimizer is None:
        return {}
    written = {piece.name: piece for piece in engine.zero.written_slices()}
    tensors: Tensors = {}
    for name, state in engine.optimizer.state_slices().items():
        owned, piece = engine.optimizer.slices[name], written.get(name)
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if value.dim() == 0:
                tensors[f"scalar/{key}/{name}"] = value
            elif piece is not None:
                part = value[piece.start - owned.start : piece.stop - owned.start]
                tensors[f"optimizer/{key}/{name}"] = FlatSlice(part, piece.shape, piece.start, piece.stop)
    return tensors


def _empty_optimizer_state(engine: Engine, stored: dict[str, Any]) -> Tensors:
    """State tensors for everything that the checkpoint has of the parameters this rank owns."""
    assert engine.optimizer is not None
    state = engine.optimizer.inner.state
    state.clear()
    tensors: Tensors = {}
    for full_name in stored:
        kind, _, rest = full_name.partition("/")
        key, _, name = rest.partition("/")
        if kind not in ("optimizer", "scalar") or name not in engine.optimizer.slices:
            continue
        piece, tensor = engine.optimizer.slices[name], engine.optimizer.tensors[name]
        if kind == "optimizer":
            value = torch.zeros_like(piece.data)
            tensors[full_name] = FlatSlice(value, piece.shape, piece.start, piece.stop)
        else:
            value = tensors[full_name] = torch.zeros(())
        state[tensor][key] = value
    return tensors


def _itself(buffer: Tensor) -> Tensor:
    return buffer
