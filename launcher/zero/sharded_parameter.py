"""What stands in a module while its parameter is sharded: true shape, dtype and name, no data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from launcher.errors import ShardedParameterError

if TYPE_CHECKING:
    from launcher.zero.slot import Slot

_METADATA_ONLY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class ShardedParameter(torch.Tensor):
    """A parameter of which this rank holds a slice. While it is gathered every operation acts on the full data;
    at any other time touching the data raises `ShardedParameterError` with the parameter's name.

    Args:
        slot: the place of the parameter in its flat buffer.
    """

    _is_param = True  # isinstance(x, nn.Parameter) is true: optimizers and HF code ask for it
    zero_slot: Slot

    @staticmethod
    def __new__(cls, slot: Slot) -> ShardedParameter:
        handle = torch.Tensor._make_wrapper_subclass(
            cls,
            slot.shape,
            dtype=slot.flat.dtype,  # not yet the leaf's: the user's parameter is converted after this
            device=slot.flat.pool.device,
            requires_grad=slot.leaf.requires_grad,
        )
        handle.zero_slot = slot
        return handle

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def data_of(value: Any) -> Any:
            return value._whole(str(func)) if isinstance(value, ShardedParameter) else value

        if func in _METADATA_ONLY and not args[0].zero_slot.flat.gathered:
            return cls(args[0].zero_slot)
        return func(*tree_map(data_of, args), **tree_map(data_of, kwargs or {}))

    # What torch answers for tensor subclasses without asking __torch_dispatch__:

    def tolist(self) -> Any:
        return self._whole("tolist()").tolist()

    def numpy(self, **keywords: Any) -> Any:
        return self._whole("numpy()").numpy(**keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._whole("a copy").clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole("saving it").clone().__reduce_ex__(protocol)

    def _whole(self, who: str) -> torch.Tensor:
        """The full data while it is gathered."""
        slot = self.zero_slot
        if not slot.flat.gathered:
            raise ShardedParameterError(
                f"{who} needs the data of parameter '{slot.name}' (shape {tuple(self.shape)}), "
                "which ZeRO-3 keeps sharded: no rank holds it whole",
                where=f"parameter {slot.name}",
                fix="read or change it inside `with launcher.zero.GatheredParameters([parameter]):`, on every rank",
            )
        return slot.leaf.data

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        slot = self.zero_slot
        state = "gathered" if slot.flat.gathered else "sharded"
        return f"ShardedParameter('{slot.name}', shape={tuple(self.shape)}, dtype={self.dtype}, {state})"
