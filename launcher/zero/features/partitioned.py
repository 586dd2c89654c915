"""Parameters partitioned among all ranks before there is an engine: what `from_pretrained` fills under ZeRO-3.

`Init` of `context.py` builds on meta, and the values come from a seed. Here they are the module's own, as DeepSpeed's
`zero.Init` has them: a module is built as ever, and as soon as it becomes a part of another one each rank keeps a slice
of every parameter. Whoever fills them in enters `GatheredParameters`. `launcher.initialize` takes them from there into
flat buffers, one unit at a time, whatever has been tied, resized, frozen or added in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from launcher.comm import Axis, all_gather, broadcast, init_distributed, pick_device
from launcher.zero.sharded_parameter import ShardedParameter
from launcher.zero.slot import ParamReader, ParamSlot


class PartitionedParam:
    """The values of one parameter, of which each rank keeps a slice in host memory.

    Args:
        values: whole, on every rank; rank 0's count.
        name: for messages.
        device: where they are gathered.
        partitioner: what partitions them, and in which dtype.
    """

    def __init__(
        self, values: Tensor, name: str, device: torch.device, partitioner: Partitioner | None = None
    ) -> None:
        self.name, self.shape, self.device = name, values.shape, device
        self.dtype = values.dtype if partitioner is None else partitioner.dtype_of(values)
        self._partitioner = partitioner
        self.trainable = values.requires_grad
        self.whole: Tensor | None = None
        world = dist.get_world_size()
        self._axis = Axis.over("world")
        self._size = -(-self.shape.numel() // world)
        self._deal(values.detach(), source=0)

    def touched(self, *, changed: bool) -> AbstractContextManager[Any]:
        """Return a model's own `__init__` may still look at it, and fill it in; rank 0's changes count."""
        if self.whole is not None or self._partitioner is None or not self._partitioner.building:
            return nullcontext()
        return self.gathered(0 if changed else None)

    def _deal(self, values: Tensor, source: int) -> None:
        flat = torch.empty(self._size * self._axis.degree, dtype=self.dtype, device=self.device)
        flat[: values.numel()].copy_(values.reshape(-1))
        broadcast(flat, self._axis, f"{self.name}/deal", source=source).wait()
        self._slice = flat[self._axis.span(flat.numel())].to("cpu", copy=True)

    def _gather(self) -> Tensor:
        flat = torch.empty(self._size * self._axis.degree, dtype=self.dtype, device=self.device)
        flat[self._axis.span(flat.numel())].copy_(self._slice)
        all_gather(flat, self._axis, f"{self.name}/gather").wait()
        return flat[: self.shape.numel()].view(self.shape)

    @contextmanager
    def gathered(self, modifier_rank: int | None = None) -> Iterator[Tensor]:
        """Gather all values inside the `with`; a collective of all ranks.

        Args:
            modifier_rank: this rank's edits are kept and sent to all; None: edits are lost.
        """
        opened = self.whole is None
        values = self.whole = self._gather() if self.whole is None else self.whole
        try:
            yield values
            if modifier_rank is not None:
                self._deal(values, modifier_rank)
        finally:
            if opened:
                self.whole = None


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether it stands for values that are partitioned, and belongs to no engine yet."""
    return isinstance(parameter, ShardedParameter) and isinstance(parameter.zero_holder, PartitionedParam)


def partitioned_of(parameter: Tensor) -> PartitionedParam:
    """Return the values of a parameter that `is_partitioned`."""
    assert isinstance(parameter, ShardedParameter) and isinstance(parameter.zero_holder, PartitionedParam)
    return parameter.zero_holder


class Partitioner:
    """Puts handles in the place of parameters, one for each, however many modules show it.

    Args:
        dtype: of what is floating-point, from now on; None: its own.

    Attributes:
        building: a model is being built: what is touched is gathered.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.device, self.building, self._dtype = pick_device(), False, dtype
        self._handles: Any = WeakIdKeyDictionary()

    def partition(self, module: nn.Module, prefix: str = "") -> None:
        """Deal out every parameter inside `module` that is not yet, and is not on meta. A collective of all ranks."""
        for path, inner in module.named_modules(prefix=prefix or type(module).__name__):
            for attribute, parameter in inner._parameters.items():
                if parameter is None or isinstance(parameter, ShardedParameter) or parameter.is_meta:
                    continue
                inner._parameters[attribute] = self.handle(parameter, f"{path}.{attribute}")  # type: ignore[assignment]

    def dtype_of(self, values: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and values.is_floating_point() else values.dtype

    def handle(self, parameter: Tensor, name: str) -> ShardedParameter:
        """Return what stands for it from now on."""
        if parameter not in self._handles:
            handle = ShardedParameter(PartitionedParam(parameter, name, self.device, self))
            handle.__dict__.update(parameter.__dict__)
            self._handles[parameter] = handle
        found: ShardedParameter = self._handles[parameter]
        return found


class PartitionedInit:
    """Build a model of which no rank holds all: `with PartitionedInit(): model = Model(...)`. Collective.

    A module keeps its parameters whole until it becomes a part of another one, or the `with` ends. Inside the `with`
    whatever touches one gathers it for that moment, on all ranks, and rank 0's changes are kept: so a model's own
    `__init__` can fill them in (`self.apply(self._init_weights)`). One rank keeps a slice that is the whole.

    Args:
        module: an existing module: its parameters are partitioned at once.
        enabled: false makes this do nothing.
        dtype: of the parameters, as soon as they are partitioned; None: their own.
        others: accepted for DeepSpeed's callers; the JSON is read by initialize().
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        init_distributed()
        self.enabled = enabled
        self._hooks: list[Any] = []
        self._partitioner = Partitioner(dtype)
        if module is not None and self.enabled:
            self._partitioner.partition(module)

    def __enter__(self) -> PartitionedInit:
        self._seen: dict[nn.Module, None] = {}
        if self.enabled:
            self._partitioner.building = True
            self._hooks = [
                register_module_module_registration_hook(self._child_joins),
                register_module_parameter_registration_hook(self._parameter_joins),
            ]
        return self

    def _child_joins(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        self._seen[parent] = None
        if child is not None:
            self._partitioner.partition(child)
            self._seen.pop(child, None)

    def _parameter_joins(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        self._seen[module] = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if kind is None and self.enabled:
            for root in self._seen:
                self._partitioner.partition(root)
        self._partitioner.building = False
        self._seen.clear()


class PartitionedValues:
    """A source: takes what is partitioned, and what is whole, out of a model, and leaves parameters on meta there.

    Args:
        model: some of its parameters are partitioned; the others (added since) are rank 0's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dealt: dict[str, PartitionedParam] = {}
        device, stand_ins = pick_device(), WeakIdKeyDictionary()
        for prefix, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in stand_ins:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    held = (
                        partitioned_of(parameter)
                        if is_partitioned(parameter)
                        else PartitionedParam(parameter, name, device)
                    )
                    self._dealt[name] = held
                    stand_ins[parameter] = _on_meta(parameter)
                module._parameters[attribute] = stand_ins[parameter]

    @contextmanager
    def open(self, slots: list[ParamSlot]) -> Iterator[ParamReader]:
        """Open as `ParamSource` does; the slices of what has been read are given up."""
        values: dict[str, Tensor] = {}
        for slot in slots:
            with self._dealt.pop(slot.name).gathered() as whole:
                values[slot.name] = slot.split.take(whole).reshape(-1)
        yield lambda name, start, stop: values[name][start:stop]


def _on_meta(parameter: Tensor) -> nn.Parameter:
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    stand_in = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    stand_in.__dict__.update({k: v for k, v in parameter.__dict__.items() if k != "zero_holder"})
    return stand_in
