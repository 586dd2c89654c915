"""Run DeepSpeed's own unit tests on this engine.

python -m tests.parity_deepspeed.upstream --tests DIR/tests/unit [--with ours|theirs] [-k WORDS] [PATH ...]
python -m tests.parity_deepspeed.upstream --report --results DIR

Results are stored in DIR/ours.json and DIR/theirs.json. A test with a stored result is not run again without `--again`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from launcher.integrations.surface import DIRECTORY as SHIM
from tests.parity_deepspeed import operators
from tests.parity_deepspeed.upstream import report
from tests.parity_deepspeed.upstream.areas import AREAS

ROOT = Path(__file__).resolve().parents[3]
SIDES = ("theirs", "ours")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "paths", nargs="*", help="files and directories below tests/unit; default: all that are compared"
    )
    parser.add_argument("--tests", type=Path, help="tests/unit of a checkout of DeepSpeed")
    parser.add_argument(
        "--with", dest="sides", choices=SIDES, action="append", help="default: both, theirs first"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("upstream-results"), help="directory of the JSON files"
    )
    parser.add_argument("-k", help="as in pytest")
    parser.add_argument("--worlds", type=int, default=2, help="the most ranks; tests of more are skipped")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of one test")
    parser.add_argument("--again", action="store_true", help="run what is in the results already, too")
    parser.add_argument("--reference", type=Path, help="another theirs.json")
    parser.add_argument(
        "--left-out", action="store_true", help="ours also runs what is left out, where DeepSpeed passes"
    )
    parser.add_argument(
        "--all", action="store_true", help="ours also runs what fails with DeepSpeed or is left out"
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser


def main() -> int:
    given = arguments().parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    if not given.report:
        if given.tests is None or not (given.tests / "common.py").is_file():
            arguments().error("--tests names no directory tests/unit of a checkout of DeepSpeed")
        for side in given.sides or SIDES:
            subprocess.run(
                _command(given, side), cwd=given.tests.parent, env=_environment(side, given), check=False
            )
    return report.show(given.results, given.reference or given.results / "theirs.json")


def _command(given: argparse.Namespace, side: str) -> list[str]:
    words = [sys.executable, "-m", "pytest", "-p", "tests.parity_deepspeed.upstream.plugin"]
    words += [
        "--noconftest",
        "-c",
        "pytest.ini",
        "--rootdir",
        ".",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    words += [
        "-q",
        "--no-header",
        "--tb=short",
        "-W",
        "ignore",
        "--continue-on-collection-errors",
        "--timeout",
        str(given.timeout * 2),
    ]
    words += ["--results", str((given.results / f"{side}.json").resolve())]
    words += ["--worlds", str(given.worlds), "--rank-limit", str(given.timeout)]
    words += ["--again"] if given.again else []
    reference = given.reference or given.results / "theirs.json"
    if side == "ours" and reference.exists() and not given.all:
        words += ["--passed-in", str(reference.resolve()), *(["--left-out"] if given.left_out else [])]
    words += ["-k", given.k] if given.k else []
    return words + [f"unit/{path}" for path in given.paths or AREAS]


def _environment(side: str, given: argparse.Namespace) -> dict[str, str]:
    path = [*([str(SHIM)] if side == "ours" else []), str(ROOT), str(given.tests.resolve().parent)]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "UPSTREAM_SIDE": side,
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": "16",  # otherwise each CPU socket is one device, and tests of two ranks are skipped
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",  # otherwise every rank counts sockets
        "HF_HUB_OFFLINE": "1",
        **operators.environment(),
    }


if __name__ == "__main__":
    sys.exit(main())
