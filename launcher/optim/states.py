"""The optimizer's state of a flat buffer that rests in a tier: one flat tensor for each of its states.

The inner optimizer makes its states when it steps a parameter for the first time. `hide` takes them out of its hands,
`show` gives them back as views of what was read. In between it holds empty tensors under the same keys.
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
    """Weights and states of one flat buffer, in an inner optimizer while they are shown.

    Args:
        gradient: of the buffer.
        tensors: what the inner optimizer holds for each owned slice, by parameter name.
        state: the inner optimizer's, by tensor.
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
        """Return the bytes of states that are in memory, apart from those in the inner optimizer's hands."""
        return sum(one.held_bytes for one in self._resting.values())

    def fetch(self) -> None:
        """Start bringing everything in that a step needs."""
        if not self.is_offloaded:
            return
        self.flat.fetch(master=True)
        self.gradient.fetch()
        for one in self._resting.values():
            one.fetch()

    def show(self) -> list[ParamSlice]:
        """Let the inner optimizer work with weights and states; gives the slices of the weights."""
        pieces = self.flat.slices()
        if not self.shown:
            for piece in pieces:
                self._give(piece)
            self.shown = True
        return pieces

    def zeros(self, name: str, key: str, dtype: torch.dtype) -> Tensor:
        """Return a new state of a parameter, in the memory that goes where it rests."""
        place = self._places[name]
        if not self.is_offloaded:
            return memory(place.stop - place.start, dtype, self.flat.optim_placement.device).zero_()
        return self._place_of(key, dtype)[place].zero_()

    def parts(self, name: str) -> dict[str, Any]:
        """Return the states of a parameter, while they are not shown: what rests as a part, the rest as it is."""
        known, place = self._state.get(self.tensors[name], {}), self._places[name]
        rests = set() if self.shown else self._resting.keys()
        return {
            key: OffloadedSlice(self._resting[key], place) if key in rests else known[key] for key in known
        }

    def start(self, name: str, key: str, dtype: torch.dtype) -> Tensor | OffloadedSlice:
        """Return zeros to be filled, as a state of a parameter: a tensor, or a part of one that rests."""
        tensor, place = self.tensors[name], self._places[name]
        if not self.is_offloaded:
            self._state[tensor][key] = self.zeros(name, key, dtype)
            return cast(Tensor, self._state[tensor][key])
        self._state[tensor][key] = self._empty.to(dtype)
        return OffloadedSlice(self._resting_of(key, dtype), place)

    def hide(self) -> None:
        """Take them away again, changed; weights and gradient are let go of by those who have them."""
        if not self.is_offloaded:
            return
        if self._take_all():
            trim_malloc()  # or what optimizers make for all buffers, one after the other, stays in malloc's hands
        for one in self._resting.values():
            one.write_back()
        self.shown = False

    # ---- inside -----------------------------------------------------------------------------

    def _give(self, piece: ParamSlice) -> None:
        """Show the weights and states of a slice."""
        tensor = self.tensors[piece.name]
        tensor.data = piece.data
        for key in self._keys(tensor):
            self._state[tensor][key] = self._resting[key].load()[self._places[piece.name]]

    def _take_all(self) -> bool:
        """Take back what was shown; returns whether some of it was in other memory than where it rests."""
        copied = False
        for name, place in self._places.items():
            tensor = self.tensors[name]
            for key, value in self._state.get(tensor, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.numel() == place.stop - place.start:
                    copied |= self._take(key, value, tensor, place)
            tensor.data = self._empty
        return copied

    def _keys(self, tensor: Tensor) -> list[str]:
        """Return the states of a tensor that were taken away."""
        known = self._state.get(tensor, {})
        return [key for key in self._resting if key in known]

    def _take(self, key: str, value: Tensor, tensor: Tensor, place: slice) -> bool:
        """Leave an empty tensor in place of a state; returns whether it was in other memory than where it rests."""
        mine = self._place_of(key, value.dtype)[place]
        elsewhere = mine.data_ptr() != value.data_ptr()
        if elsewhere:
            mine.copy_(value)
        self._state[tensor][key] = value.new_empty(0)
        return elsewhere

    def _place_of(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return the [owned range] of a state; zeros when it is new."""
        one = self._resting_of(key, dtype)
        return one.load() if one.has_values else one.allocate().zero_()

    def _resting_of(self, key: str, dtype: torch.dtype) -> OffloadedTensor:
        if key not in self._resting:
            name, size = f"{self.flat.name}/{key}", self.flat.owned.stop - self.flat.owned.start
            self._resting[key] = self.flat.placements.resting(name, size, dtype, self.flat.optim_placement)
        return self._resting[key]
