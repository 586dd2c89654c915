"""How soon, and from where, a run goes on whose nodes are killed at random, with `checkpoint.peer_memory`:

    python -m tests.cluster.node_kills [--kills 30] [--both 5] [--nodes 3] [--seed 0]

Nodes are pretend machines of this one (root is needed). A killed node comes back at once, and its memory is empty.
With --both two neighbours are killed together, so that copies are lost, too: the run goes on from the disk.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from tests.cluster.testbed import Hosts, wait_for
from tests.engine.test_recipes import BYTES, PROSE
from tests.pool.reference import tiny_llama

EVERY, SAVE_EVERY = 5, 40
RESUMED = re.compile(r"resumed from (.*) at step (\d+)")


def prepare(directory: Path, save_every: int = SAVE_EVERY) -> list[str]:
    """Write model, data and JSON; return the arguments of `launch` from there."""
    (directory / "model.json").write_text(json.dumps(tiny_llama(vocab=BYTES, layers=2).config.to_dict()))
    (directory / "prose.txt").write_text(PROSE * 20)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"peer_memory": {"every": EVERY}, "keep_last": 2},
    }
    (directory / "ds.json").write_text(json.dumps(config))
    recipe = ("pretrain", "--model", "model.json", "--dataset", "prose.txt", "--seq-length", "32")
    return ["--config", "ds.json", "--device", "cpu", *recipe, "--save-every", str(save_every)]


def steps_made(directory: Path) -> int:
    """The step of the last whole line of metrics."""
    try:
        lines = (directory / "out" / "metrics.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError):
        return 0


def resumed(directory: Path) -> list[tuple[str, int]]:
    """(From where, at which step) of every restart."""
    text = (directory / "out" / "logs" / "rank0.log").read_text()
    return [(place, int(step)) for place, step in RESUMED.findall(text)]


def kill(
    hosts: Hosts, directory: Path, process: subprocess.Popen[str], names: list[str]
) -> tuple[float, int, str, int]:
    """Kill nodes: (seconds until a step is made again, steps made before, from where it went on, from which step)."""
    before, count = steps_made(directory), len(resumed(directory))
    for name in names:
        hosts("kill", name)
    began = time.monotonic()
    for name in names:
        hosts("heal", name)
    wait_for(lambda: len(resumed(directory)) > count or process.poll() is not None, "the restart", 90)
    assert process.poll() is None, (directory / "out" / "logs" / "rank0.log").read_text()[-2000:]
    place, step = resumed(directory)[-1]
    wait_for(lambda: steps_made(directory) != before or process.poll() is not None, "a step", 60)
    return time.monotonic() - began, before, place, step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in ("kills", 30), ("both", 5), ("nodes", 3), ("seed", 0):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args()
    chance = random.Random(flags.seed)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        hosts = Hosts(directory / "hosts")
        hosts("up", flags.nodes)
        try:
            arguments = prepare(directory)
            restarts = (
                "--max_restarts",
                str(flags.kills + flags.both),
                "--hostfile",
                hosts.hostfile(directory, 1),
            )
            process = hosts.start(
                directory, *restarts, *arguments, "--max-steps", "1000000", "--output-dir", "out"
            )
            threading.Thread(target=process.communicate, daemon=True).start()  # what is not read holds it up
            lines = []
            for number in range(flags.kills + flags.both):
                goal = steps_made(directory) + chance.randrange(SAVE_EVERY, 2 * SAVE_EVERY)
                wait_for(lambda goal=goal: steps_made(directory) > goal, "steps", 120)  # type: ignore[misc]
                first = chance.randrange(flags.nodes)
                names = [first] if number < flags.kills else [first, (first + 1) % flags.nodes]
                found = kill(hosts, directory, process, [f"node{name + 1}" for name in names])
                print(len(names), *found, flush=True)
                lines.append(found)
            process.kill()
        finally:
            hosts("down")
    for said, part in ("one node", lines[: flags.kills]), ("two nodes", lines[flags.kills :]):
        if part:
            seconds = [one[0] for one in part]
            memory = sum("memory" in one[2] for one in part)
            print(
                f"{said}: {len(part)} kills, {memory} from memory; {statistics.median(seconds):.1f} s in the median, "
                f"{max(seconds):.1f} s at most; at most {max(one[1] - one[3] for one in part)} steps were lost"
            )


if __name__ == "__main__":
    main()
