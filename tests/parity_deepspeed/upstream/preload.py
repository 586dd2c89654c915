"""Imports that every rank needs, made once in the process that ranks are forked from."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from typing import Any

import torch

from tests.parity_deepspeed.upstream import absent

if os.environ["UPSTREAM_SIDE"] == "ours":
    absent.serve()
util: Any = importlib.import_module("unit.util")
util.bf16_required_version_check = lambda accelerator_check=True: (
    True
)  # it checks for CUDA; CPUs support bf16
torch.set_num_threads(1)

# most of these are imported when an engine is created or first used, which takes seconds
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
THEIRS = ("deepspeed.runtime.engine", "deepspeed.runtime.zero.stage3", "unit.simple_model")
OURS = ("launcher.engine.assemble", "launcher.integrations.stand_ins", "unit.simple_model")
for name in THEIRS if os.environ["UPSTREAM_SIDE"] == "theirs" else OURS:
    with suppress(ImportError):  # the tests will report what is missing
        importlib.import_module(name)
if os.environ["UPSTREAM_SIDE"] == "theirs":
    from deepspeed.ops.op_builder import cpu

    from tests.parity_deepspeed.operators import NAMES

    for name in NAMES:
        getattr(cpu, f"{name}Builder")().load(verbose=False)
