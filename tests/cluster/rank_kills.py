"""What becomes of a run of replicas whose ranks are killed at random (`fault_tolerance`):

    python -m tests.cluster.rank_kills [--kills 100] [--steps 1000] [--ranks 4] [--replicas 2] [--seed 0]

kill -9 comes when all replicas train together again. A run without kills follows, and the losses are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.cluster.launching import launching
from tests.cluster.testbed import wait_for
from tests.engine.test_recipes import BYTES, PROSE
from tests.pool.reference import tiny_llama


def prepare(directory: Path, replicas: int, **more: Any) -> list[str]:
    """Write model, data and JSON; return the arguments of `launch` from there."""
    (directory / "model.json").write_text(json.dumps(tiny_llama(vocab=BYTES, layers=2).config.to_dict()))
    (directory / "prose.txt").write_text(PROSE * 20)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "fault_tolerance": {"replicas": replicas, "timeout_s": 30},
        **more,
    }
    (directory / "ds.json").write_text(json.dumps(config))
    recipe = ("pretrain", "--model", "model.json", "--dataset", "prose.txt", "--seq-length", "32")
    return ["--config", "ds.json", "--device", "cpu", *recipe]


def records(directory: Path, name: str = "out") -> list[dict[str, Any]]:
    """The metrics of the steps so far."""
    try:
        lines = (directory / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]
    except (OSError, ValueError):  # not there, or a line is being written
        return []


def ranks_of(directory: Path, replica: int, name: str = "out") -> list[int]:
    """The process ids of a replica's ranks."""
    logs = directory / name / "logs"
    status = json.loads(((logs / f"replica{replica}" if replica else logs) / "status.json").read_text())
    return [rank["pid"] for rank in status["ranks"]]


def together(directory: Path, count: int, since: int = 0) -> bool:
    """Whether all replicas have made a step together, after that many steps."""
    found = records(directory)
    return bool(found) and found[-1]["replicas"] == count and found[-1]["step"] > since


def joined(directory: Path) -> int:
    """How often a replica has joined the others with their state."""
    logs = (directory / "out" / "logs").rglob("rank0.log")
    return sum(len(re.findall(r"joined the other replicas at step", log.read_text())) for log in logs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, default in (
        ("kills", 100),
        ("steps", 1000),
        ("ranks", 4),
        ("replicas", 2),
        ("seed", 0),
        ("batch", 8),
    ):
        parser.add_argument(f"--{flag}", type=int, default=default)
    flags = parser.parse_args()
    chance = random.Random(flags.seed)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        run = [
            *prepare(directory, flags.replicas, train_batch_size=flags.batch),
            "--max-steps",
            str(flags.steps),
        ]
        ranks = ("--num_gpus", str(flags.ranks))
        stalls: list[float] = []
        with launching(
            *ranks, "--max_restarts", "1000", *run, "--output-dir", "out", cwd=directory
        ) as process:
            said: list[str] = []
            assert process.stdout is not None
            reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)  # type: ignore[arg-type]
            reader.start()  # what is not read holds up the front ends
            for number in range(flags.kills):
                begin = records(directory)[-1]["step"] if records(directory) else 0
                wait_for(lambda begin=begin: together(directory, flags.replicas, begin), "all replicas", 120)  # type: ignore[misc]
                time.sleep(chance.uniform(0, 0.5))
                replica = chance.randrange(flags.replicas)
                before = len(records(directory))
                killed = time.monotonic()
                os.kill(chance.choice(ranks_of(directory, replica)), signal.SIGKILL)
                try:
                    wait_for(lambda before=before: len(records(directory)) > before, "a step", 60)  # type: ignore[misc]
                except AssertionError:
                    for log in sorted((directory / "out" / "logs").rglob("rank*.log")):
                        print(log, log.read_text()[-1500:])
                    raise
                stalls.append(time.monotonic() - killed)
                print(
                    number + 1,
                    f"replica {replica}",
                    f"{stalls[-1]:.2f} s",
                    records(directory)[-1]["step"],
                    flush=True,
                )
            process.wait(timeout=3600)
        print("".join(said[-5:]))
        found = records(directory)
        with launching(*ranks, *run, "--output-dir", "whole", cwd=directory) as process_of_all:
            process_of_all.communicate(timeout=3600)
        steps = [record["step"] for record in found]
        assert joined(directory) == len(stalls), "a kill cost the run a restart"
        assert process.returncode == 0 and steps == sorted(set(steps)), steps
        print(
            f"{len(stalls)} kills in {len(steps)} of {flags.steps} steps; exit code {process.returncode}; "
            f"replicas joined {joined(directory)} times\n"
            f"until the next step: {statistics.median(stalls):.2f} s in the median, {max(stalls):.2f} s at most\n"
            f"steps of all replicas: {sum(r['replicas'] == flags.replicas for r in found)}\n"
            f"last losses: {found[-1]['loss']:.4f}, without kills {records(directory, 'whole')[-1]['loss']:.4f}"
        )


if __name__ == "__main__":
    main()
