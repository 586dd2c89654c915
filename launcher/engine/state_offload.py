"""`engine.offload_states()`: moves training states that generation does not need to host memory, and back.

The storage of flat buffers is resized to 0 in place, so their views stay valid objects. Accessing a view
while the states are offloaded raises torch's error about unallocated data. States already offloaded to host
memory or NVMe stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from launcher.errors import LauncherError

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

Storage = torch.UntypedStorage


def _optimizer_states(engine: Engine) -> Iterator[Tensor]:
    states = engine.optimizer.inner.state.values() if engine.optimizer is not None else ()
    for state in states:
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)


def _masters(engine: Engine) -> Iterator[Tensor]:
    yield from (flat.master for flat in engine.zero.flats if flat.own_master and not flat.is_offloaded)


def _parameters(engine: Engine) -> Iterator[Tensor]:
    from launcher.zero.features.second_shard import second_shards

    for flat in engine.zero.flats:
        if not flat.is_offloaded:
            whole = () if flat.full is None else (flat.full,)
            yield from (flat.shard, *whole, *second_shards(flat))


def _gradients(engine: Engine) -> Iterator[Tensor]:
    for gradient in engine.zero.gradients:
        if gradient.held_bytes and not gradient.is_offloaded:
            yield gradient.owned


KINDS: dict[str, Callable[[Engine], Iterable[Tensor]]] = {
    "optim_states": _optimizer_states,
    "hp_params": _masters,
    "lp_params": _parameters,
    "lp_grads": _gradients,
    "contiguous_grad_buffer": _gradients,
}
"""DeepSpeed's name of a state -> its tensors."""


class StateOffloadMixin:
    """The part of an Engine that moves its states to host memory and back."""

    # A class attribute: without it, every forward would look the name up in the wrapped model.
    _away: Sequence[tuple[Storage, Tensor]] = ()
    _puts_away_on_cpu = False

    def _engine(self) -> Engine:
        return cast("Engine", self)

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory, and free the device memory. Does nothing if the engine is on the CPU.

        Args:
            include: `OffloadStateTypeEnum`s or their names; default: all. In fp32 training the parameters are
                the master weights, and belong to `lp_params`.
            device: "cpu".
            pin_memory: use pinned host memory.
            non_blocking: ignored: the copies are complete when this returns.

        Raises:
            LauncherError: a name is unknown, the device is invalid, or states are already offloaded.
        """
        engine = self._engine()
        names = [str(getattr(one, "value", one)) for one in (KINDS if include is None else include)]
        strange = sorted(set(names) - set(KINDS))
        if strange or str(getattr(device, "value", device)) != "cpu":
            raise LauncherError(
                f"offload_states() cannot move {', '.join(strange) or f'to {device}'}",
                fix=f'use {", ".join(KINDS)} and device="cpu"',
            )
        self.check_states_are_here("offload_states()")
        if engine.device.type == "cpu" and not self._puts_away_on_cpu:
            return
        engine.empty_partition_cache()
        found: dict[int, Storage] = {}
        for name in names:
            for tensor in KINDS[name](engine):
                storage = tensor.untyped_storage()
                if tensor.device == engine.device and storage.nbytes():
                    found[storage.data_ptr()] = storage
        pins = pin_memory and engine.device.type == "cuda"
        self._away = [(storage, _put(storage, pins)) for storage in found.values()]
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states offloaded by `offload_states` back to the device."""
        for storage, kept in self._away:
            storage.resize_(kept.numel())
            _bytes_of(storage).copy_(kept)
        self._away = ()

    def check_states_are_here(self, who: str) -> None:
        """Raise LauncherError if states are offloaded."""
        if self._away:
            raise LauncherError(
                f"{who} needs states that offload_states() moved to host memory",
                fix="call engine.reload_states() first",
            )


def _put(storage: Storage, pins: bool) -> Tensor:
    """Copy a storage to host memory, free it, and return the copy."""
    kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pins)
    kept.copy_(_bytes_of(storage))
    storage.resize_(0)
    return kept


def _bytes_of(storage: Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
