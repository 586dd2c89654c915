"""`offload_param` and `offload_optimizer` of `zero_optimization`, and `aio`: where shards rest, and how NVMe is read.

Sources: ZeRO-Offload (arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857). Sizes count elements, not bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from launcher.config.section import Conflict, Count, Section, Whole

Share = Annotated[float, Field(ge=0, le=1)]


class OffloadConfig(Section):
    """What both offload sections have."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where the shards rest: on the device, in host memory or on NVMe."""

    nvme_path: str | None = None
    """Directory on the NVMe; needed when `device` is "nvme"."""

    pin_memory: bool = True
    """Host buffers are page-locked (DeepSpeed's default since August 2026; false before)."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.device == "nvme" and not self.nvme_path:
            what = 'is "nvme", and nvme_path says no directory'
            yield Conflict(("device", "nvme_path"), what, 'write "nvme_path": "/a/directory/on/the/nvme"')


class OffloadParamConfig(OffloadConfig):
    """Parameters rest elsewhere than on the device. Stage 3."""

    buffer_count: Count = 5
    """Buffers that swap."""

    buffer_size: Count = 100_000_000
    """Elements of one buffer; the largest parameter must fit."""

    max_in_cpu: Whole = 1_000_000_000
    """Elements kept in host memory when `device` is "nvme"."""


class OffloadOptimizerConfig(OffloadConfig):
    """Optimizer state rests elsewhere than on the device, and the CPU steps it. Stages 1 to 3."""

    buffer_count: Count = 4
    """Buffers that swap: at least the number of states a parameter has."""

    pipeline_read: bool = False
    """The next tile is read while this one is stepped."""

    pipeline_write: bool = False
    """The last tile is written while this one is stepped."""

    fast_init: bool = False
    """Quicker start with NVMe."""

    ratio: Share = 1.0
    """Share of the update that runs on the CPU."""

    super_offload: bool = False
    """DeepSpeed's engine for a CPU and a GPU on one chip."""

    cpuadam_cores_perc: Share = 0.8
    """Share of the CPU cores for that engine."""


class AioConfig(Section):
    """Asynchronous file requests of NVMe offload. `launch bench io PATH` finds the best values for a directory."""

    without_effect: ClassVar[dict[str, str]] = {
        "single_submit": "every request is a system call of its own",
        "overlap_events": "a request never waits for earlier ones; there is nothing to gain by it",
        "use_gds": "what moves between a GPU and a disk goes through page-locked host memory",
    }

    block_size: Count = 1_048_576
    """Bytes of a request; a multiple of 4096, else rounded up to one."""

    queue_depth: Count = 8
    """Requests at a time, of each of `intra_op_parallelism`."""

    intra_op_parallelism: Count = 1
    """Multiplies `queue_depth`: every request in flight is a thread that waits for the disk. `thread_count` is its old
    name."""

    single_submit: bool = False
    """Requests are handed over one by one."""

    overlap_events: bool = True
    """Requests do not wait for earlier ones."""

    use_gds: bool = False
    """Straight from the GPU to storage."""

    checksum: Literal["samples", "all"] = "samples"
    """What is checked when data come back from NVMe: two words of every 4096 bytes, which costs nothing and finds what
    disks lose or mix up, or all bytes, which reads the memory once more. Not in DeepSpeed."""
