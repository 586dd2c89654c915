"""Run the core tests with other versions of transformers and torch.

    python -m tests.versions [NAME==VERSION ...]

Each version is installed into its own directory, in front of the environment's packages. Prints one line per version:
the number of passed tests, and the failures. Exits with an error if a test failed. torch from PyPI includes the CUDA
libraries: 3 GB per version.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.versions import ROOT

DIRECTORY = ROOT / ".venv-versions"
VERSIONS = ("transformers==5.4.0", "transformers==5.10.4", "transformers==5.17.0", "transformers==5.24.0")
CORE = [
    "tests/zero/test_parity.py", "tests/zero/test_models.py", "tests/offload/test_training.py",
    "tests/optim/test_own_optimizers.py", "tests/tensor/test_matrix.py", "tests/tensor/test_every_model.py",
    "tests/pipeline/test_parity.py", "tests/pipeline/test_rows.py", "tests/sequence/test_parity.py",
    "tests/experts/test_parity.py", "tests/experts/test_loading.py", "tests/models", "tests/engine/test_export.py",
    "tests/engine/test_resume.py", "tests/engine/test_compile.py", "tests/integrations/test_transformers.py",
]  # fmt: skip


def installed(requirement: str) -> Path:
    """Return the directory with the version and its dependencies, except numpy, which comes from the environment."""
    directory = DIRECTORY / requirement.replace("==", "-")
    if not (directory / "complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(directory)]
        subprocess.run([*pip, requirement], check=True)
        for part in directory.glob("numpy*"):
            subprocess.run(["rm", "-r", str(part)], check=True)
        (directory / "complete").touch()
    return directory


def tried(requirement: str) -> tuple[str, list[str]]:
    """Return (pytest's summary line, failed tests)."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "--show-capture=no",
        "-p",
        "no:cacheprovider",
        "-rfE",
    ]
    done = subprocess.run(
        [*command, *CORE],
        env={**os.environ, "PYTHONPATH": str(installed(requirement)), "COLUMNS": "200"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    failed = [line.split()[1] for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    if done.returncode and not failed:
        failed = [(done.stdout + done.stderr)[-500:]]
    last = [line for line in lines if re.search(r"\d+ (passed|failed)", line)]
    return (last[-1].strip("= ") if last else f"exit code {done.returncode}"), failed


def main(requirements: list[str]) -> int:
    wrong = 0
    for requirement in requirements or VERSIONS:
        said, failed = tried(requirement)
        print(f"{requirement}: {said}", *failed, sep="\n  ", flush=True)
        wrong += len(failed)
    return min(1, wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
