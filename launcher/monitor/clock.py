"""Moments on the clock of a device, and the seconds between them.

On CPUs the clock of the process. On CUDA events of the current stream: taking one costs no synchronisation; the seconds
up to one are known when the device has come there, and asking for them waits for that.
"""

from __future__ import annotations

import time

import torch

Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """Return the present moment."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Moment, last: Moment) -> float:
    """Return the seconds from one moment to another of the same device."""
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000
