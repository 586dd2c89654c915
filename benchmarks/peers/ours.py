"""The launcher's engine, from the same JSON as DeepSpeed's."""

from __future__ import annotations

from benchmarks.peers.base import Flags
from benchmarks.peers.engine import EnginePeer, zero_config
from benchmarks.workload import Work, build_model


def build(work: Work, flags: Flags, rank: int, world: int) -> EnginePeer:
    import launcher

    config = zero_config(work, flags, world)
    return EnginePeer(launcher.initialize(model=build_model(work.model), config=config)[0])
