"""DeepSpeed's optimizer classes, for `isinstance(engine.optimizer, ...)`: here one class steps at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from launcher.errors import LauncherError
from launcher.optim.sharded import ShardedOptimizer
from launcher.zero.policy import ZeroPolicy


class _Kind(type):
    """A class whose instances are the optimizers of engines that `asks` is true of."""

    asks: Callable[[ZeroPolicy], bool]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ShardedOptimizer) and cls.asks(instance.zero.policy)

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        raise LauncherError(
            f"{cls.__name__} cannot be made by a script: it stands for the optimizer of an engine",
            fix="pass the torch optimizer to deepspeed.initialize(optimizer=...)",
        )


def _kind(name: str, asks: Callable[[ZeroPolicy], bool]) -> _Kind:
    return _Kind(name, (), {"asks": staticmethod(asks)})


def _unsharded(dtype: torch.dtype) -> Callable[[ZeroPolicy], bool]:
    return lambda policy: not policy.shard_optim and policy.param_dtype == dtype


DeepSpeedOptimizer = _kind("DeepSpeedOptimizer", lambda policy: True)
DeepSpeedZeroOptimizer = _kind(
    "DeepSpeedZeroOptimizer", lambda policy: policy.shard_optim and not policy.shard_params
)
DeepSpeedZeroOptimizer_Stage3 = _kind("DeepSpeedZeroOptimizer_Stage3", lambda policy: policy.shard_params)
ZeROOptimizer = _kind("ZeROOptimizer", lambda policy: policy.shard_optim)
FP16_Optimizer = _kind("FP16_Optimizer", _unsharded(torch.float16))
FP16_UnfusedOptimizer = _kind("FP16_UnfusedOptimizer", lambda policy: False)
BF16_Optimizer = _kind("BF16_Optimizer", _unsharded(torch.bfloat16))
