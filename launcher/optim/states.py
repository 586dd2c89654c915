"""The offloaded optimizer state of a flat buffer, with one flat tensor for each kind of state.

The inner optimizer creates its state when it steps a parameter for the first time. `hide` moves the state out
of the inner optimizer, `show` gives it back as views of the loaded tensors. In between, the inner optimizer
holds empty tensors under the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from launcher.monitor.memory import trim_malloc
from launcher.offload.offloaded import OffloadedSlice, OffloadedTensor
from launcher.offload.tier import memory
from launcher.zero import ParamSlice
from launcher.zero.gradients import FlatGradient


class FlatState:
    """The weights and optimizer state of one flat buffer, held by the inner optimizer while they are shown.

    Args:
        gradient: the gradient of the buffer.
        tensors: parameter name -> the inner optimizer's parameter for the owned slice.
        state: the inner optimizer's state, by tensor.
    """

    def __init__(
        self, gradient: FlatGradient, tensors: Mapping[str, nn.Parameter], state: dict[Tensor, Any]
    ) -> None:
        self.gradient, self.flat, self.tensors, self._state = gradient, gradient.flat, tensors, state
        self.is_offloaded = self.flat.optim_placement.tier is not None or self.flat.is_offloaded
        self.shown = True
        self._resting: dict[str, OffloadedTensor] = {}
        first = self.flat.owned.start
        self._places = {
            slot.name: slice(slot.offset + start - first, slot.offset + stop - first)
            for slot, start, stop in self.flat.overlaps(self.flat.owned)
        }
        self._empty = torch.empty(0, device=self.flat.optim_placement.device)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of optimizer state in memory, excluding state held by the inner optimizer."""
        return sum(one.held_bytes for one in self._resting.values())

    def fetch(self) -> None:
        """Start loading all tensors that a step needs."""
        if not self.is_offloaded:
            return
        self.flat.fetch(master=True)
        self.gradient.fetch()
        for one in self._resting.values():
            one.fetch()

    def show(self) -> list[ParamSlice]:
        """Give the weights and the state to the inner optimizer; return the slices of the weights."""
        pieces = self.flat.slices()
        if not self.shown:
            for piece in pieces:
                self._give(piece)
            self.shown = True
        return pieces

    def zeros(self, name: str, key: str, dtype: torch.dtype) -> Tensor:
        """Return a new, zeroed state of a parameter; a view of the offloaded tensor if the state is
        offloaded."""
        place = self._places[name]
        if not self.is_offloaded:
            return memory(place.stop - place.start, dtype, self.flat.optim_placement.device).zero_()
        return self._place_of(key, dtype)[place].zero_()

    def parts(self, name: str) -> dict[str, Any]:
        """Return the states of a parameter while they are hidden: offloaded state as an `OffloadedSlice`,
        other state as it is."""
        known, place = self._state.get(self.tensors[name], {}), self._places[name]
        rests = set() if self.shown else self._resting.keys()
        return {
            key: OffloadedSlice(self._resting[key], place) if key in rests else known[key] for key in known
        }

    def start(self, name: str, key: str, dtype: torch.dtype) -> Tensor | OffloadedSlice:
        """Return zeros to be filled as a state of a parameter: a tensor, or a slice of an offloaded one."""
        tensor, place = self.tensors[name], self._places[name]
        if not self.is_offloaded:
            self._state[tensor][key] = self.zeros(name, key, dtype)
            return cast(Tensor, self._state[tensor][key])
        self._state[tensor][key] = self._empty.to(dtype)
        return OffloadedSlice(self._resting_of(key, dtype), place)

    def hide(self) -> None:
        """Take the changed state out of the inner optimizer and start writing it back. Weights and gradient
        are released by their owners."""
        if not self.is_offloaded:
            return
        if self._take_all():
            trim_malloc()  # else malloc keeps the memory of the state created for each buffer
        for one in self._resting.values():
            one.write_back()
        self.shown = False

    # ---- inside -----------------------------------------------------------------------------

    def _give(self, piece: ParamSlice) -> None:
        """Give the weights and the state of a slice to the inner optimizer."""
        tensor = self.tensors[piece.name]
        tensor.data = piece.data
        for key in self._keys(tensor):
            self._state[tensor][key] = self._resting[key].load()[self._places[piece.name]]

    def _take_all(self) -> bool:
        """Take back all weights and state; return whether some state was copied into the offloaded
        tensors."""
        copied = False
        for name, place in self._places.items():
            tensor = self.tensors[name]
            for key, value in self._state.get(tensor, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.numel() == place.stop - place.start:
                    copied |= self._take(key, value, tensor, place)
            tensor.data = self._empty
        return copied

    def _keys(self, tensor: Tensor) -> list[str]:
        """Return the names of a tensor's states that are offloaded."""
        known = self._state.get(tensor, {})
        return [key for key in self._resting if key in known]

    def _take(self, key: str, value: Tensor, tensor: Tensor, place: slice) -> bool:
        """Replace a state with an empty tensor; return whether it was copied into the offloaded tensor."""
        mine = self._place_of(key, value.dtype)[place]
        elsewhere = mine.data_ptr() != value.data_ptr()
        if elsewhere:
            mine.copy_(value)
        self._state[tensor][key] = value.new_empty(0)
        return elsewhere

    def _place_of(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return a state over the owned range, loaded; zeros if it is new."""
        one = self._resting_of(key, dtype)
        return one.load() if one.has_values else one.allocate().zero_()

    def _resting_of(self, key: str, dtype: torch.dtype) -> OffloadedTensor:
        if key not in self._resting:
            name, size = f"{self.flat.name}/{key}", self.flat.owned.stop - self.flat.owned.start
            self._resting[key] = self.flat.placements.resting(name, size, dtype, self.flat.optim_placement)
        return self._resting[key]
