"""torch DistributedDataParallel. Gradients are bucket views, which saves a copy."""

from __future__ import annotations

import contextlib

from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.base import Flags, LoopPeer, autocast
from benchmarks.workload import Work, build_model


class DDP(LoopPeer):
    model: DistributedDataParallel

    def sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self.model.no_sync()


def build(work: Work, flags: Flags, rank: int, world: int) -> LoopPeer:
    model = DistributedDataParallel(build_model(work.model), gradient_as_bucket_view=True)
    return DDP(model, autocast(work))
