"""torch fully_shard (FSDP2): one unit per block, and the root.

Resharding after forward is ZeRO-3. Keeping the gathered parameters until backward is its closest equivalent of ZeRO-2.
bf16: fp32 shards, bf16 compute, fp32 reduction.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.peers.base import Flags, LoopPeer
from benchmarks.workload import Work, build_model


class FSDP2(LoopPeer):
    def sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        assert isinstance(self.model, FSDPModule)  # fully_shard changes the class
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


def build(work: Work, flags: Flags, rank: int, world: int) -> LoopPeer:
    model = build_model(work.model)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (world,)),
        "reshard_after_forward": flags.reshard,
    }
    if work.dtype == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return FSDP2(model, autocast=False)
