"""DeepSpeed's optimizer classes, for `isinstance(engine.optimizer, ...)`; the engine itself has only one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from launcher.integrations.kinds import Kind, kind
from launcher.optim.sharded import ShardedOptimizer
from launcher.zero.policy import ZeroPolicy


def _kind(name: str, asks: Callable[[ZeroPolicy], bool]) -> Kind:
    return kind(
        name,
        lambda one: isinstance(one, ShardedOptimizer) and asks(one.zero.policy),
        "the optimizer of an engine",
        "pass the torch optimizer to deepspeed.initialize(optimizer=...)",
    )


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
