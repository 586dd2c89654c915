"""A check for 16-bit floating-point instructions of this machine's CPUs, based on /proc/cpuinfo."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger("launcher")

CPUINFO = Path("/proc/cpuinfo")
# dtype -> CPU features of x86 and aarch64; any one of them provides products in this dtype
INSTRUCTIONS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def lacks(dtype: torch.dtype, cpuinfo: str) -> bool:
    """Return whether the CPUs lack instructions for products in a dtype; False if that is unknown.

    Args:
        cpuinfo: text of /proc/cpuinfo.
    """
    features = {
        feature
        for line in cpuinfo.splitlines()
        if line.split(":")[0].strip() in ("flags", "Features")
        for feature in line.partition(":")[2].split()
    }
    return bool(features) and dtype in INSTRUCTIONS and not features & INSTRUCTIONS[dtype]


@cache
def warn_of_slow_products(dtype: torch.dtype) -> None:
    """Warn once if training in a 16-bit dtype is slow on these CPUs, and suggest fp32."""
    try:
        slow = lacks(dtype, CPUINFO.read_text())
    except OSError:
        return
    if slow:
        logger.warning(
            "this machine's CPUs have no instructions for %(name)s: its matrix products are several times slower than "
            "those of fp32, so train in fp32 here (remove `%(name)s` from the JSON)",
            {"name": NAMES[dtype]},
        )
