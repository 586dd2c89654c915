"""Run one rank of one run; rank 0 prints `RESULT {json}`.

python -m benchmarks.run_peer --peer single --model tiny
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.run_peer --peer deepspeed --stage 3 --model small
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import warnings
from typing import Any

from benchmarks.peers.base import Flags
from benchmarks.workload import SIZES, Work

PEERS = ["single", "ddp", "fsdp2", "deepspeed", "dtensor", "pipelining", "ours"]
MARK = "RESULT "


def parse() -> tuple[str, Work, Flags]:
    """Parse flags that are named after the fields of `Work` and `Flags`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", required=True, choices=PEERS)
    add_flags(parser)
    args = parser.parse_args()
    return args.peer, *picked(args)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `picked` reads."""
    for kind in (Work, Flags):
        for field in dataclasses.fields(kind):
            convert = type(field.default)
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=_yes if convert is bool else convert,
                default=field.default,
                choices=list(SIZES) if field.name == "model" else None,
            )


def picked(args: argparse.Namespace) -> tuple[Work, Flags]:
    """Return the job and the settings of the peer."""
    made: list[Any] = [
        kind(**{field.name: getattr(args, field.name) for field in dataclasses.fields(kind)})
        for kind in (Work, Flags)
    ]
    return made[0], made[1]


def _yes(text: str) -> bool:
    return text.lower() in ("1", "true", "yes")


def prepare() -> tuple[int, int]:
    """Do the setup that all peers share, before they are imported; return rank and world size."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama  # noqa: F401  (part of the baseline memory)

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def main() -> None:
    name, work, flags = parse()
    rank, world = prepare()
    import torch.distributed as dist

    from benchmarks.measure import measure, rss_mb

    base = rss_mb()
    peer = importlib.import_module(f"benchmarks.peers.{name}").build(work, flags, rank, world)
    record = measure(peer, work, rank, world, flags.sharing)
    if record is not None:
        settings = dataclasses.asdict(work) | {"flags": dataclasses.asdict(flags)}
        head = {"peer": name, "world": world, "parameters": SIZES[work.model].parameters}
        print(MARK + json.dumps(head | settings | {"base_rss_mb": round(base)} | record), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
