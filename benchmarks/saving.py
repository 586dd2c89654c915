"""How long a checkpoint holds up training: ours between steps and in the background, beside torch's DCP.

    python -m benchmarks.saving [--model medium] [--turns 3] [--out benchmarks/results/saving.md]

Two ranks at ZeRO stage 2 (the peers: FSDP2) save twice; the second save counts, which finds the memory of the first.
"Stall": the call, and what the next optimizer step waits for. "In all": the save and the two steps after it, less two
undisturbed steps; what the disk, the checksums and the copies take from the same two cores is in it. "On disk": from
the call to the complete checkpoint. A peer that is missing is left out, and the table says so."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.base import Flags
from benchmarks.run_peer import MARK, prepare
from benchmarks.sweep import describe_session
from benchmarks.workload import SIZES, Work

Save = Callable[[str], Callable[[], object]]
"""Saves under a name; returns what waits until that is on the disk."""
STEPS = 2  # after a save
WAYS = {
    "ours, between steps": ("ours", "sync"),
    "ours, in the background (recipes)": ("ours", "beside"),
    "ours, in the background (scripts)": ("ours", "copied"),
    "torch DCP, save": ("fsdp2", "sync"),
    "torch DCP, async_save": ("fsdp2", "async"),
    "DeepSpeed, save_checkpoint": ("deepspeed", "sync"),
    "DeepSpeed, writer.decoupled": ("deepspeed", "decoupled"),
}
HEAD = """# What a checkpoint costs a run

{doc}
Written by `python -m benchmarks.saving --model {model} --turns {turns}`. {session}
{parameters:.1f} M parameters in fp32 with Adam's moments, {gigabytes:.2f} GB on the disk. Seconds: median (smallest -
largest).

| | stall | of ours between steps | in all | on disk |
|---|---:|---:|---:|---:|
"""


def saving(peer: Any, name: str, how: str, directory: Path) -> Save:
    if name == "fsdp2":
        return _dcp(peer, how, directory)
    engine = peer.engine
    if name == "ours":
        engine.saver.in_background = how != "sync"
        engine.saver.steps_alone_change = how == "beside"
        return lambda tag: engine.save_checkpoint(directory, tag) and engine.saver.wait
    return lambda tag: engine.save_checkpoint(str(directory), tag) and _flushed(engine)


def _flushed(engine: Any) -> Callable[[], object]:
    return getattr(engine.checkpoint_engine, "wait_all", lambda: None)


def _dcp(peer: Any, how: str, directory: Path) -> Save:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    group = dist.new_group(backend="gloo")

    def save(tag: str) -> Callable[[], object]:
        model, optimizer = get_state_dict(peer.model, peer.optimizer)
        state = {"model": model, "optimizer": optimizer}
        writer = dcp.FileSystemWriter(directory / tag, sync_files=True)
        if how == "sync":
            dcp.save(state, storage_writer=writer)
            return lambda: None
        future: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
        return future.result  # type: ignore[no-any-return]

    return save


def one_rank(way: str, model: str, directory: Path) -> None:
    """Measure one way in this process; rank 0 prints it."""
    name, how = WAYS[way]
    rank, world = prepare()
    import torch.distributed as dist

    from benchmarks.workload import Text

    work = Work(model=model, global_batch=2 * world, micro_batch=2)
    peer = importlib.import_module(f"benchmarks.peers.{name}").build(
        work, Flags(stage=2, reshard=False), rank, world
    )
    text, numbers = Text(work.seq), count()
    save = saving(peer, name, how, directory)

    def step() -> float:
        began = time.perf_counter()
        peer.forward_backward(text.step(next(numbers), work, rank, world))
        peer.optimizer_step()
        return time.perf_counter() - began

    stalled = 0.0
    for tag in ("first", "second"):
        step()
        dist.barrier()
        alone = [step() for _ in range(STEPS)]
        dist.barrier()
        began = time.perf_counter()
        wait = save(tag)
        stall = time.perf_counter() - began
        for _ in range(STEPS):
            step()
        cost = time.perf_counter() - began - sum(alone)
        wait()
        on_disk = time.perf_counter() - began
        if name == "ours":
            stalled, seen = peer.engine.saver.stalled_s, stalled
            stall = stalled - seen
        dist.barrier()
    if rank == 0:
        print(
            MARK + json.dumps({"stall": stall, "cost": cost, "on_disk": on_disk, "step": median(alone)}),
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


def measure(way: str, model: str) -> dict[str, float]:
    """Start the two ranks.

    Raises:
        RuntimeError: they failed.
    """
    directory = Path(tempfile.mkdtemp(prefix="saving-", dir=os.environ.get("SAVING_DIR")))
    try:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "-m",
            "benchmarks.saving",
        ]
        rank = ["--rank-of", way, "--model", model, "--dir", str(directory)]
        done = subprocess.run(
            [*command, *rank],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if not lines:
            raise RuntimeError((done.stderr.strip().splitlines() or ["nothing was printed"])[-1])
        found: dict[str, float] = json.loads(lines[0].removeprefix(MARK))
        return found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="medium")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        one_rank(args.rank_of, args.model, args.dir)
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    failed: dict[str, str] = {}
    for _ in range(args.turns):
        for way in WAYS:
            try:
                if way not in failed:
                    found[way].append(measure(way, args.model))
                    print(way, found[way][-1], flush=True)
            except RuntimeError as error:
                failed[way] = str(error)
                print(way, error, flush=True)
    text = table(found, failed, args.model, args.turns)
    print(text)
    if args.out:
        args.out.write_text(text)


def table(found: dict[str, list[dict[str, float]]], failed: dict[str, str], model: str, turns: int) -> str:
    parameters = SIZES[model].parameters
    text = HEAD.format(
        doc=(__doc__ or "").split("\n\n")[2], model=model, turns=turns, session=json.dumps(describe_session()),
        parameters=parameters / 1e6, gigabytes=parameters * 12 / 1e9,
    )  # fmt: skip
    whole = median(row["stall"] for row in found["ours, between steps"])
    for way, rows in found.items():
        if way in failed or not rows:
            text += f"| {way} | did not run: {failed.get(way, 'not measured')} | | | |\n"
            continue
        share = median(row["stall"] for row in rows) / whole
        cells = [_spread([row[key] for row in rows]) for key in ("stall", "cost", "on_disk")]
        text += f"| {way} | {cells[0]} | {share:.1%} | {cells[1]} | {cells[2]} |\n"
    return text


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


if __name__ == "__main__":
    main()
