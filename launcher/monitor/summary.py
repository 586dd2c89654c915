"""`summary.json` and the table printed at the end of a run."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launcher.files import replace_text
from launcher.monitor.metrics import is_number, valid
from launcher.monitor.progress import duration, short_number

AXES = ("pp", "dp", "cp", "tp", "ep")
WARMUP_STEPS = 5
PEAK, STEP = "peak_memory_bytes", "step_bytes"
PARTS = {
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    STEP: "increase during a step",
}
"""The parts of a rank's memory that are both estimated and measured -> their labels in the table."""
_PACKAGES = ("launcher", "torch", "transformers", "datasets", "numpy")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The measured memory of one rank, and its coordinates on the mesh axes with several ranks."""

    rank: int
    coordinates: dict[str, int] = field(default_factory=dict)
    peak_memory_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    step_bytes: int | None = None
    """Peak of the third step minus the memory before it; None for runs of at most two steps."""


@dataclass(frozen=True, kw_only=True)
class EstimatedMemory:
    """The estimate of `launch memory-estimate` for a rank; see `RankMemory`. The peak covers only tensors."""

    rank: int
    peak_memory_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    step_bytes: int


def write_summary(
    path: str | Path,
    *,
    world_size: int,
    degrees: Mapping[str, int],
    model: str,
    parameters: int,
    records: Sequence[Mapping[str, Any]],
    ranks: Sequence[RankMemory],
    estimate: Sequence[EstimatedMemory] | str = "not requested",
    dynamic_loss_scale: bool = False,
    **extra: Any,
) -> dict[str, Any]:
    """Write `summary.json` atomically (temporary name, then rename) and return its content.

    Args:
        path: the file.
        world_size: number of ranks.
        degrees: degrees of the axes pp, dp, cp, ep, tp; 1 for missing axes.
        model: name of the model.
        parameters: number of parameters; tied ones count once.
        records: `read_metrics(...)`, for steps, final losses and the median of tokens/s.
        ranks: one entry per rank.
        estimate: estimates for the first rank of each pipeline stage, or why there are none.
        dynamic_loss_scale: whether loss scaling is dynamic, so that skipped steps do not count as non-finite.
        extra: additional keys (`zero_stage`, `device`, ...). With `stopped`, the reason why the run has no
            final model, the final loss is null.
    """
    summary = {
        "model": model,
        "parameters": parameters,
        "world_size": world_size,
        "degrees": {axis: int(degrees.get(axis, 1)) for axis in AXES},
        "steps": records[-1]["step"] if records else 0,
        "tokens": records[-1]["tokens"] if records else 0,
        "final_loss": None if "stopped" in extra else _last(records, "loss"),
        "final_eval_loss": _last(records, "eval_loss"),
        "nonfinite_steps": nonfinite_steps(records, dynamic_loss_scale),
        "tokens_per_s": median_tokens_per_s(records),
        "train_time_s": sum(record["step_time_s"] for record in records),
        "ranks": [asdict(rank) for rank in sorted(ranks, key=lambda rank: rank.rank)],
        "estimate": estimate if isinstance(estimate, str) else [asdict(rank) for rank in estimate],
        "versions": versions(),
        **extra,
    }
    write_json(path, summary)
    return summary


def nonfinite_steps(records: Sequence[Mapping[str, Any]], dynamic_loss_scale: bool = False) -> list[int]:
    """Return the steps whose loss or gradient norm was not finite."""
    found, skipped_before = [], 0
    for record in records:
        skipped = record.get("skipped_steps") or 0
        is_skipped, skipped_before = dynamic_loss_scale and skipped > skipped_before, skipped
        if not is_skipped and {"loss", "grad_norm"} & set(valid(record).get("nonfinite", ())):
            found.append(record["step"])
    return found


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON atomically: readers never see a partial file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content, indent=2) + "\n")


def median_tokens_per_s(
    records: Sequence[Mapping[str, Any]], warmup_steps: int = WARMUP_STEPS
) -> float | None:
    """Return the median tokens/s after the first `warmup_steps` records; shorter runs use their last record.

    Without records, return None.
    """
    rates = [record["tokens_per_s"] for record in records]
    kept = rates[min(warmup_steps, len(rates) - 1) :] if rates else []
    return float(statistics.median(kept)) if kept else None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect numerical results."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def print_summary(
    summary: Mapping[str, Any], written: Mapping[str, str | Path], console: Console | None = None
) -> None:
    """Print the summary as a table, and the paths of the output files.

    Args:
        summary: result of `write_summary`.
        written: name -> path, for instance {"metrics": ".../metrics.jsonl"}.
        console: the console to print to; standard output by default.
    """
    console = console or Console()
    table = Table(
        title=f"{summary['model']}, {short_number(summary['parameters'])} parameters", show_header=False
    )
    for name, value in _rows(summary):
        table.add_row(name, value)
    console.print(table)
    # Paths are printed below the table so that terminals can open them and do not truncate them.
    for name, path in written.items():
        console.print(f"{name:>12}: {path}", highlight=False, markup=False, soft_wrap=True)


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in summary["degrees"].items() if degree > 1)
    rows = [("ranks", f"{summary['world_size']}{f' ({degrees})' if degrees else ''}")]
    rows += [("steps", str(summary["steps"])), ("tokens", short_number(summary["tokens"]))]
    rows += [("training time", duration(summary["train_time_s"]))]
    for name, key in (("final loss", "final_loss"), ("final eval loss", "final_eval_loss")):
        if summary[key] is not None:
            rows.append((name, f"{summary[key]:.4f}"))
    if summary["nonfinite_steps"]:
        rows.append(("not finite", _steps(summary["nonfinite_steps"])))
    if summary.get("stopped"):
        rows.append(("stopped", str(summary["stopped"])))
    if summary["tokens_per_s"] is not None:
        rows.append(("tokens/s (median)", short_number(summary["tokens_per_s"])))
    rows += _memory_rows(summary)
    if summary.get("pipeline"):
        rows += _pipeline_rows(summary["pipeline"], summary["ranks"])
    return rows


def _memory_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows, estimate = [], summary.get("estimate", "")
    on_cpu = str(summary.get("device", "")).startswith("cpu")
    for key, label in {PEAK: "peak memory", **PARTS}.items():
        measured = _most_bytes(summary["ranks"], key)
        if measured is None:
            continue
        text = f"{measured / 2**20:.1f} MiB"
        expected = None if isinstance(estimate, str) else _most_bytes(estimate, key)
        if expected is not None and not (on_cpu and key == PEAK):  # which includes Python and libraries
            resident = " resident" * (on_cpu and key == STEP)  # includes fragmentation of malloc
            text += f"{resident} (estimated {expected / 2**20:.1f})"
        rows.append((f"{label} (max over ranks)", text))
    return rows


def _most_bytes(ranks: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """Return the maximum of `key` over the ranks; None if it was not measured."""
    return max((rank[key] for rank in ranks if rank.get(key) is not None), default=None)


def _pipeline_rows(pipeline: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    predicted = f"{pipeline['bubble']:.1%} of the last step ({pipeline['bubble_predicted']:.1%} predicted)"
    rows = [("bubble", predicted)]
    for stage, held in enumerate(pipeline["most_held"]):
        mine = [rank for rank in ranks if rank["coordinates"]["pp"] == stage]
        peak, own = (
            max(rank[key] for rank in mine) / 2**20 for key in ("peak_memory_bytes", "parameter_bytes")
        )
        noun = "activation" if held == 1 else "activations"
        rows.append(
            (f"stage {stage}", f"peak {peak:.1f} MiB, parameters {own:.1f} MiB, at most {held} {noun} held")
        )
    return rows


def _last(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the last value of `key`; None if it is missing or not finite."""
    last: Any = next((record[key] for record in reversed(records) if key in record), None)
    return float(last) if is_number(last) else None


def _steps(steps: Sequence[int]) -> str:
    """Return `at step 7`, or `at 12 steps, 7 to 31`."""
    return f"at step {steps[0]}" if len(steps) == 1 else f"at {len(steps)} steps, {steps[0]} to {steps[-1]}"
