"""Compiles the C++ operators of DeepSpeed that the comparison uses: `python -m tests.parity_deepspeed.operators`.

DeepSpeed compiles an operator when it is first used, which takes minutes on a busy machine, and who is killed meanwhile
leaves a lock at which every later run waits for ever. So they are compiled before the tests, with no limit of
time, into a directory that belongs to this virtual environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

DIRECTORY = Path(sys.prefix, "torch_extensions")

NAMES = ("ShareMemComm", "FusedAdam", "CPUAdam", "CPULion", "CPUAdagrad")

COMPILER_PATH = DIRECTORY / "c++"
# DeepSpeed asks for -O3 -g, which takes more than twice as long; what is compared is the numbers.
COMPILER = """#!/bin/sh
exec c++ "$@" -O1 -g0
"""


def environment() -> dict[str, str]:
    """What a process needs to find the operators, to compile others (ninja), and to use the CPU.

    The compiler must be the one they were compiled by: with another, ninja would compile them again.
    """
    path = f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = {"TORCH_EXTENSIONS_DIR": str(DIRECTORY), "DS_ACCELERATOR": "cpu", "PATH": path}
    return found | {"CXX": str(COMPILER_PATH)}


def main() -> None:
    os.environ.update(environment())
    for lock in DIRECTORY.glob("*/lock"):  # of a run that was killed
        lock.unlink()
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    COMPILER_PATH.write_text(COMPILER)
    COMPILER_PATH.chmod(0o755)
    from deepspeed.ops.op_builder import cpu

    for name in NAMES:
        getattr(cpu, f"{name}Builder")().load(verbose=False)


if __name__ == "__main__":
    main()
