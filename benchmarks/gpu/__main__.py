"""Run the checks on this GPU: correctness of everything that runs on CPUs, memory estimates, and speed.

    python -m benchmarks.gpu [--seconds 540] [--out DIR] [STAGE ...]

Stages: ranks (whether ranks can communicate), smoke (commands of the README), memory (the estimate), parity (the tests,
on the GPU), speed. Each writes its output to DIR/STAGE.log. At the time limit, report.md and results.json contain the
results so far. The machine needs the packages of `make test`, or those of `python -m benchmarks.gpu.wheels`. Without a
GPU, the same stages run on CPUs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu.ranks import DEVICE
from benchmarks.gpu.report import write

ROOT = Path(__file__).parents[2]
PYTHON = shlex.quote(sys.executable)
TESTS = (
    "tests/zero tests/offload tests/engine tests/experts/test_parity.py tests/sequence/test_parity.py tests/pipeline "
    "tests/tensor tests/optim tests/checkpoint tests/models tests/comm/test_collectives.py tests/comm/test_quantized.py"
)
STAGES = {
    "ranks": f"{PYTHON} -m benchmarks.gpu.ranks",
    "smoke": f"{PYTHON} -m benchmarks.gpu.smoke",
    "memory": f"{PYTHON} -m benchmarks.gpu.memory",
    "parity": f"{PYTHON} -m pytest --device {DEVICE} -vv -n {{workers}} --dist loadfile --timeout 180 --maxfail 400 "
    f"-p no:cacheprovider -p benchmarks.gpu.at_once -W ignore --tb=short {TESTS}",
    "speed": f"{PYTHON} -m benchmarks.gpu.speed",
}
GRACE_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0, help="when to stop; default: 540")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="default: runs/gpu")
    parser.add_argument("--speed-seconds", type=float, default=150.0, help="of them for speed; default: 150")
    parser.add_argument(
        "--workers", type=int, default=2, help="of the tests, each with ranks of its own; default: 2"
    )
    parser.add_argument("--tests", default="", help="arguments for pytest in place of its own list")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default: all")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = args.stages or list(STAGES)
    end = time.monotonic() + args.seconds
    codes: dict[str, int] = {}
    for stage in (stage for stage in STAGES if stage in wanted):
        limit = end if stage == "speed" or "speed" not in wanted else end - args.speed_seconds
        codes[stage] = _run(stage, _command(stage, args), args.out, limit)
        if codes.get("ranks"):
            break  # nothing else would finish
    return write(args.out, codes)


def _command(stage: str, args: argparse.Namespace) -> str:
    command = STAGES[stage].format(workers=args.workers)
    return command.replace(TESTS, args.tests) if args.tests else command


def _run(stage: str, command: str, out: Path, end: float) -> int:
    """Run a command until `end`; return its exit code, 124 on a timeout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with (out / f"{stage}.log").open("w") as log:
        process = subprocess.Popen(
            command, shell=True, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        code = process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = 124
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # later stages are measured alone
            process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    print(f"{stage}: exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
