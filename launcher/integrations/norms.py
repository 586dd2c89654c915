"""`deepspeed.runtime.utils`: norms of unsharded tensors, and small helpers around them.

The engine clips its own gradients (`gradient_clipping`); these functions are for scripts with gradients of
their own. With a model-parallel unit (`mpu`), norms are reduced over its model-parallel group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from launcher.engine.fragments import ENGINES
from launcher.integrations.groups import bwc_tensor_model_parallel_rank
from launcher.integrations.utilities import move_to_device
from launcher.monitor.memory import current_memory_bytes, peak_memory_bytes

inf = math.inf
copy_to_device = move_to_device
EPSILON = 1e-6


class DummyOptim:
    """A placeholder optimizer with nothing to step.

    Args:
        params: parameters of its only param group.
    """

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the global norm, given the norms of its parts."""
    return math.sqrt(sum(norm**2 for norm in norm_list))


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> float:
    """Return the norm of all elements, or -1 if it is not finite.

    Args:
        norm_type: 2, another power, or infinity.
    """
    return _norm(input_tensors, float(norm_type), mpu)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: float | None = None,
    mpu: Any = None,
    eps: float = EPSILON,
) -> float:
    """Scale the tensors in place so that their norm is at most `max_norm`; return the original norm."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    if (factor := norm / (max_norm + eps)) > 1:
        for tensor in input_tensors:
            tensor.detach().div_(factor)
    return norm


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> float:
    """Scale the gradients in place so that their norm is at most `max_norm`; return the original norm.

    For parameters of an engine, the engine clips in its next step and accounts for sharding itself.
    """
    owners = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(engine.zero.find_slot(owner) is not None for engine in ENGINES for owner in owners):
        return float(torch.nn.utils.clip_grad_norm_(owners, max_norm, norm_type))
    counted = [owner for owner in owners if owner.grad is not None and is_counted(owner, mpu)]
    norm = _norm([owner.grad for owner in counted if owner.grad is not None], float(norm_type), mpu)
    if (factor := max_norm / (norm + EPSILON)) < 1:
        for owner in owners:
            if owner.grad is not None:
                owner.grad.detach().mul_(factor)
    return norm


def get_grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the gradients."""
    owners = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [owner.grad for owner in owners if owner.grad is not None and is_counted(owner, mpu)]
    return _norm([grad for grad in grads if grad is not None], float(norm_type), mpu)


def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the parameters."""
    owners = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return _norm([owner.detach() for owner in owners if is_counted(owner, mpu)], float(norm_type), mpu)


def is_counted(parameter: Tensor, mpu: Any) -> bool:
    """Return whether this rank counts a parameter: only model-parallel rank 0 counts replicated ones."""
    if mpu is None or is_model_parallel_parameter(parameter):
        return True
    return int(bwc_tensor_model_parallel_rank(mpu)) == 0


def is_model_parallel_parameter(p: Any) -> bool:
    """Return whether a parameter is marked as sharded over model-parallel ranks."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def _norm(tensors: Sequence[Tensor], kind: float, mpu: Any) -> float:
    infinite = math.isinf(kind)
    device = tensors[0].device if tensors else torch.device("cpu")
    parts = [tensor.detach().float().norm(kind) for tensor in tensors]
    total = torch.zeros((), device=device)
    for part in parts:
        total = torch.maximum(total, part) if infinite else total + part.to(device) ** kind
    if mpu is not None:
        operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
        dist.all_reduce(total, operation, group=mpu.get_model_parallel_group())
    norm = float(total) if infinite else float(total) ** (1.0 / kind)
    return norm if math.isfinite(norm) else -1.0


def is_invalid_grad_norm(norm: float | Tensor) -> bool:
    """Return whether a norm is invalid: -1, or not finite."""
    value = float(norm)
    return value == -1 or not math.isfinite(value)


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return whether any element is not finite, as a bool tensor."""
    return ~torch.isfinite(x).all()


def mask_nan_or_inf_with_val_inplace(input: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Replace elements that are not finite with `val`."""
    input.masked_fill_(~torch.isfinite(input), val)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Format a call as source text: `base(1, b=2)`."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the running sums."""
    return list(itertools.accumulate(weights))


def get_tensor_bytes(item: Any) -> int:
    """Return the total bytes of all tensors in a container."""
    leaves = tree_flatten(item)[0]
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Return whether two containers have the same structure and equal leaves."""
    (one, shape), (other, shape_of_other) = tree_flatten(inputs1), tree_flatten(inputs2)
    if shape != shape_of_other:
        return False
    return all(
        torch.equal(a, b.to(a.device)) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def align_dense_tensors(tensor_list: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """Return the tensors, plus a zero tensor that pads their total size to a multiple of `alignment`."""
    rest = -sum(tensor.numel() for tensor in tensor_list) % alignment
    if not rest:
        return list(tensor_list)
    first = tensor_list[0]
    return [*tensor_list, torch.zeros(rest, dtype=first.dtype, device=first.device)]


def filter_empty_parameters(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that have elements."""
    return [param for param in params if param.numel() > 0]


def is_optimized_parameter(param: nn.Parameter) -> bool:
    """Return whether a parameter requires gradients and is not empty."""
    return param.requires_grad and param.numel() > 0


def get_checkpoint_folder_size(save_dir: str, tag: str, local_rank: int | None = None) -> int | None:
    """Return the bytes of a checkpoint, or None if `local_rank` is given and not 0."""
    if local_rank not in (None, 0):
        return None
    return sum(path.stat().st_size for path in Path(save_dir, str(tag)).rglob("*") if path.is_file())


def torch_memory_reserved(device_index: int | None = None) -> int:
    return torch.cuda.memory_reserved(device_index) if torch.cuda.is_available() else current_memory_bytes()


def torch_max_memory_reserved(device_index: int | None = None) -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved(device_index)
    return peak_memory_bytes()
