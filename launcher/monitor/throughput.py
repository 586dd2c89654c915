"""Sequences per second (`timers.throughput`)."""

from __future__ import annotations

import time

import torch

WARM_UP = 2
"""Steps excluded from the mean, in which kernels are loaded and buffers are allocated."""


class Throughput:
    """Measures optimizer steps, each from the start of its first forward to its end.

    Args:
        enabled: False makes every call do nothing.
        synchronized: whether to synchronize CUDA at both ends; False measures only how fast work is queued.
        device: device of this rank.

    Attributes:
        global_step_count: number of measured steps.
        epoch_count: number of epochs reported by the script.
    """

    def __init__(self, *, enabled: bool, synchronized: bool, device: torch.device) -> None:
        self.enabled = enabled
        self._device = device if synchronized and device.type == "cuda" else None
        self._began: float | None = None
        self._last = (0, 0.0)  # samples and seconds of the last step
        self.global_step_count, self.epoch_count = 0, 0
        self._samples, self._seconds = 0, 0.0

    def start(self) -> None:
        """Start measuring a step at its first forward; later calls in the same step have no effect."""
        if self.enabled and self._began is None:
            self._began = self._now()

    def stop(self, samples: int) -> None:
        """End the measurement of an optimizer step on `samples` sequences over all ranks."""
        if self._began is None:
            return
        seconds, self._began = self._now() - self._began, None
        self._last = (samples, seconds)
        self.global_step_count += 1
        if self.global_step_count > WARM_UP:
            self._samples, self._seconds = self._samples + samples, self._seconds + seconds

    def update_epoch_count(self) -> None:
        """Increment the number of epochs at the end of an epoch."""
        self.epoch_count += 1

    def avg_samples_per_sec(self) -> float:
        """Return the samples/s after the warmup steps; minus infinity before that, as in DeepSpeed."""
        return self._samples / self._seconds if self._seconds else float("-inf")

    def line(self) -> str:
        """Return one line of text; empty if nothing was measured."""
        if self.global_step_count == 0:
            return ""
        mean = f", mean {self._samples / self._seconds:.2f}" if self._seconds else ""
        samples, seconds = self._last
        return f"samples/s: {samples / max(seconds, 1e-9):.2f}{mean}"

    def _now(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
