"""Measure a run: time, memory, traffic, and the load of other processes meanwhile (Linux)."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from benchmarks.workload import Text, Work

MB = 2**20


class Peer(Protocol):
    """A way to train.

    Each rank, or each group of ranks that share a batch, takes an equal share of the global batch.
    """

    def forward_backward(self, micro_batches: list[Tensor]) -> Tensor:
        """Run all microbatches of a step, accumulate gradients, and return this rank's mean loss, or nan if it has
        none.
        """
        ...

    def optimizer_step(self) -> None:
        """Update the parameters and clear the gradients."""
        ...

    def extra(self) -> dict[str, str]:
        """Return details of the run for the report."""
        ...


def rss_mb() -> float:
    """Return the resident memory of this process, MB."""
    return _status("VmRSS:")


def peak_rss_mb() -> float:
    """Return the peak resident memory since `reset_peak`, MB."""
    return _status("VmHWM:")


def reset_peak() -> None:
    """Start a new peak measurement."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    return 0.0


def live_tensor_mb() -> float:
    """Return the MB of distinct CPU storages of floating-point tensors that Python can reach, including gradients."""
    held: dict[int, int] = {}
    for found in gc.get_objects():
        if not isinstance(found, Tensor):
            continue
        for tensor in (found, _gradient(found)):
            address, size = _storage(tensor)
            if address:
                held[address] = size
    return sum(held.values()) / MB


def _gradient(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except Exception:  # placeholders of sharded parameters raise on access
        return None


def _storage(tensor: Tensor | None) -> tuple[int, int]:
    """Return (address, bytes) of a tensor's storage; (0, 0) for none."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own shard
    try:
        if tensor is None or tensor.device.type != "cpu" or not tensor.is_floating_point():
            return 0, 0
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except Exception:  # fake tensors and placeholders have no storage
        return 0, 0


def loopback_mb() -> float:
    """Return the MB transferred over the loopback interface since boot."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[1]) / MB
    return 0.0


def machine_busy_s() -> float:
    """Return the CPU seconds used by all processes of the machine since boot."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


class _Window:
    """Counters of the machine and of this process between construction and `close`."""

    def __init__(self) -> None:
        self.cpu, self.busy, self.wall, self.lo = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float, float]:
        return time.process_time(), machine_busy_s(), time.perf_counter(), loopback_mb()

    def close(self) -> _Window:
        now = self._now()
        self.cpu, self.busy = now[0] - self.cpu, now[1] - self.busy
        self.wall, self.lo = now[2] - self.wall, now[3] - self.lo
        return self


def measure(peer: Peer, work: Work, rank: int, world: int, sharing: int) -> dict[str, Any] | None:
    """Run the job and return, on rank 0, the record of all ranks.

    Args:
        sharing: neighbouring ranks that get the same share of the batch.
    """
    text = Text(work.seq)
    steps = [text.step(step, work, rank // sharing, world // sharing) for step in range(work.steps)]
    gc.collect()
    setup_peak = peak_rss_mb()
    reset_peak()
    losses: list[float] = []
    step_ms: list[float] = []
    live: dict[str, float] = {}
    for step, micro_batches in enumerate(steps):
        if step == work.warmup:
            if world > 1:
                dist.barrier()
            window = _Window()
        start = time.perf_counter()
        loss = peer.forward_backward(micro_batches)
        if step == work.steps - 1:
            probe = time.perf_counter()
            live["after_backward"] = round(live_tensor_mb(), 1)
            start += time.perf_counter() - probe
        peer.optimizer_step()
        step_ms.append((time.perf_counter() - start) * 1e3)
        losses.append(float(loss))
    window.close()
    live["after_step"] = round(live_tensor_mb(), 1)
    mine = {
        "losses": losses,
        "step_ms": step_ms,
        "cpu_s": window.cpu,
        "setup_peak_mb": round(setup_peak),
        "peak_rss_mb": round(peak_rss_mb()),
        "live_mb": live,
        "extra": peer.extra(),
    }
    every: list[Any] = [mine]
    if world > 1:
        every = [None] * world
        dist.all_gather_object(every, mine)
    return _merge(every, window, work) if rank == 0 else None


def _merge(every: list[dict[str, Any]], window: _Window, work: Work) -> dict[str, Any]:
    """Merge the records of all ranks. Shares are equal, so the mean over ranks is the loss of the global batch."""
    timed = every[0]["step_ms"][work.warmup :]
    own = sum(record["cpu_s"] for record in every)
    median = statistics.median(timed)
    return {
        "tokens_per_s": round(work.global_batch * work.seq / median * 1e3, 1),
        "step_ms_median": round(median, 1),
        "step_ms": [round(ms, 1) for ms in every[0]["step_ms"]],
        "cpu_s_per_step": round(own / len(timed), 4),
        "foreign_cpu": round((window.busy - own) / window.wall / (os.cpu_count() or 1), 3),
        "loopback_mb_per_step": round(window.lo / len(timed), 2),
        "setup_peak_mb": [record["setup_peak_mb"] for record in every],
        "peak_rss_mb": [record["peak_rss_mb"] for record in every],
        "live_mb": [record["live_mb"] for record in every],
        "losses": [_mean(step) for step in zip(*(r["losses"] for r in every), strict=True)],
        "extra": every[0]["extra"],
    }


def _mean(losses: tuple[float, ...]) -> float:
    """Return the mean over the ranks that have a loss."""
    return statistics.fmean(loss for loss in losses if not math.isnan(loss))
