"""`launch calibrate`: a device's row for `launch plan`, from the measured step times of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from launcher.cli.flags import FlagParser, add_gpus_per_node
from launcher.cli.output import must_be_new, write
from launcher.errors import ConfigError
from launcher.files import read_small
from launcher.monitor.summary import WARMUP_STEPS

if TYPE_CHECKING:
    from launcher.monitor.devices import Device
    from launcher.plan.layout import Layout
    from launcher.plan.work import ModelWork

DESCRIPTION = """\
Compares the step time of a recipe's run with the prediction of `launch plan` for its layout, and writes a device row
that makes the prediction match: it scales the fractions of the device's peaks that training reaches."""
EPILOG = """\
examples:
  launch calibrate runs/run --gpu h100 --out h100-here.json
  launch plan --model ./my-model --num-gpus 64 --gpu h100-here.json
"""
LEAST, MOST = 1e-6, 1e3  # range of the factor that scales the row's shares


def calibrate_parser() -> FlagParser:
    """Return the parser of `launch calibrate`."""
    parser = FlagParser(prog="launch calibrate", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="the output directory of a recipe's run that has ended")
    add("--gpu", required=True, metavar="TYPE", help="GPU type, or a file with a row to start from")
    add_gpus_per_node(parser)
    add("--out", metavar="FILE.json", help="write the row to this file, which must not exist yet")
    return parser


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run and its measured step time.

    Args:
        work: the work of its model.
        seconds: median step time without the warmup steps.
    """

    layout: Layout
    work: ModelWork
    seconds: float

    def predicted(self, kind: Device, per_node: int) -> float:
        """Return the step time in seconds that the planner predicts, with `per_node` ranks per node."""
        from launcher.plan.speed import step_time

        return step_time(self.work, self.layout, kind, per_node, exact=True).total


def calibrate(argv: Sequence[str]) -> int:
    """Run `launch calibrate`; returns 0."""
    flags = calibrate_parser().parse_args(argv)
    if flags.out:
        must_be_new(flags.out, "--out")
    run = measured_run(Path(flags.run_dir))
    from launcher.monitor.devices import device_of, row_of

    given = row_of(flags.gpu)
    base, layout = device_of(given), run.layout
    per_node = min(flags.gpus_per_node or base.per_node, layout.world)
    row = calibrated(given, run, per_node)
    print(f"{flags.run_dir}: {layout.in_words()}, sequences of {run.work.sequence:,} tokens")
    before = run.predicted(base, per_node)
    print(f"a step took {run.seconds:.4g} s; predicted for {base.title}: {before:.4g} s")
    reached = f"{row['matmul']:.3g} of the matmul peak ({base.matmul_share:.3g} before)"
    print(
        f"with this row the prediction matches: training reaches {reached}, and {row['traffic']:.3g} of the memory "
        "bandwidth"
    )
    text = json.dumps(row, indent=2) + "\n"
    if flags.out:
        write(flags.out, text, "--out")
        print(f"written: {flags.out}")
    else:
        print(text, end="")
    return 0


def calibrated(row: dict[str, Any], run: MeasuredRun, per_node: int) -> dict[str, Any]:
    """Return the device's row scaled so that the predicted step time matches the run's.

    Args:
        row: the row to start from.
        per_node: ranks per node.

    Raises:
        ConfigError: no share of the peaks is large enough.
    """
    from launcher.monitor.devices import device_of

    base = device_of(row)

    def seconds_with(factor: float) -> float:
        matmul, traffic = base.matmul_share * factor, base.traffic_share * factor
        return run.predicted(replace(base, matmul_share=matmul, traffic_share=traffic), per_node)

    factor = _solved(seconds_with, run.seconds)
    return {
        **row,
        "matmul": float(f"{base.matmul_share * factor:.4g}"),
        "traffic": float(f"{base.traffic_share * factor:.4g}"),
        "calibrated_on": f"{run.layout.in_words()}: {run.seconds:.4g} s a step",
    }


def measured_run(directory: Path) -> MeasuredRun:
    """Read the files of a recipe's output directory.

    Raises:
        ConfigError: `directory` is not such a directory, or the run has not ended or was too short.
    """
    fix = "name the output directory of a recipe's run that has ended"
    text = {
        name: read_small(directory / name, "the run's file", where="RUN_DIR", fix=fix, largest=1 << 30)
        for name in ("summary.json", "config.json", "metrics.jsonl")
    }
    try:
        summary, config = json.loads(text["summary.json"]), json.loads(text["config.json"])
        times = [float(json.loads(line)["step_time_s"]) for line in text["metrics.jsonl"].splitlines()]
        sequence = round(summary["tokens"] / summary["steps"] / config["train_batch_size"])
        world = int(summary["world_size"])
        if min(world, sequence) < 1 or not all(0 < each < math.inf for each in times):
            raise ValueError("no ranks, no tokens, or invalid step times")
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"{directory} contains no readable run: {error}", where="RUN_DIR", fix=fix
        ) from error
    if len(times) <= WARMUP_STEPS:
        raise ConfigError(
            f"{directory} has {len(times)} steps, and the first {WARMUP_STEPS} are ignored as warm-up",
            where="RUN_DIR",
            fix="train longer: --max-steps 20",
        )
    if not (directory / "model" / "config.json").is_file():
        raise ConfigError(f"{directory} has no model/config.json", where="RUN_DIR", fix=fix)
    from launcher.config import load
    from launcher.engine.dtypes import DTYPES
    from launcher.models.build import load_config
    from launcher.plan.layout import layout_of
    from launcher.plan.work import work_of

    resolved = load(config)
    work = work_of(load_config(str(directory / "model")), sequence, DTYPES[resolved.dtype])
    return MeasuredRun(layout_of(resolved, world), work, median(times[WARMUP_STEPS:]))


def _solved(seconds_with: Callable[[float], float], seconds: float) -> float:
    """Return the factor for the shares with which a step is predicted to take `seconds`.

    Raises:
        ConfigError: no factor is large enough, because communication alone takes longer than `seconds`.
    """
    least, most = LEAST, MOST
    if seconds_with(most) > seconds:
        raise ConfigError(
            f"communication alone is predicted to take {seconds_with(most):.3g} s, but a step "
            f"took {seconds:.3g} s",
            where="--gpu",
            fix="measure the links of this machine: launch bench device --out FILE.json, and pass that file",
        )
    for _ in range(80):
        middle = (least * most) ** 0.5
        least, most = (least, middle) if seconds_with(middle) <= seconds else (middle, most)
    return most
