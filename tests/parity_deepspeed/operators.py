"""Compile DeepSpeed's C++ operators for the comparison: `python -m tests.parity_deepspeed.operators`.

DeepSpeed compiles an operator at its first use. On a busy machine this takes minutes, and a process that is killed
meanwhile leaves a lock that blocks all later runs. The operators are therefore compiled before the tests, without a
time limit, into a directory of this virtual environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

DIRECTORY = Path(sys.prefix, "torch_extensions")

NAMES = ("ShareMemComm", "FusedAdam", "CPUAdam", "CPULion", "CPUAdagrad")

COMPILER_PATH = DIRECTORY / "c++"
# DeepSpeed uses -O3 -g, which takes more than twice as long; only numbers are compared.
COMPILER = """#!/bin/sh
exec c++ "$@" -O1 -g0
"""


def environment() -> dict[str, str]:
    """Return the variables to find the operators, to compile others (ninja), and to use the CPU.

    The compiler must be the one that compiled the operators; with another, ninja would compile them again.
    """
    path = f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = {"TORCH_EXTENSIONS_DIR": str(DIRECTORY), "DS_ACCELERATOR": "cpu", "PATH": path}
    return found | {"CXX": str(COMPILER_PATH)}


def main() -> None:
    os.environ.update(environment())
    for lock in DIRECTORY.glob("*/lock"):  # left by a run that was killed
        lock.unlink()
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    COMPILER_PATH.write_text(COMPILER)
    COMPILER_PATH.chmod(0o755)
    from deepspeed.ops.op_builder import cpu

    for name in NAMES:
        getattr(cpu, f"{name}Builder")().load(verbose=False)


if __name__ == "__main__":
    main()
