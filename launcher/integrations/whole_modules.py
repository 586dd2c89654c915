"""The modules of the `deepspeed` package that provide the names of modules of ours, in addition to `NAMES`."""

from __future__ import annotations

from collections.abc import Mapping

_PACKAGE = "launcher.integrations"
_COMM = (f"{_PACKAGE}.collectives", "torch.distributed")
_CHECKPOINTING = ("launcher.checkpointing", f"{_PACKAGE}.rng_trackers")

WHOLE_MODULES: Mapping[str, tuple[str, ...]] = {
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "comm.pg_utils": (f"{_PACKAGE}.collectives",),
    "comm.torch": (f"{_PACKAGE}.collectives",),
    "comm.utils": (f"{_PACKAGE}.collectives",),
    "elasticity": (f"{_PACKAGE}.elastic",),
    "elasticity.elasticity": (f"{_PACKAGE}.elastic",),
    "elasticity.config": (f"{_PACKAGE}.elastic",),
    "env_report": (f"{_PACKAGE}.version_report",),
    "git_version_info": (f"{_PACKAGE}.version_report",),
    "moe.utils": (f"{_PACKAGE}.experts",),
    "ops.op_builder": (f"{_PACKAGE}.builders",),
    "pipe": ("launcher.pipe",),
    "profiling.flops_profiler": (f"{_PACKAGE}.profiles",),
    "profiling.flops_profiler.profiler": (f"{_PACKAGE}.profiles",),
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.lr_schedules": (f"{_PACKAGE}.lr_schedules",),
    "runtime.pipe": ("launcher.pipe",),
    "runtime.pipe.module": ("launcher.pipe",),
    "runtime.fp16.loss_scaler": (f"{_PACKAGE}.loss_scalers",),
    "runtime.pipe.p2p": (f"{_PACKAGE}.stage_sends",),
    "runtime.pipe.schedule": (f"{_PACKAGE}.pipe_schedule",),
    "runtime.pipe.topology": ("launcher.pipe", f"{_PACKAGE}.grid"),
    "runtime.sequence_parallel.parallel_state_sp": (f"{_PACKAGE}.sequence_groups",),
    "runtime.utils": (f"{_PACKAGE}.utilities", f"{_PACKAGE}.norms", f"{_PACKAGE}.partitioned_tensor"),
    "sequence.layer": (f"{_PACKAGE}.distributed_attention",),
    "utils.groups": (f"{_PACKAGE}.groups",),
    "utils.logging": (f"{_PACKAGE}.utilities",),
    "utils.timer": (f"{_PACKAGE}.timing",),
}
"""Module below `deepspeed` -> modules whose names it provides in addition to those of `NAMES`."""
