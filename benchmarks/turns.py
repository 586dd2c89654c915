"""Alternate the steps of two peers in the same processes.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.turns ddp ours --stage 0 --model small --steps 33

This is the fairest comparison of times on a machine whose speed varies within half a minute. It cannot compare memory,
because both peers are in one process.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time

from benchmarks.measure import Peer
from benchmarks.run_peer import PEERS, add_flags, picked, prepare
from benchmarks.workload import Text, Work


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs=2, choices=PEERS)
    add_flags(parser)
    args = parser.parse_args()
    work, flags = picked(args)
    rank, world = prepare()
    pair: list[Peer] = [
        importlib.import_module(f"benchmarks.peers.{name}").build(work, flags, rank, world)
        for name in args.peers
    ]
    times = in_turns(pair, work, rank // flags.sharing, world // flags.sharing)
    if rank == 0:
        print(summary(args.peers, times))


def in_turns(pair: list[Peer], work: Work, share: int, shares: int) -> list[list[float]]:
    """Return the milliseconds of each timed step of each peer; the order alternates from step to step."""
    import torch.distributed as dist

    text, times = Text(work.seq), [[0.0] * work.steps for _ in pair]
    for step in range(work.steps):
        micro_batches = text.step(step, work, share, shares)
        for which in (0, 1) if step % 2 else (1, 0):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            pair[which].forward_backward(micro_batches)
            pair[which].optimizer_step()
            times[which][step] = (time.perf_counter() - start) * 1e3
    return [timed[work.warmup :] for timed in times]


def summary(names: list[str], times: list[list[float]]) -> str:
    """Return the median step of both, and the speedup of the second: median and quartiles over the steps."""
    ratios = [first / second for first, second in zip(*times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    steps = ", ".join(
        f"{name} {statistics.median(one):.0f} ms" for name, one in zip(names, times, strict=True)
    )
    return f"{steps}; {names[1]} is {middle:.3f} times as fast as {names[0]} (quartiles {low:.3f} {high:.3f})"


if __name__ == "__main__":
    main()
