"""The estimate of a run that has trained, beside what its ranks measured."""

from __future__ import annotations

from typing import Any

from launcher.config import Config
from launcher.estimate.attention_kernels import CPU_KERNELS, GPU_KERNELS
from launcher.estimate.estimator import Estimator
from launcher.monitor.summary import EstimatedMemory


def estimate_of_run(
    model: Any, config: Config, world: int, sequence: int, *, on_host: bool
) -> list[EstimatedMemory] | str:
    """Return what was to be expected of the first rank of each pipeline stage, or why nobody can say it.

    Args:
        model: the configuration of the Hugging Face model.
        config: of one replica.
        sequence: tokens of a sequence.
        on_host: a run on CPUs: what is offloaded is in the memory of the device.
    """
    try:
        estimator = Estimator(model, attention=CPU_KERNELS if on_host else GPU_KERNELS, on_host=on_host)
        found = estimator.run(config, world, sequence)
    except Exception as error:  # whatever it is: the run is done, and its summary is written
        return f"{type(error).__name__}: {error}"
    return [
        EstimatedMemory(
            rank=each.rank,
            peak_memory_bytes=each.peak + each.host * on_host,
            parameter_bytes=each.kept[0],
            gradient_bytes=each.kept[1],
            optimizer_bytes=each.kept[2],
            step_bytes=each.peak - each.between.total,
        )
        for each in found
    ]
