"""A placeholder for a sharded parameter in its module: its full shape, dtype and name, but no data."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from launcher.errors import ShardedParameterError
from launcher.zero.features.user_gradients import GradientElsewhere


class ParameterHolder(Protocol):
    """Tracks where the values of a parameter are: a slot of a flat buffer, or a `PartitionedParam` before
    flat buffers exist.

    Attributes:
        name: used in messages.
        whole: all values, while they are gathered.
    """

    def touched(self, *, changed: bool) -> AbstractContextManager[Any]:
        """Return the context in which an operation on the values runs.

        While a model is being built, all ranks run the same operations, so the values are gathered inside the
        context. Otherwise it does nothing.
        """
        ...

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def whole(self) -> torch.Tensor | None: ...


class _Both:
    """The handles of one hook that is registered on several tensors."""

    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


_METADATA_ONLY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class Unwritten:
    """A stand-in for the storage of a sharded parameter, on a rank that only needs its identity.

    Each handle reports a different address: handles with the same one would be taken for tied parameters,
    whose values are read next.
    """

    def __init__(self, parameter: ShardedParameter) -> None:
        self._parameter = parameter

    def data_ptr(self) -> int:
        return id(self._parameter)

    def nbytes(self) -> int:
        return self._parameter.nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter._whole(f"storage().{name}").untyped_storage(), name)


class ShardedParameter(GradientElsewhere, torch.Tensor):
    """A parameter of which this rank holds a slice.

    While it is gathered, every operation acts on the full data. At any other time, access to the data raises
    `ShardedParameterError` with the parameter's name.

    Args:
        holder: tracks where the values are.
        derived: this is a detached copy or an alias; autograd determines whether it requires a gradient.
    """

    _is_param = True  # makes isinstance(x, nn.Parameter) true, which optimizers and HF code check
    zero_holder: ParameterHolder

    @staticmethod
    def __new__(cls, holder: ParameterHolder, *, derived: bool = False) -> ShardedParameter:
        needs_grad = holder.trainable and not derived
        handle = torch.Tensor._make_wrapper_subclass(
            cls, holder.shape, dtype=holder.dtype, device=holder.device, requires_grad=needs_grad
        )
        handle.zero_holder = holder
        return handle

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def data_of(value: Any) -> Any:
            return value._whole(str(func)) if isinstance(value, ShardedParameter) else value

        if func in _METADATA_ONLY and args[0].zero_holder.whole is None:
            return cls(args[0].zero_holder, derived=True)
        with ExitStack() as stack:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, ShardedParameter):
                    stack.enter_context(value.zero_holder.touched(changed=func._schema.is_mutable))
            return func(*tree_map(data_of, args), **tree_map(data_of, kwargs or {}))

    # Methods that torch does not route through __torch_dispatch__ for tensor subclasses:

    def tolist(self) -> Any:
        return self._whole("tolist()").tolist()

    def numpy(self, **keywords: Any) -> Any:
        return self._whole("numpy()").numpy(**keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._whole("a copy").clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole("saving it").clone().__reduce_ex__(protocol)

    def storage(self) -> Any:
        return Unwritten(self) if self._only_looked_at() else self._whole("storage()").storage()

    def untyped_storage(self) -> Any:
        return (
            Unwritten(self) if self._only_looked_at() else self._whole("untyped_storage()").untyped_storage()
        )

    def contiguous(self, *args: Any, **keywords: Any) -> torch.Tensor:
        """Return the gathered values, which are about to be saved. torch's method would return the handle
        itself, which has no data to save."""
        with self.zero_holder.touched(changed=False):
            return self._whole("contiguous()").contiguous(*args, **keywords)

    def _only_looked_at(self) -> bool:
        """Return whether this rank inspects the parameter without its data. Hugging Face's `save_pretrained`
        runs on every rank, but only rank 0 holds the gathered weights and writes them; the other ranks only
        inspect their parameters."""
        return self.zero_holder.whole is None and dist.is_initialized() and dist.get_rank() > 0

    def data_ptr(self) -> int:
        """Return the address of the gathered data, or 0 while the parameter is sharded."""
        whole = self.zero_holder.whole
        return 0 if whole is None else whole.data_ptr()

    def register_hook(self, hook: Any) -> Any:
        """Register a gradient hook on the handle and on its leaf, which replaces it while gathered."""
        leaf = getattr(self.zero_holder, "leaf", None)
        if leaf is None:
            raise self._too_early("register_hook()")
        return _Both(leaf.register_hook(hook), super().register_hook(hook))

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        if not hasattr(self.zero_holder, "leaf"):
            raise self._too_early("register_post_accumulate_grad_hook()")
        return self.zero_holder.leaf.register_post_accumulate_grad_hook(hook)

    def _too_early(self, what: str) -> ShardedParameterError:
        return ShardedParameterError(
            f"{what} on '{self.zero_holder.name}', which does not belong to an engine yet",
            where=f"parameter {self.zero_holder.name}",
            fix="call register_hook() after initialize()",
        )

    def _whole(self, who: str) -> torch.Tensor:
        """Return the full data while it is gathered."""
        holder = self.zero_holder
        if (whole := holder.whole) is None:
            raise ShardedParameterError(
                f"{who} needs the data of parameter '{holder.name}' (shape {tuple(self.shape)}), which "
                "is sharded by ZeRO-3 and not gathered",
                where=f"parameter {holder.name}",
                fix="read or change it inside `with launcher.zero.GatheredParameters([parameter]):`, on every rank",
            )
        return whole

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        state = "sharded" if self.zero_holder.whole is None else "gathered"
        return f"ShardedParameter('{self.zero_holder.name}', shape={tuple(self.shape)}, dtype={self.dtype}, {state})"
