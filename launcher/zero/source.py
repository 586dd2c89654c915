"""Where parameters get their first values from: the model as it is, or a model on meta that is made unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from launcher.zero.flat import Reader, Slot


class ParamSource(Protocol):
    """Gives the values of a group of parameters, and only while asked for them."""

    def open(self, slots: list[Slot]) -> contextmanager[Reader]:  # type: ignore[valid-type]
        """A context in which the reader knows the parameters of `slots`; leaving it frees what it made."""
        ...


class ModelValues:
    """The values that the model has now."""

    @contextmanager
    def open(self, slots: list[Slot]) -> Iterator[Reader]:
        flat = {slot.name: slot.leaf.detach().reshape(-1) for slot in slots}
        yield lambda name, start, stop: flat[name][start:stop]


class MadeOnMeta:
    """Values for a model on meta: `make(module name, module)` gives real, initialised values to what the module owns
    directly. One group at a time exists whole, on the CPU, on every rank.

    Args:
        model: the whole model.
        make: for example launcher.models.initialize.initialize_module with a seed.
    """

    def __init__(self, model: nn.Module, make: Callable[[str, nn.Module], None]) -> None:
        self.model, self.make = model, make
        self._names = {module: name for name, module in model.named_modules(remove_duplicate=True)}

    @contextmanager
    def open(self, slots: list[Slot]) -> Iterator[Reader]:
        values: dict[str, Tensor] = {}
        for module in dict.fromkeys(slot.owners[0][0] for slot in slots):
            made = self._made(module)
            for slot in slots:
                owner, attribute = slot.owners[0]
                if owner is module:
                    values[slot.name] = made[attribute].detach().reshape(-1)
        yield lambda name, start, stop: values[name][start:stop]

    def _made(self, module: nn.Module) -> dict[str, Tensor]:
        before = dict(module._parameters)
        buffers = dict(module._buffers)
        try:
            with torch.no_grad():
                for name, parameter in before.items():
                    if parameter is not None:
                        fresh = nn.Parameter(
                            torch.empty(parameter.shape, dtype=torch.float32), requires_grad=False
                        )
                        module._parameters[name] = fresh
                _materialize_buffers(module)
                self.make(self._names[module], module)
            return {name: p for name, p in module._parameters.items() if p is not None}
        finally:
            module._parameters.update(before)
            module._buffers.update(buffers)

    def make_buffers(self, device: torch.device) -> None:
        """Give values to every buffer that is still on meta."""
        for module in self.model.modules():
            if any(b is not None and b.is_meta for b in module._buffers.values()):
                before = dict(module._parameters)
                made = {
                    k: torch.empty(p.shape, dtype=torch.float32) for k, p in before.items() if p is not None
                }
                try:
                    module._parameters.update(
                        {k: nn.Parameter(v, requires_grad=False) for k, v in made.items()}
                    )
                    _materialize_buffers(module)
                    with torch.no_grad():
                        self.make(self._names[module], module)
                finally:
                    module._parameters.update(before)
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)


class StoredValues(MadeOnMeta):
    """Values that are read from a store by flat range: a rank reads only what it keeps.

    Args:
        model: the whole model, on meta.
        make: gives values to buffers that the store does not have.
        read: (name, start, stop) -> those elements of the parameter, flat.
    """

    def __init__(self, model: nn.Module, make: Callable[[str, nn.Module], None], read: Reader) -> None:
        super().__init__(model, make)
        self.read = read

    @contextmanager
    def open(self, slots: list[Slot]) -> Iterator[Reader]:
        yield self.read


def _materialize_buffers(module: nn.Module) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
