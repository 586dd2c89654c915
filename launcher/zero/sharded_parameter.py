"""A stand-in for a sharded parameter in its module: true shape, dtype and name, no data."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from launcher.errors import ShardedParameterError
from launcher.zero.features.user_gradients import GradientElsewhere


class ParameterHolder(Protocol):
    """Knows where the values of a parameter are: a slot of a flat buffer, or `PartitionedParam` before there is one.

    Attributes:
        name: for messages.
        whole: all values, while they are gathered.
    """

    def touched(self, *, changed: bool) -> AbstractContextManager[Any]:
        """Return the context of an operation on the values. They are gathered in it where all ranks build the model,
        and so do the same to it; anywhere else it does nothing."""
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
    """Handles of one hook in two places."""

    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


_METADATA_ONLY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class Unwritten:
    """The memory of a sharded parameter, on a rank that only asks which it is: each handle says another, for of tied
    ones the values would be read next."""

    def __init__(self, parameter: ShardedParameter) -> None:
        self._parameter = parameter

    def data_ptr(self) -> int:
        return id(self._parameter)

    def nbytes(self) -> int:
        return self._parameter.nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter._whole(f"storage().{name}").untyped_storage(), name)


class ShardedParameter(GradientElsewhere, torch.Tensor):
    """A parameter of which this rank holds a slice. While it is gathered every operation acts on the full data;
    at any other time touching the data raises `ShardedParameterError` with the parameter's name.

    Args:
        holder: knows where its values are.
        derived: a detached one or an alias, of which autograd says itself whether it needs a gradient.
    """

    _is_param = True  # isinstance(x, nn.Parameter) is true: optimizers and HF code ask for it
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

    # What torch answers for tensor subclasses without asking __torch_dispatch__:

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
        """Return what is about to be written; it would be itself, and be written as nothing."""
        with self.zero_holder.touched(changed=False):
            return self._whole("contiguous()").contiguous(*args, **keywords)

    def _only_looked_at(self) -> bool:
        """Return whether a parameter is only looked at. Hugging Face's `save_pretrained` is called on every rank, with
        the weights on rank 0. The others write the weights on rank 0. The others write nothing, and only look at their
        parameters."""
        return self.zero_holder.whole is None and dist.is_initialized() and dist.get_rank() > 0

    def data_ptr(self) -> int:
        """Return 0 while it is sharded."""
        whole = self.zero_holder.whole
        return 0 if whole is None else whole.data_ptr()

    def register_hook(self, hook: Any) -> Any:
        """Register a hook as on a plain parameter: gradients come to what stands in its place while it is gathered."""
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
            f"{what} on '{self.zero_holder.name}', which no engine trains yet",
            where=f"parameter {self.zero_holder.name}",
            fix="call register_hook() after initialize()",
        )

    def _whole(self, who: str) -> torch.Tensor:
        """Return the full data while it is gathered."""
        holder = self.zero_holder
        if (whole := holder.whole) is None:
            raise ShardedParameterError(
                f"{who} needs the data of parameter '{holder.name}' (shape {tuple(self.shape)}), "
                "which ZeRO-3 keeps sharded until it is gathered",
                where=f"parameter {holder.name}",
                fix="read or change it inside `with launcher.zero.GatheredParameters([parameter]):`, on every rank",
            )
        return whole

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        state = "sharded" if self.zero_holder.whole is None else "gathered"
        return f"ShardedParameter('{self.zero_holder.name}', shape={tuple(self.shape)}, dtype={self.dtype}, {state})"
