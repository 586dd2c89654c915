"""Sources of initial parameter values: the model as it is, or a model on meta materialized unit by unit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from launcher.errors import LauncherError
from launcher.models.state_names import persistent_buffers
from launcher.tensor.split import BoxReader
from launcher.zero.slot import ParamReader, ParamSlot

# initialises the parameters and buffers that a module owns directly: (root, module's name, module) -> None
MakeModule = Callable[[nn.Module, str, nn.Module], None]


class ParamSource(Protocol):
    """Provides the values of a group of parameters while it is open for them."""

    def open(self, slots: list[ParamSlot]) -> AbstractContextManager[ParamReader]:
        """Return a context that yields a reader for the parameters of `slots`; leaving it frees the values
        made for it."""
        ...


class ModelValues:
    """The current values of the model; local values if it is split."""

    @contextmanager
    def open(self, slots: list[ParamSlot]) -> Iterator[ParamReader]:
        flat = {slot.name: slot.leaf.detach().reshape(-1) for slot in slots}
        yield lambda name, start, stop: flat[name][start:stop]


def check_values(model: nn.Module) -> None:
    """Check that the values of the parameters can be moved into flat buffers.

    Raises:
        LauncherError: a parameter has no memory of its own, or a trained one shares memory with another one, so
            that each would be trained by itself.
    """
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            raise LauncherError(
                f"the parameter {name} is a {type(parameter).__name__}, which consists of several tensors",
                where=f"parameter {name}",
                fix="use plain tensors: DTensor.full_tensor(), or weights quantized by bitsandbytes instead of torchao",
            )
    last = (0, "", False)
    for start, stop, name, trained in sorted(_spans(model)):
        if start < last[0] and (trained or last[2]):
            raise LauncherError(
                f"the parameters {last[1]} and {name} share memory, but are two parameters",
                where=f"parameter {name}",
                fix="assign one Parameter to both modules, as tie_weights() does, or give one of them a copy",
            )
        last = max(last, (stop, name, trained))


def _spans(model: nn.Module) -> Iterator[tuple[int, int, str, bool]]:
    """Yield the range of memory of each parameter with values: (start, stop, name, whether it is trained)."""
    for name, parameter in model.named_parameters():
        plain = (
            type(parameter.data) is Tensor
        )  # others, of quantized weights, may have no storage of their own
        if parameter.is_meta or parameter.layout is not torch.strided or not parameter.numel() or not plain:
            continue
        steps = zip(parameter.shape, parameter.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in steps)
        start = parameter.data_ptr()
        yield start, start + elements * parameter.element_size(), name, parameter.requires_grad


class MadeOnMeta:
    """Initial values for a model on meta, created module by module.

    Only one group of parameters at a time exists unsharded, on the CPU of every rank.

    Args:
        model: the whole model.
        make: see `MakeModule`; for example launcher.models.initialize.initializer with a seed.
        owner_of_tied: for tied parameters: (module name, attribute) -> the (module name, attribute) that
            `make` initialises.
    """

    def __init__(
        self,
        model: nn.Module,
        make: MakeModule,
        owner_of_tied: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        self.model, self.make, self.owner_of_tied = model, make, owner_of_tied
        self._take_shapes_of(model)

    def keep_whole(self) -> None:
        """Keep a copy of the model on meta, and create values for that from now on. Call before parameters
        are split."""
        self._take_shapes_of(copy.deepcopy(self.model))

    def _take_shapes_of(self, root: nn.Module) -> None:
        self._root, self._modules = root, dict(root.named_modules())
        self._names = {module: name for name, module in self._modules.items()}

    @contextmanager
    def open(self, slots: list[ParamSlot]) -> Iterator[ParamReader]:
        values: dict[str, Tensor] = {}
        made: dict[str, dict[str, Tensor]] = {}
        for slot in slots:
            module, _, attribute = slot.name.rpartition(".")
            name, attribute = self.owner_of_tied.get((module, attribute), (module, attribute))
            if name not in made:
                made[name] = self._made(self._modules[name])
            values[slot.name] = slot.split.take(made[name][attribute].detach()).reshape(-1)
        yield lambda name, start, stop: values[name][start:stop]

    def _made(self, module: nn.Module) -> dict[str, Tensor]:
        with self._materialized(module):
            return {name: p for name, p in module._parameters.items() if p is not None}

    @contextmanager
    def _materialized(self, module: nn.Module) -> Iterator[None]:
        """Give the module's own parameters and buffers real memory and initial values inside the `with`."""
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        try:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    if parameter is not None:
                        fresh = torch.empty(parameter.shape, dtype=torch.float32)
                        module._parameters[name] = nn.Parameter(fresh, requires_grad=False)
                for name, buffer in buffers.items():
                    if buffer is not None and buffer.is_meta:
                        module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
                self.make(self._root, self._names[module], module)
            yield
        finally:
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    def make_buffers(self, device: torch.device) -> None:
        """Initialise every buffer that is still on meta."""
        for name, module in self.model.named_modules():
            if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
                whole = self._modules[name]
                with self._materialized(whole):
                    made = dict(whole._buffers)
                for key, buffer in made.items():
                    module._buffers[key] = None if buffer is None else buffer.to(device)


class StoredValues(MadeOnMeta):
    """Values read from a store, by boxes of logical parameters: each rank reads only the elements that it
    keeps. What the store lacks is initialized.

    Args:
        model: the whole model, on meta.
        make: initializes the parameters and buffers that the store lacks.
        read: name of a parameter or persistent buffer -> reader of its boxes; None if the store lacks it.
    """

    def __init__(self, model: nn.Module, make: MakeModule, read: Callable[[str], BoxReader | None]) -> None:
        super().__init__(model, make)
        self.read = read

    @contextmanager
    def open(self, slots: list[ParamSlot]) -> Iterator[ParamReader]:
        stored = {slot.name: (slot.split, read) for slot in slots if (read := self.read(slot.name))}
        with super().open([slot for slot in slots if slot.name not in stored]) as made:

            def values(name: str, start: int, stop: int) -> Tensor:
                if name not in stored:
                    return made(name, start, stop)
                split, read = stored[name]
                return split.read(start, stop, read)

            yield values

    def make_buffers(self, device: torch.device) -> None:
        for name, buffer in list(persistent_buffers(self.model)):
            if read := self.read(name):
                owner, _, key = name.rpartition(".")
                value = read((0,) * buffer.dim(), tuple(buffer.shape))
                self.model.get_submodule(owner)._buffers[key] = value.to(device, buffer.dtype)
        super().make_buffers(device)  # last: a module whose buffers are all stored may have no initialization
