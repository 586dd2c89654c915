"""Measure how much offload I/O overlaps with compute.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.offload_overlap --model medium --offload nvme

Measures three times of one job at ZeRO-3: a step with offload, the same step with everything in memory (compute), and
the reads and writes of the step alone, by all ranks at once (I/O). A step takes at least the longer of the latter two.
Prints seconds, medians over the steps of rank 0, alternating.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.base import Flags
from benchmarks.peers.engine import zero_config
from benchmarks.workload import Text, Work, build_model
from benchmarks.zero import WORK
from launcher.offload.tier import buffer

IN_FLIGHT = 6  # tensors
Moved = tuple[str, str, int]
"""`read` or `write`, key, bytes."""


class Job:
    """One engine and its steps."""

    def __init__(self, work: Work, flags: Flags, rank: int, world: int) -> None:
        import launcher

        config = zero_config(work, flags, world)
        self.engine: Any = launcher.initialize(model=build_model(work.model), config=config)[0]
        text = Text(work.seq)
        self.batches = [text.step(step, work, rank, world) for step in range(4)]
        self.steps = 0

    def step(self) -> float:
        """Run a step; return its seconds."""
        batch = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        return timed(lambda: self._train(batch))

    def _train(self, batch: list[Tensor]) -> None:
        items = [{"input_ids": ids, "labels": ids} for ids in batch]
        self.engine.run_microbatches(items, [1 / len(items)] * len(items))
        self.engine.step()
        self.engine.zero.placements.buffers.wait_for_writes()  # pending writes are part of the step

    def traffic(self) -> list[Moved]:
        """Return the transfers of one step."""
        (tier,) = self.engine.zero.placements.tiers
        moved: list[Moved] = []

        def noted(operation: str) -> Callable[[str, Tensor], Future[None]]:
            carry_out = getattr(tier, operation)

            def call(key: str, tensor: Tensor) -> Future[None]:
                moved.append((operation, key, tensor.numel() * tensor.element_size()))
                future: Future[None] = carry_out(key, tensor)
                return future

            return call

        for operation in ("read", "write"):
            setattr(tier, operation, noted(operation))
        self.step()
        for operation in ("read", "write"):
            delattr(tier, operation)
        return moved

    def io(self, moved: list[Moved]) -> float:
        """Repeat the transfers alone; return the seconds. Values are read before they are written again."""
        (tier,) = self.engine.zero.placements.tiers
        kept = {key: buffer(size, torch.uint8) for _, key, size in moved}
        for key, memory in kept.items():
            tier.read(key, memory).result()

        def move() -> None:
            under_way: deque[tuple[str, Future[None]]] = deque()
            for operation, key, _ in moved:
                while len(under_way) >= IN_FLIGHT or any(key == other for other, _ in under_way):
                    under_way.popleft()[1].result()
                under_way.append((key, getattr(tier, operation)(key, kept[key])))
            while under_way:
                under_way.popleft()[1].result()

        return timed(move)


def timed(call: Callable[[], None]) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=WORK, default="small")
    parser.add_argument("--offload", choices=["nvme", "nvme-all"], default="nvme")
    parser.add_argument("--nvme-path", default="/tmp")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    rank, world, work = dist.get_rank(), dist.get_world_size(), WORK[args.model]
    offloaded = Job(work, Flags(stage=3, offload=args.offload, nvme_path=args.nvme_path), rank, world)
    in_memory = Job(work, Flags(stage=3), rank, world)
    for _ in range(2):
        offloaded.step()
        in_memory.step()
    moved = offloaded.traffic()
    turns = [(offloaded.step(), in_memory.step(), offloaded.io(moved)) for _ in range(args.turns)]
    if rank == 0:
        step, compute, io = (median(column) for column in zip(*turns, strict=True))
        best = median(a / max(b, c) for a, b, c in turns)
        sizes = {op: sum(size for kind, _, size in moved if kind == op) / 1e6 for op in ("read", "write")}
        print(
            f"{args.model}, {args.offload}, {world} ranks: step {step:.3f} s, compute {compute:.3f} s, I/O {io:.3f} s "
            f"({sizes['read']:.0f} MB read and {sizes['write']:.0f} MB written a rank); "
            f"step / max(compute, I/O): {best:.2f}, step / sum: {step / (compute + io):.2f}",
            flush=True,
        )
    offloaded.engine.destroy()
    in_memory.engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
