"""Run user commands on this machine's GPU.

    python -m benchmarks.gpu.smoke

Prints one line of JSON for each: `launch` with every JSON of ds_configs/ for which one GPU is sufficient.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.ranks import DEVICE

CONFIGS = Path(__file__).parents[2] / "ds_configs"
ALONE = ("zero", "bf16", "fp16")  # prefixes of their names
STEPS = "6"


def run(config: Path, out: Path) -> dict[str, Any]:
    began = time.monotonic()
    directory = out / config.stem
    flags = ["--config", str(config), "--device", DEVICE, "--num_gpus", "1"]
    command = "from launcher.cli.main import command; command()"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            command,
            *flags,
            "pretrain",
            "--max-steps",
            STEPS,
            "--output-dir",
            str(directory),
        ],
        capture_output=True,
        text=True,
        cwd=CONFIGS.parent,
    )
    found = {"config": config.name, "code": done.returncode, "seconds": round(time.monotonic() - began, 1)}
    if done.returncode:
        return found | {"failed": (done.stdout + done.stderr)[-2000:]}
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return found | {"losses": [json.loads(line).get("loss") for line in lines if '"loss"' in line]}


def main() -> int:
    configs = [path for path in sorted(CONFIGS.glob("*.json")) if path.name.startswith(ALONE)]
    worst = 0
    with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(3) as threads:
        for found in threads.map(lambda config: run(config, Path(out)), configs):
            print(json.dumps(found), flush=True)
            worst = max(worst, found["code"])
    return worst


if __name__ == "__main__":
    sys.exit(main())
