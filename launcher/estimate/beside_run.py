"""The estimate for a finished run, to compare with the memory that its ranks measured."""

from __future__ import annotations

from typing import Any

from launcher.config import Config
from launcher.estimate.attention_kernels import CPU_KERNELS, GPU_KERNELS
from launcher.estimate.estimator import Estimator
from launcher.estimate.quantized import adapted_on_meta
from launcher.models.adapters import LoraSettings
from launcher.monitor.summary import EstimatedMemory


def estimate_of_run(
    model: Any,
    config: Config,
    world: int,
    sequence: int,
    lora: LoraSettings | None = None,
    *,
    on_host: bool,
) -> list[EstimatedMemory] | str:
    """Return the expected memory of the first rank of each pipeline stage, or why it cannot be estimated.

    Args:
        model: the configuration of the Hugging Face model.
        config: configuration of one replica.
        sequence: sequence length in tokens.
        lora: the settings of the adapters that the run trains.
        on_host: whether the run is on CPUs, where offloaded tensors share the memory of the device.
    """
    try:
        if lora is not None:
            model = adapted_on_meta(model, lora)
        estimator = Estimator(model, attention=CPU_KERNELS if on_host else GPU_KERNELS, on_host=on_host)
        found = estimator.run(config, world, sequence)
    except Exception as error:  # no error here may prevent the summary of a finished run
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
