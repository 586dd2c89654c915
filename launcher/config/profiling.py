"""`flops_profiler` and `comms_logger`: where the time of a run goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from launcher.config.problems import show
from launcher.config.section import Conflict, Count, Section, WholeNumber, complaint

OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "inference_all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
}
"""DeepSpeed's names of collectives -> ours."""


def _operations(names: Any) -> Any:
    if not isinstance(names, list | tuple):
        raise complaint(f"must be a list of operations, not {show(names)}", 'write ["all_reduce", ...]')
    for name in names:
        if name not in OPERATIONS:
            raise complaint(f"names {show(name)}, which is no operation", f"use {', '.join(OPERATIONS)}")
    return tuple(names)


class FlopsProfilerConfig(Section):
    """A report of parameters, floating-point operations and time, module by module, of one step of rank 0.

    Operations are counted where they run: matrix products, convolutions and attention, two for each
    multiply-accumulate (MAC). Turns `wall_clock_breakdown` on, as in DeepSpeed. Compiled blocks run uncompiled in the
    step in which operations are counted, and are timed as one.
    """

    differs: ClassVar[dict[str, str]] = {
        "enabled": "counts the backward too, instead of taking it for twice the forward; operations are counted one "
        "step before their time is measured, so that counting does not slow what is timed",
    }

    without_effect: ClassVar[dict[str, str]] = {
        "recompute_fwd_factor": "the backward is counted as it runs, recomputed forwards included, and not estimated",
    }

    enabled: bool = False
    """Write the report."""

    recompute_fwd_factor: Annotated[float, Field(ge=0)] = 0.0
    """DeepSpeed's estimate of how much of the forward the backward repeats."""

    profile_step: WholeNumber = 1
    """Which step: the one after so many optimizer steps were done."""

    module_depth: Annotated[int, Field(ge=-1)] = -1
    """Depth of the tables; 0 is the whole model, -1 all the way down."""

    top_modules: Count = 1
    """Module classes that the summary names at each depth."""

    detailed: bool = True
    """Also print every module in a table."""

    output_file: str | None = None
    """File of the report; null or empty: standard output."""


class CommsLoggerConfig(Section):
    """Counts and times the collectives of each rank: number, bytes, time, bandwidth.

    The table is printed by rank 0 at the end of a recipe, and by `launcher.comm.log_summary()`.
    """

    differs: ClassVar[dict[str, str]] = {
        "enabled": "collectives go on overlapping with compute while they are timed, and the time that a rank was "
        "blocked stands beside; overlap_comm false gives the time of each by itself",
        "debug": "names the unit and the phase that asked, not the Python function",
    }

    enabled: bool = False
    """Log collectives."""

    verbose: bool = False
    """Print each collective when it is done, on rank 0; on GPUs that waits for it."""

    prof_all: bool = True
    """Log every operation; false: those of `prof_ops`."""

    debug: bool = False
    """Tell the units apart: a line for `model.layers.0/forward`, not one for all units in the forward."""

    prof_ops: Annotated[tuple[str, ...], BeforeValidator(_operations)] = ()
    """Operations to log when `prof_all` is false; DeepSpeed's names are taken as well."""

    @property
    def operations(self) -> frozenset[str] | None:
        """Our names of the operations to log; None: all."""
        return None if self.prof_all else frozenset(OPERATIONS[name] for name in self.prof_ops)

    def conflicts(self) -> Iterator[Conflict]:
        if self.enabled is True and self.prof_all is False and not self.prof_ops:
            yield Conflict(
                ("prof_all", "prof_ops"),
                "comms_logger is enabled, and prof_all is false with no operation in prof_ops",
                'set prof_all to true, or name operations: "prof_ops": ["all_reduce"]',
            )
