"""The planner's step times beside real ones, on two ranks of this machine, in twelve modes.

    python -m benchmarks.predicted_steps [TEXT ...]

Writes `results/predicted_steps.md`; TEXT: only modes with it. The device is measured first (`launch bench device`), and
nothing is fitted to the runs. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from launcher.cli.calibrate import calibrated, measured_run
from launcher.monitor.devices import device_of, row_of

RESULTS = Path(__file__).with_name("results") / "predicted_steps.md"
RANKS, STEPS = 2, 16
_PP = {"stages": 2}
_CPU = {"device": "cpu"}


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


MODES: dict[str, dict[str, Any]] = {
    "ZeRO 0": _zero(0),
    "ZeRO 1": _zero(1),
    "ZeRO 2": _zero(2),
    "ZeRO 3": _zero(3),
    "ZeRO 2, recomputed": {**_zero(2), "activation_checkpointing": {}},
    "ZeRO 2, optimizer offloaded": _zero(2, offload_optimizer=_CPU),
    "ZeRO 3, all offloaded": _zero(3, offload_optimizer=_CPU, offload_param=_CPU),
    "tp 2": {"tensor_parallel": {"autotp_size": 2}},
    "pp 2, 1f1b": {"pipeline": _PP, "gradient_accumulation_steps": 8},
    "pp 2, zb-h1": {"pipeline": {**_PP, "schedule": "zb-h1"}, "gradient_accumulation_steps": 8},
    "cp 2": {"sequence_parallel_size": 2},
    "ep 2": {**_zero(1), "expert_parallel": {"size": 2}},
}


def _launch(*arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "launcher.cli.main", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-2000:])


def measured(mode: str, directory: Path) -> Path:
    """Train in a mode; return the directory of the run."""
    config, run = directory / "ds.json", directory / mode.replace(" ", "_")
    micro = 1 if "pp" in mode else 4
    content = {"train_micro_batch_size_per_gpu": micro, "optimizer": {"type": "AdamW"}, **MODES[mode]}
    config.write_text(json.dumps(content))
    model = "default-moe" if mode.startswith("ep") else "default"
    flags = ["pretrain", "--model", model, "--max-steps", str(STEPS), "--output-dir", str(run)]
    _launch("--num_gpus", str(RANKS), "--device", "cpu", "--config", str(config), *flags)
    return run


def main(texts: list[str]) -> None:
    lines = [
        "# Predicted steps beside real ones",
        "",
        f"Written by `python -m benchmarks.predicted_steps`: {RANKS} ranks on CPUs, the embedded models, 256 tokens.",
        "First with the device as `launch bench device` measured it, and nothing fitted to a run; then after",
        "`launch calibrate` on the first run.",
        "",
        "| mode | measured, s | predicted, s | off by | calibrated, s | off by |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    offs: list[tuple[float, float]] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "device.json"
        _launch("bench", "device", "--num-gpus", str(RANKS), "--out", str(file))
        rows.append(row_of(str(file)))
        for mode in MODES:
            if any(text not in mode for text in texts):
                continue
            run = measured_run(measured(mode, Path(directory)))
            if len(rows) == 1:
                rows.append(calibrated(rows[0], run, RANKS))
            plain, better = (run.predicted(device_of(row), RANKS) for row in rows)
            offs.append((plain / run.seconds - 1, better / run.seconds - 1))
            cells = [f"{plain:.3f}", f"{offs[-1][0]:+.0%}", f"{better:.3f}", f"{offs[-1][1]:+.0%}"]
            lines.append(f"| {mode} | {run.seconds:.3f} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    lines.append("")
    for name, each in zip(("As measured", "Calibrated"), zip(*offs, strict=True), strict=True):
        near = sum(abs(off) <= 0.15 for off in each)
        middle = median(abs(off) for off in each)
        lines.append(f"{name}: the median is off by {middle:.0%}; {near} of {len(each)} are within 15 %.")
    print("\n".join(lines[-2:]))
    if not texts:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
