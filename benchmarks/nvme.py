"""Compare the NVMe tier's reads and writes in a directory with fio and with DeepSpeed's aio (pinned tensors).

    python -m benchmarks.nvme --dir /local_nvme [--out benchmarks/results/nvme.md]

All contenders transfer the same number of bytes between memory and a preallocated file in the same directory, with the
same request size and queue depth, bypassing the page cache, in turns. Requires `fio`, and DeepSpeed with libaio-dev and
a compiler. A missing peer is skipped, and the table notes it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from benchmarks.sweep import describe_session
from launcher.config.offload import AioConfig
from launcher.offload.nvme import NvmeTier
from launcher.offload.tier import buffer

Move = Callable[[str], float]
"""`write` or `read` -> bytes/s."""
OURS, ALL = "ours", 'ours, "checksum": "all"'
OPERATIONS = ("write", "read")


def ours(directory: Path, size: int, config: AioConfig) -> Move:
    tier = NvmeTier(directory, config)
    tier.reserve(size)
    data = buffer(size, torch.uint8)
    data.view(torch.int64).random_()

    def move(operation: str) -> float:
        return timed(lambda: getattr(tier, operation)("data", data).result(), size)

    return move


def deepspeed(directory: Path, size: int, config: AioConfig) -> Move:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(
        config.block_size, config.queue_depth, False, True, config.intra_op_parallelism
    )  # fmt: skip
    data = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    data.view(torch.int64).random_()
    path = preallocated(directory / "deepspeed.bin", size)

    def move(operation: str) -> float:
        return timed(lambda: getattr(handle, f"sync_p{operation}")(data, str(path), 0), size)

    return move


def fio(directory: Path, size: int, config: AioConfig, *more: str) -> Move:
    if shutil.which("fio") is None:
        raise FileNotFoundError("fio is not installed")
    path = preallocated(directory / "fio.bin", size)
    jobs = config.intra_op_parallelism
    flags = [
        "--name=x",
        f"--filename={path}",
        f"--bs={config.block_size}",
        f"--iodepth={config.queue_depth}",
        "--ioengine=libaio",
        "--direct=1",
        f"--numjobs={jobs}",
        f"--size={size // jobs}",
        f"--offset_increment={size // jobs}",
        "--group_reporting",
        "--output-format=json",
        *more,
    ]

    def move(operation: str) -> float:
        done = subprocess.run(
            ["fio", f"--rw={operation}", *flags], capture_output=True, text=True, check=True
        )
        told = json.loads(done.stdout[done.stdout.index("{") :])
        return float(told["jobs"][0][operation]["bw_bytes"])

    return move


def preallocated(path: Path, size: int) -> Path:
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return path


def timed(run: Callable[[], object], size: int) -> float:
    started = time.perf_counter()
    run()
    return size / (time.perf_counter() - started)


def measure(directory: Path, size: int, config: AioConfig, turns: int) -> tuple[dict[str, Rates], list[str]]:
    """Return (bytes/s by contender and operation, one per turn; missing peers with the reason).

    The first turn, which writes to new blocks, does not count.
    """
    makers: dict[str, Callable[[], Move]] = {
        OURS: lambda: ours(directory, size, config),
        ALL: lambda: ours(directory, size, config.model_copy(update={"checksum": "all"})),
        "DeepSpeed aio, its locked tensor": lambda: deepspeed(directory, size, config),
        "fio libaio": lambda: fio(directory, size, config),
        "fio libaio, memory mapped (--iomem=mmap)": lambda: fio(directory, size, config, "--iomem=mmap"),
    }
    movers: dict[str, Move] = {}
    missing: list[str] = []
    for name, make in makers.items():
        try:
            movers[name] = make()
        except Exception as error:
            missing.append(f"{name}: {str(error).splitlines()[0]}")
    rates: dict[str, Rates] = {name: {"write": [], "read": []} for name in movers}
    order = list(movers)
    for turn in range(turns + 1):
        for name in order:
            for operation in OPERATIONS:
                rate = movers[name](operation)
                if turn:
                    rates[name][operation].append(rate)
        order = [*order[1:], order[0]]  # vary the order
    return rates, missing


Rates = dict[str, list[float]]


def against_best(rates: dict[str, Rates], name: str, operation: str) -> float:
    """Return the median over turns of a contender's speed relative to the best peer of the same turn."""
    peers = [peer for peer in rates if not peer.startswith(OURS)]
    if not peers:
        return float("nan")
    turns = zip(rates[name][operation], *(rates[peer][operation] for peer in peers), strict=True)
    return median(mine / max(theirs) for mine, *theirs in turns)


def table(rates: dict[str, Rates]) -> str:
    lines = ["| | write MB/s (min-max) | read MB/s (min-max) | write / best peer | read / best peer |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, rate in rates.items():
        speeds = [
            f"{median(rate[op]) / 1e6:,.0f} ({min(rate[op]) / 1e6:,.0f}-{max(rate[op]) / 1e6:,.0f})"
            for op in OPERATIONS
        ]
        ratios = [f"{against_best(rates, name, op):.2f}" for op in OPERATIONS]
        lines.append(f"| {name} | {' | '.join(speeds)} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=512, help="bytes of a turn (default: 512 MiB)")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--block-size", type=int, default=AioConfig().block_size)
    parser.add_argument("--queue-depth", type=int, default=AioConfig().queue_depth)
    parser.add_argument("--intra-op-parallelism", type=int, default=AioConfig().intra_op_parallelism)
    parser.add_argument("--out", type=Path, help="append the table to a file")
    flags = parser.parse_args()
    config = AioConfig(
        block_size=flags.block_size,
        queue_depth=flags.queue_depth,
        intra_op_parallelism=flags.intra_op_parallelism,
    )
    with tempfile.TemporaryDirectory(dir=flags.dir, prefix="bench-nvme-") as directory:
        rates, missing = measure(Path(directory), flags.mib << 20, config, flags.turns)
    asked = (
        f"{flags.mib} MiB, requests of {config.block_size} bytes, queue depth {config.queue_depth}, "
        f"parallelism {config.intra_op_parallelism}, {flags.turns} turns"
    )
    left_out = "".join(f"\n\nLeft out: {line}" for line in missing)
    text = f"{asked}\n\n{table(rates)}{left_out}\n\n{json.dumps(describe_session())}\n"
    print(text)
    if flags.out is not None:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        with flags.out.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
