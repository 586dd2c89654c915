"""Points in time on the clock of a device, and the seconds between them.

On CPUs this is the clock of the process. On CUDA it is an event on the current stream: recording one does not
synchronize, and `seconds_between` waits until the device has reached the second event.
"""

from __future__ import annotations

import time

import torch

Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """Return the current time of a device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Moment, last: Moment) -> float:
    """Return the seconds between two points in time of the same device."""
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000
