"""Export of the unsharded model, as safetensors or a state dict, with one unit gathered at a time.

Every rank requests the same tensors in the same order. Tensors of other pipeline stages are sent to global
rank 0 along its pp group, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from launcher.comm.p2p import P2PChannel
from launcher.comm.plain import gather_plain
from launcher.errors import CheckpointError
from launcher.models.companions import write_companions
from launcher.models.hub_layout import HubLayout
from launcher.models.stacked_names import all_apart
from launcher.models.state_names import persistent_buffers

if TYPE_CHECKING:
    from launcher.engine.engine import Engine
    from launcher.zero.slot import ParamSlot
    from launcher.zero.unit import Unit

T = TypeVar("T")


def export_model(engine: Engine, directory: Path, exclude_frozen: bool = False) -> None:
    """Write HF safetensors, config.json and generation_config.json, one unit in memory at a time. Collective.

    Raises:
        CheckpointError: on every rank: the files could not be written.
    """
    from launcher.checkpoint import export

    writer = engine.global_rank == 0
    with _Whole(engine) as whole:
        layout = HubLayout(engine.module)
        entries: list[export.ExportEntry] = [
            entry
            for found in whole.tensors(exclude_frozen)
            for entry in layout.entries(found.names[0], found.dtype, found.shape, partial(whole.fetch, found))
        ]
        with failing_together(directory):
            export.write_safetensors(directory, entries, writer=writer)
            if writer:
                write_companions(engine.module, directory, engine.zero.policy.param_dtype)


def export_pickle(engine: Engine, path: Path, exclude_frozen: bool = False) -> None:
    """Write the full state dict with torch.save, with config.json and generation_config.json next to it. Rank
    0 holds all of it in host memory. Collective.

    Raises:
        CheckpointError: on every rank: the files could not be written.
    """
    from launcher.checkpoint.durable import DurableFile, temporary_file

    state = whole_state_dict(engine, exclude_frozen)
    with failing_together(path):
        if state is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary_file(path) as temporary, DurableFile(temporary) as file:
                torch.save(state, file)
                file.finish()
            write_companions(engine.module, path.parent, engine.zero.policy.param_dtype)


@contextmanager
def failing_together(where: Path) -> Iterator[None]:
    """Raise errors of rank 0 on all ranks, and make all ranks wait for rank 0. Collective."""
    failure: CheckpointError | None = None
    try:
        yield
    except Exception as error:  # any error: the other ranks wait below
        failure = CheckpointError(f"The weights could not be written: {error}", where=str(where))
    said = None if failure is None else (failure.what, failure.where, failure.fix)
    if (told := gather_plain(said)[0]) is not None:
        what, place, fix = told
        raise CheckpointError(what, where=place, fix=fix) from failure


def whole_state_dict(engine: Engine, exclude_frozen: bool = False) -> dict[str, Tensor] | None:
    """Return the unsharded module.state_dict() on the CPU of rank 0, None on other ranks. Collective."""
    writer = engine.global_rank == 0
    state: dict[str, Tensor] = {}
    with _Whole(engine) as whole:
        for found in whole.tensors(exclude_frozen):
            value = whole.fetch(found)
            if writer:
                assert value is not None
                state |= dict.fromkeys(found.names, value.to("cpu", copy=True))  # tied: one under every name
        return all_apart({name: state[name] for name in sorted(state, key=whole.place)}) if writer else None


def tied_names(engine: Engine) -> dict[str, str]:
    """Return additional name of a tied parameter -> the name that it is stored under. Collective."""
    tied = {other: slot.name for slot, names in _named(engine) for other in names if other != slot.name}
    return {other: name for stage in of_stages(engine, tied) for other, name in stage.items()}


def _named(engine: Engine) -> Iterator[tuple[ParamSlot, tuple[str, ...]]]:
    """Yield every parameter of this stage with all its names, in model order."""
    prefixes = {module: f"{name}." if name else "" for name, module in engine.module.named_modules()}
    for slot in engine.zero.slots.values():
        yield slot, tuple(prefixes[module] + attribute for module, attribute in slot.owners)


def of_stages(engine: Engine, value: T) -> list[T]:
    """Gather a plain value from all pipeline stages, in order. Collective."""
    pp = engine.mesh.axes["pp"]
    return gather_plain(value, pp.group) if pp.degree > 1 else [value]


@dataclass(frozen=True)
class _Found:
    """A parameter or a persistent buffer of the model.

    Attributes:
        names: all its names, in model order; several if it is tied.
        shape: the shape of the logical tensor.
        stage: the first stage that holds it.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: torch.Size
    frozen: bool
    stage: int

    def plain(self) -> tuple[Any, ...]:
        return self.names, str(self.dtype).removeprefix("torch."), tuple(self.shape), self.frozen, self.stage

    @classmethod
    def of(cls, plain: tuple[Any, ...]) -> _Found:
        names, dtype, shape, frozen, stage = plain
        return cls(names, getattr(torch, dtype), torch.Size(shape), frozen, stage)


class _Whole:
    """Fetches unsharded tensors, with one unit gathered at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.zero, self.pp = engine, engine.zero, engine.mesh.axes["pp"]
        self.place = engine.runtime.staged.places()
        self._buffers = dict(persistent_buffers(engine.module))
        self._letters, self._open = P2PChannel(self.pp), ExitStack()
        self._unit: Unit | None = None

    def tensors(self, exclude_frozen: bool) -> list[_Found]:
        """Return all tensors of the model, in model order. Collective."""
        found: dict[str, _Found] = {}
        for of_stage in of_stages(self.engine, [one.plain() for one in self._held()]):
            for one in map(_Found.of, of_stage):
                found.setdefault(one.names[0], one)
        kept = [one for one in found.values() if not (exclude_frozen and one.frozen)]
        return sorted(kept, key=lambda one: self.place(one.names[0]))

    def _held(self) -> Iterator[_Found]:
        for slot, names in _named(self.engine):
            frozen = not slot.leaf.requires_grad
            yield _Found(names, slot.leaf.dtype, slot.split.shape, frozen, self.pp.rank)
        for name, buffer in self._buffers.items():
            yield _Found((name,), buffer.dtype, buffer.shape, False, self.pp.rank)

    def fetch(self, found: _Found) -> Tensor | None:
        """Return the unsharded tensor on global rank 0; other ranks get it or None. Collective."""
        mine = found.stage == self.pp.rank
        value = self._own(found.names[0]) if mine else None
        along_pp = all(axis.rank == 0 for name, axis in self.engine.mesh.axes.items() if name != "pp")
        if found.stage == 0 or not along_pp:
            return value
        if value is not None:
            self._letters.send(_bytes(value.contiguous()), 0, "root/whole").wait()
        elif self.pp.rank == 0:
            value = torch.empty(found.shape, dtype=found.dtype, device=self.engine.device)
            self._letters.receive(_bytes(value), found.stage, "root/whole").wait()
        return value

    def _own(self, name: str) -> Tensor:
        """Return a tensor of this stage. Collective within the stage."""
        if name in self._buffers:
            return self._buffers[name]
        slot = self.zero.slots[name]
        unit = self.zero.unit_of(slot)
        if slot.flat.sharded and unit is not self._unit:
            self._open.close()
            self._open.enter_context(self.zero.gathered([s.leaf for flat in unit.flats for s in flat.slots]))
            self._unit = unit
        return self.zero.logical(slot)

    def __enter__(self) -> _Whole:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
