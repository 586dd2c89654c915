"""What every rank needs, imported once: ranks are forked from the process that has it."""

from __future__ import annotations

import importlib
from contextlib import suppress

import torch

torch.set_num_threads(1)

# most of these are imported when an engine is made or first used, which takes seconds
for name in (
    "torch._dynamo",
    "torch._functorch.partitioners",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "torch.utils.cpp_extension",
    "deepspeed",
    "deepspeed.comm",
    "pytest",
):
    importlib.import_module(name)
for name in ("deepspeed.runtime.engine", "launcher.engine.assemble", "launcher.integrations.stand_ins", "unit.simple_model"):
    with suppress(ImportError):  # each engine has its own; the tests will tell what is missing
        importlib.import_module(name)
with suppress(ImportError):
    from deepspeed.ops.op_builder import cpu

    for builder in (cpu.ShareMemCommBuilder, cpu.FusedAdamBuilder, cpu.CPUAdamBuilder, cpu.CPULionBuilder, cpu.CPUAdagradBuilder):
        builder().load(verbose=False)
