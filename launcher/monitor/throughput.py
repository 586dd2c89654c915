"""Sequences per second (`timers.throughput`)."""

from __future__ import annotations

import time

import torch

WARM_UP = 2
"""Steps that the mean leaves out: kernels are loaded and buffers are made in them."""


class Throughput:
    """Measures optimizer steps, each from the start of its first forward to its end.

    Args:
        enabled: False makes every call do nothing.
        synchronized: on CUDA wait for queued work at both ends; False measures how fast work is handed over.
        device: of this rank.

    Attributes:
        global_step_count: steps that were measured.
        epoch_count: epochs that the script has told of.
    """

    def __init__(self, *, enabled: bool, synchronized: bool, device: torch.device) -> None:
        self.enabled = enabled
        self._device = device if synchronized and device.type == "cuda" else None
        self._began: float | None = None
        self._last = (0, 0.0)  # samples and seconds of the last step
        self.global_step_count, self.epoch_count = 0, 0
        self._samples, self._seconds = 0, 0.0

    def start(self) -> None:
        """A forward begins; only the first one of a step counts."""
        if self.enabled and self._began is None:
            self._began = self._now()

    def stop(self, samples: int) -> None:
        """An optimizer step on `samples` sequences, over all ranks, is done."""
        if self._began is None:
            return
        seconds, self._began = self._now() - self._began, None
        self._last = (samples, seconds)
        self.global_step_count += 1
        if self.global_step_count > WARM_UP:
            self._samples, self._seconds = self._samples + samples, self._seconds + seconds

    def update_epoch_count(self) -> None:
        """An epoch is over: nothing but the number changes."""
        self.epoch_count += 1

    def avg_samples_per_sec(self) -> float:
        """Return the samples/s over the steps that count; minus infinity before there are some, as in DeepSpeed."""
        return self._samples / self._seconds if self._seconds else float("-inf")

    def line(self) -> str:
        """Return one line for people; empty when nothing was measured."""
        if self.global_step_count == 0:
            return ""
        mean = f", mean {self._samples / self._seconds:.2f}" if self._seconds else ""
        samples, seconds = self._last
        return f"samples/s: {samples / max(seconds, 1e-9):.2f}{mean}"

    def _now(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
