"""Run variants of the same step, each in its own process group, alternating step by step.

Other load on the machine affects all variants equally, and no variant shares memory with another.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tests.parity_deepspeed import operators


def in_turns(
    module: str, ways: Mapping[str, int], arguments: list[str], steps: int, directory: Path
) -> dict[str, dict[str, float]]:
    """Start all ranks of all variants, and give each variant its turn through a file that its ranks wait for.

    Args:
        module: run with the arguments and `--rank WAY RANK DIRECTORY`; it calls `run_rank`.
        ways: name -> ranks.

    Returns:
        For each variant: median seconds per step, CPU seconds of the busiest rank / of the mean, the last loss, and the
        peak memory over ranks, in bytes.
    """
    processes = []
    for number, (way, ranks) in enumerate(ways.items()):
        for rank in range(ranks):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29610 + number),
                "OMP_NUM_THREADS": "1", **operators.environment(),
            }  # fmt: skip
            command = [sys.executable, "-m", module, *arguments, "--rank", way, str(rank), str(directory)]
            processes.append(subprocess.Popen(command, env=environment))
    taken: dict[str, list[list[float]]] = {way: [] for way in ways}
    last: dict[str, list[dict[str, float]]] = {}
    for step in range(-1, steps):  # the first step is warm-up
        for way, ranks in ways.items():
            (directory / f"go {way} {step}").touch()
            done = [directory / f"done {way} {step} {rank}" for rank in range(ranks)]
            while not all(path.exists() and path.read_text().endswith("\n") for path in done):
                if any(process.poll() not in (None, 0) for process in processes):
                    for process in processes:
                        process.kill()
                    sys.exit("a rank has failed; see above")
                time.sleep(0.01)
            last[way] = told = [json.loads(path.read_text()) for path in done]
            if step >= 0:
                taken[way].append([each["seconds"] for each in told] + [each["cpu"] for each in told])
    for process in processes:
        process.wait()
    return {
        way: {
            "seconds": median(max(row[: ways[way]]) for row in rows),
            "busiest": median(max(cpu := row[ways[way] :]) / (sum(cpu) / len(cpu)) for row in rows),
            "loss": last[way][0]["loss"],
            "peak_bytes": max(each["peak_bytes"] for each in last[way]),
        }
        for way, rows in taken.items()
    }


def plain_step(engine: Any, ids: Any) -> Callable[[], float]:
    """Return a step on these tokens, with our engine or DeepSpeed's."""

    def step() -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def run_rank(step_of: Callable[[], float], steps: int, way: str, rank: str, directory: str) -> None:
    """Run a step in each of this variant's turns; `step_of` returns the loss."""
    for step in range(-1, steps):
        while not Path(directory, f"go {way} {step}").exists():
            time.sleep(0.005)
        started, cpu = time.perf_counter(), time.process_time()
        loss = step_of()
        told = {
            "seconds": time.perf_counter() - started,
            "cpu": time.process_time() - cpu,
            "loss": loss,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        Path(directory, f"done {way} {step} {rank}").write_text(json.dumps(told) + "\n")
