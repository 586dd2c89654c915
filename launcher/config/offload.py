"""`offload_param` and `offload_optimizer` of `zero_optimization`, and `aio`: offload of shards, NVMe I/O.

Sources: ZeRO-Offload (arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857). Sizes count elements, not bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from launcher.config.section import Count, Section, WholeNumber, stage_in

Share = Annotated[float, Field(ge=0, le=1)]


class OffloadConfig(Section):
    """Keys shared by both offload sections."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where shards are stored: on the device, in host memory or on NVMe."""

    nvme_path: str | None = None
    """Directory on NVMe; required if `device` is "nvme"."""

    pin_memory: bool = True
    """Page-lock host buffers if there is a GPU (DeepSpeed's default since August 2026; false before)."""

    device_budget: WholeNumber | None = None
    """Bytes per rank that stay on the device before anything is offloaded. Not in DeepSpeed."""

    host_budget: WholeNumber | None = None
    """Bytes per rank that stay in host memory if `device` is "nvme". Not in DeepSpeed."""


class OffloadParamConfig(OffloadConfig):
    """Store parameters off the device. Stage 3."""

    differs: ClassVar[dict[str, str]] = {
        "buffer_size": "a parameter may be larger; buffers have the size of what is read and are not preallocated",
    }

    buffer_count: Count = 5
    """Maximum number of units (blocks of the model) that are prefetched from NVMe; on a CPU, units that stay
    gathered between forward and backward count too."""

    buffer_size: Count = 100_000_000
    """At most `buffer_count` times this many elements are prefetched, but always at least one unit."""

    max_in_cpu: WholeNumber = 1_000_000_000
    """Elements per rank that stay in host memory if `device` is "nvme" and `host_budget` is not set."""


class OffloadOptimizerConfig(OffloadConfig):
    """Store optimizer state off the device and step it on the CPU. Stages 1 to 3."""

    without_effect: ClassVar[dict[str, str]] = {
        "super_offload": "offloaded state is updated on the CPU by all threads, and during backward if the "
        "update does not need the whole gradient (for its norm, for example)",
        "cpuadam_cores_perc": "OMP_NUM_THREADS sets the number of optimizer threads",
        "fast_init": "optimizer states are written after the step that creates them; initialization writes nothing",
    }
    differs: ClassVar[dict[str, str]] = {
        "device": '"nvme" works at stages 1 to 3; in DeepSpeed only at stage 3',
        "ratio": "works at stages 1 to 3, in units of whole buffers; in DeepSpeed only at stage 3",
        "pipeline_read": "on by default",
        "pipeline_write": "on by default",
    }
    differs_where: ClassVar[dict[str, Callable[[Any, Mapping[str, Any]], bool]]] = {
        "device": lambda value, tree: value == "nvme" and stage_in(tree) != 3,
        "ratio": lambda value, tree: stage_in(tree) != 3,
    }

    buffer_count: Count = 4
    """Maximum number of tensors (weights, gradients or one state of a flat buffer) that are written to NVMe
    while others are in use."""

    pipeline_read: bool = True
    """Read the next flat buffer from NVMe while the current one is stepped."""

    pipeline_write: bool = True
    """Write an updated group to NVMe while the next one is stepped. False: finish writing it first."""

    fast_init: bool = False
    """Faster initialization with NVMe."""

    super_offload: bool = False
    """DeepSpeed has a separate engine for a CPU and a GPU on one chip."""

    cpuadam_cores_perc: Share = 0.8
    """Share of the CPU cores that run the step with `super_offload`."""

    ratio: Share = 1.0
    """Share of the update that runs on the CPU (Twin-Flow); the state of the rest stays on the device."""


class ZenFlowConfig(Section):
    """ZenFlow: DeepSpeed's offload that updates weights with large gradients in each step, others less often.

    This section has no effect.
    """

    topk_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of gradient columns updated in each step."""

    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """The unit of `select_interval`."""

    select_interval: Count | Literal["auto"] = "auto"
    """Steps or epochs after which the columns are selected again."""

    update_interval: Count | Literal["auto"] = "auto"
    """Steps after which the other columns are updated."""

    overlap_step: bool = False
    """Run the CPU step during forward and backward."""

    offload: bool = False
    """Offload the selected states too."""

    auto_ratio: Share = 0.99
    """Threshold of the automatic update interval."""

    full_warm_up_rounds: WholeNumber = 0
    """Initial rounds with full updates."""

    pt_reserved_cores_perc: Share = 0.5
    """Share of the CPU cores left to torch."""

    steps_per_epoch: Count | None = None
    """Set by DeepSpeed itself."""


class AioConfig(Section):
    """Asynchronous I/O of NVMe offload. `launch bench io PATH` finds the best values for a directory."""

    without_effect: ClassVar[dict[str, str]] = {
        "single_submit": "every request is a separate system call",
        "overlap_events": "requests never wait for earlier ones",
        "use_gds": "transfers between GPU and disk go through page-locked host memory",
    }

    block_size: Count = 1_048_576
    """Bytes per request, rounded up to a multiple of 4096."""

    queue_depth: Count = 8
    """Requests in flight per `intra_op_parallelism`."""

    intra_op_parallelism: Count = 1
    """Multiplies `queue_depth`; every request in flight is a thread that waits for the disk. Formerly
    `thread_count`."""

    single_submit: bool = False
    """Submit requests one by one."""

    overlap_events: bool = True
    """Requests do not wait for earlier ones."""

    use_gds: bool = False
    """Transfer directly between GPU and storage."""

    checksum: Literal["samples", "all"] = "samples"
    """The part of the data that is verified when it is read back from NVMe. "samples": two words of every
    4096 bytes, which costs nothing and detects data that a disk loses or mixes up. "all": all bytes, which
    reads the memory once more. Not in DeepSpeed."""
