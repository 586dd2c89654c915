"""Parameters partitioned over all ranks before an engine exists, as `from_pretrained` needs under ZeRO-3.

`Init` in `context.py` builds modules on meta, and their values come from a seed. Here the modules create the
values themselves, as under DeepSpeed's `zero.Init`: a module is built as usual, and once it becomes a
submodule of another one, each rank keeps only a slice of every parameter. Code that loads values enters
`GatheredParameters`. `launcher.initialize` then moves the values into flat buffers, one unit at a time, even
if parameters were tied, resized, frozen or added in between.
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
        values: the full values, on every rank; those of rank 0 are used.
        name: used in messages.
        device: the device on which they are gathered.
        partitioner: the partitioner of the parameter, which sets its dtype and whether its model is being
            built.
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
        """Gather the values while a model is being built, so that its own `__init__` can read and initialise
        them; rank 0's changes are kept. Otherwise do nothing."""
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
            modifier_rank: the rank whose edits are kept and broadcast; None: edits are lost.
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
    """Return whether the parameter is a handle of partitioned values that no engine has taken over yet."""
    return isinstance(parameter, ShardedParameter) and isinstance(parameter.zero_holder, PartitionedParam)


def partitioned_of(parameter: Tensor) -> PartitionedParam:
    """Return the partitioned values of a parameter for which `is_partitioned` is true."""
    assert isinstance(parameter, ShardedParameter) and isinstance(parameter.zero_holder, PartitionedParam)
    return parameter.zero_holder


class Partitioner:
    """Replaces parameters with handles, one for each parameter, no matter how many modules share it.

    Args:
        dtype: the dtype to cast floating-point parameters to; None: keep their own.

    Attributes:
        building: a model is being built: parameters are gathered on access.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.device, self.building, self._dtype = pick_device(), False, dtype
        self._handles: Any = WeakIdKeyDictionary()

    def partition(self, module: nn.Module, prefix: str = "") -> None:
        """Partition every parameter in `module` that is neither partitioned nor on meta. Collective on all
        ranks."""
        for path, inner in module.named_modules(prefix=prefix or type(module).__name__):
            for attribute, parameter in inner._parameters.items():
                if parameter is None or isinstance(parameter, ShardedParameter) or parameter.is_meta:
                    continue
                inner._parameters[attribute] = self.handle(parameter, f"{path}.{attribute}")  # type: ignore[assignment]

    def dtype_of(self, values: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and values.is_floating_point() else values.dtype

    def handle(self, parameter: Tensor, name: str) -> ShardedParameter:
        """Return the handle that replaces a parameter."""
        if parameter not in self._handles:
            handle = ShardedParameter(PartitionedParam(parameter, name, self.device, self))
            handle.__dict__.update(parameter.__dict__)
            self._handles[parameter] = handle
        found: ShardedParameter = self._handles[parameter]
        return found


class PartitionedInit:
    """Builds a model that no rank holds completely: `with PartitionedInit(): model = Model(...)`. Collective.

    A module keeps full parameters until it becomes a submodule of another one, or the `with` ends. Inside the
    `with`, any later access to a parameter gathers it for that operation, on all ranks, and rank 0's changes
    are kept, so a model's own `__init__` can initialise them (`self.apply(self._init_weights)`). With one
    rank the slice is the whole parameter.

    Args:
        module: an existing module, whose parameters are partitioned at once.
        enabled: false makes this do nothing.
        dtype: the dtype of partitioned parameters; None: keep their own.
        others: accepted for compatibility with DeepSpeed; initialize() reads the JSON config.
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
    """A `ParamSource` that takes the partitioned and the full parameters out of a model, and leaves
    parameters on meta in their place.

    Args:
        model: some of its parameters are partitioned; for the others (added since) the values of rank 0 are
            used.
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
        """Open as in `ParamSource`; slices are freed once they are read."""
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
