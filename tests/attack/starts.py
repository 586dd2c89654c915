"""Many starts of a tiny training on a busy machine.

    python -m tests.attack.starts [--starts N] [--busy N] [--at_once N]

Each start trains two ranks for two steps, beside processes that take the cores and beside other starts. Ends with 1
where a start did not end with 0, and shows what that one printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.launching import environment

LIMIT_S = 900
"""Of one start."""
MODEL = {
    **{"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "vocab_size": 264},
    **{
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
}
CONFIG = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
}
COMMAND = (
    *("--config", "ds.json", "--device", "cpu", "--num_gpus", "2", "pretrain", "--model", "model.json"),
    *("--dataset", "prose.txt", "--seq-length", "32", "--max-steps", "2"),
)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that do nothing but use a core."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def start(cwd: Path, number: int) -> tuple[str | None, float]:
    """What a start said that did not end with 0, None where it did; and the seconds it took."""
    began = time.monotonic()
    said = _said(cwd, number)
    return said, time.monotonic() - began


def _said(cwd: Path, number: int) -> str | None:
    command = [sys.executable, "-m", "launcher.cli.main", *COMMAND, "--output-dir", f"out{number}"]
    variables = {**environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=LIMIT_S, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        return f"no end after {LIMIT_S} s\n{error.stdout!r}\n{error.stderr!r}"
    if done.returncode == 0:
        return None
    logs = sorted((cwd / f"out{number}").glob("logs/*"))
    texts = [f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs]
    return "\n".join([f"exit code {done.returncode}", done.stdout[-4000:], done.stderr[-4000:], *texts])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--busy", type=int, default=30, help="processes that take the cores")
    parser.add_argument("--at_once", type=int, default=8, help="starts that run at the same time")
    flags = parser.parse_args()
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="starts-") as directory,
        busy(flags.busy),
        ThreadPoolExecutor(flags.at_once) as threads,
    ):
        cwd = Path(directory)
        (cwd / "model.json").write_text(json.dumps(MODEL))
        (cwd / "ds.json").write_text(json.dumps(CONFIG))
        (cwd / "prose.txt").write_text("It was the best of times, it was the worst of times. " * 200)
        runs = threads.map(lambda number: start(cwd, number), range(flags.starts))
        for number, (said, took) in enumerate(runs):
            failed += said is not None
            print(f"start {number + 1} of {flags.starts}: {took:.1f} s, {failed} failed", flush=True)
            if said is not None:
                print(said, flush=True)
    print(
        f"{flags.starts} starts, {flags.at_once} at once, beside {flags.busy} busy processes "
        f"on {os.cpu_count()} cores: {failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
