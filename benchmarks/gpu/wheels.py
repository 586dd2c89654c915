"""Build wheels of the packages for `python -m benchmarks.gpu` that a machine with torch and transformers may lack.

    python -m benchmarks.gpu.wheels DIR [--python 3.12]

The machine needs no network: copy DIR there, and
`pip install --no-index --no-deps --target SITE DIR/*.whl && export PYTHONPATH=SITE`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BINARY = (
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "datasets",
    "dill",
    "multiprocess",
)
BINARY += ("gguf", "trl", "hjson")
SOURCE = ("deepspeed",)  # pure Python if nothing is precompiled
LIMIT_MIB = 64
"""Size limit of a single upload to such a machine."""


def collect(directory: Path, python: str) -> float:
    """Download and build the wheels; return their total MiB.

    Raises:
        RuntimeError: they are larger than LIMIT_MIB.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014")]
    subprocess.run(
        [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--python-version={python}",
         "--implementation=cp", *platforms, "--dest", str(directory), *BINARY],
        check=True,
    )  # fmt: skip
    wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory)]
    subprocess.run([*pip, *wheel, *SOURCE], check=True)
    size = sum(file.stat().st_size for file in directory.glob("*.whl")) / 2**20
    if size > LIMIT_MIB:
        raise RuntimeError(f"the wheels in {directory} are {size:.0f} MiB, more than {LIMIT_MIB}")
    return size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--python", default="3.12", help="its version there; default: 3.12")
    args = parser.parse_args()
    print(f"{collect(args.directory, args.python):.1f} MiB in {args.directory}")
