"""Start processes as the ranks of one run, on one GPU or on several.

    python -m benchmarks.gpu.ranks

checks whether two of them can communicate.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import torch

from tests.pool.worker import one_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARK = "RESULT "


def run(module: str, arguments: Sequence[str], world: int = 1, limit_s: float = 240.0) -> list[str]:
    """Run `python -m MODULE ARGUMENTS` on `world` ranks; return what each prints after MARK.

    Raises:
        RuntimeError: a rank failed or timed out.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **environment(rank, world, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for port in [free_port()]
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=limit_s) for process in processes]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end within {limit_s:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(error[-1500:])
    return [
        next(line.removeprefix(MARK) for line in out.splitlines() if line.startswith(MARK))
        for out, _ in outputs
    ]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables of a rank, with a GPU that it may share if there is one."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "RANK": str(rank),
    }
    if DEVICE == "cpu":
        return {**shared, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    return {**shared, **one_gpu(rank)}


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def reach() -> None:
    """Run the check on one of the two ranks."""
    from launcher.comm import init_distributed

    init_distributed()
    found = torch.ones(1 << 20, device=DEVICE)
    torch.distributed.all_reduce(found)
    assert found.unique().tolist() == [2.0], found
    print(MARK + torch.distributed.get_backend(), flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        reach()
    else:
        print(run("benchmarks.gpu.ranks", [], 2, limit_s=60))
