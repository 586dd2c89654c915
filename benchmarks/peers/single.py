"""One process, plain PyTorch: the reference for losses, and the speed without communication."""

from __future__ import annotations

from benchmarks.peers.base import Flags, LoopPeer, autocast
from benchmarks.workload import Work, build_model


def build(work: Work, flags: Flags, rank: int, world: int) -> LoopPeer:
    return LoopPeer(build_model(work.model), autocast(work))
