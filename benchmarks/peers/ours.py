"""The launcher's engine, from the same JSON as DeepSpeed's."""

from __future__ import annotations

from benchmarks.peers.base import Flags
from benchmarks.peers.engine import EnginePeer, StagesPeer, zero_config
from benchmarks.workload import Work, build_model


def build(work: Work, flags: Flags, rank: int, world: int) -> EnginePeer | StagesPeer:
    import launcher

    config = zero_config(work, flags, world)
    if flags.pp > 1:
        config["pipeline"] = {"stages": flags.pp, "schedule": flags.schedule}
    engine = launcher.initialize(model=build_model(work.model), config=config)[0]
    if flags.pp > 1:
        return StagesPeer(engine, lambda ids: {"input_ids": ids, "labels": ids})
    return EnginePeer(engine)
