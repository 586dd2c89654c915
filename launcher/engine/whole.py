"""Whole weights out of an engine, one unit gathered at a time: safetensors, or a state dict."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from launcher.checkpoint import export
from launcher.errors import CheckpointError
from launcher.models.names import persistent_buffers

if TYPE_CHECKING:
    from launcher.engine.engine import Engine
    from launcher.zero.slot import Slot
    from launcher.zero.unit import Unit


def export_model(engine: Engine, directory: Path, exclude_frozen: bool = False) -> None:
    """Write HF safetensors and config.json, one unit in memory at a time. Collective.

    Raises:
        CheckpointError: on every rank: they could not be written.
    """
    writer = engine.global_rank == 0
    with _Whole(engine) as whole:
        entries: list[export.Entry] = [
            (slot.name, slot.leaf.dtype, tuple(slot.split.shape), partial(whole.fetch, unit, slot))
            for unit, slot in whole.slots(exclude_frozen)
        ]
        entries += [
            (name, buffer.dtype, tuple(buffer.shape), partial(_itself, buffer))
            for name, buffer in persistent_buffers(engine.module)
        ]
        failure: CheckpointError | None = None
        try:
            export.write_safetensors(directory, entries, writer=writer)
            if writer:
                _write_config(engine, directory)
        except (CheckpointError, OSError) as error:
            failure = CheckpointError(f"The weights could not be written: {error}", where=str(directory))
    failures: list[CheckpointError | None] = [None] * engine.world_size
    dist.all_gather_object(failures, failure)  # also: no rank goes on before the files are there
    if failures[0] is not None:
        raise failures[0]


def whole_state_dict(engine: Engine, exclude_frozen: bool = False) -> dict[str, Tensor] | None:
    """What module.state_dict() would be without sharding, on the CPU of rank 0; None elsewhere. Collective."""
    state: dict[str, Tensor] = {}
    names = {module: name for name, module in engine.module.named_modules()}
    for name, value in engine.zero.full_parameters():
        slot = engine.zero.slots[name]
        if engine.global_rank == 0 and (slot.leaf.requires_grad or not exclude_frozen):
            kept = value.to("cpu", copy=True)
            for module, attribute in slot.owners:  # tied: one tensor under every name
                state[f"{names[module]}.{attribute}" if names[module] else attribute] = kept
    state |= {name: buffer.to("cpu", copy=True) for name, buffer in persistent_buffers(engine.module)}
    return state if engine.global_rank == 0 else None


class _Whole:
    """Whole parameters, one unit gathered at a time; every rank asks for them in the same order."""

    def __init__(self, engine: Engine) -> None:
        self.zero, self._open = engine.zero, ExitStack()
        self.unit: Unit | None = None

    def slots(self, exclude_frozen: bool) -> list[tuple[Unit, Slot]]:
        return [
            (unit, slot)
            for unit in self.zero.units
            for flat in unit.flats
            for slot in flat.slots
            if slot.leaf.requires_grad or not exclude_frozen
        ]

    def fetch(self, unit: Unit, slot: Slot) -> Tensor:
        if unit is not self.unit:
            self._open.close()
            self._open.enter_context(self.zero.gathered([s.leaf for flat in unit.flats for s in flat.slots]))
            self.unit = unit
        return self.zero.logical(slot)

    def __enter__(self) -> _Whole:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()


def _write_config(engine: Engine, directory: Path) -> None:
    config: Any = getattr(engine.module, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(engine.module).__name__]
        config.dtype = str(engine.zero.policy.param_dtype).removeprefix("torch.")
        config.save_pretrained(directory)


def _itself(buffer: Tensor) -> Tensor:
    return buffer
