"""Starts DeepSpeed beside the tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280.0


def run_deepspeed(task: str, given: Any, world: int, directory: Path, limit_s: float = LIMIT_S) -> Any:
    """Runs `deepspeed_side` on `world` ranks for `limit_s` seconds at most and returns the JSON that it wrote.

    Raises:
        AssertionError: a rank failed; with the end of its output.
    """
    source, out = directory / f"{task}.json", directory / f"{task}-out.json"
    source.write_text(json.dumps(given))
    command = [sys.executable, "-m", "tests.parity_deepspeed.deepspeed_side", task, str(source), str(out)]
    run_ranks(command, world, [directory / f"{task}-rank{rank}.log" for rank in range(world)], limit_s)
    return json.loads(out.read_text())


def run_ranks(command: list[str], world: int, logs: list[Path], limit_s: float = LIMIT_S) -> None:
    """Runs a command once for every rank, as a launcher would, for `limit_s` seconds at most.

    Args:
        logs: a file for the output of each rank.

    Raises:
        AssertionError: a rank failed; with the end of its output.
    """
    port = _free_port()
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(rank, world, port),
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(limit_s) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, code in enumerate(codes):
        assert code == 0, f"DeepSpeed's rank {rank}:\n" + logs[rank].read_text()[-3000:]


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
