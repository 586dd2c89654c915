"""Start DeepSpeed and other peers from tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.parity_deepspeed import operators
from tests.parity_deepspeed.forked import Code, Peer

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = Peer("tests.parity_deepspeed.deepspeed_side", "deepspeed")
LIMIT_S = 900.0  # minutes on a busy machine; below the limit of a test
# Processors with AMX round bf16 matrix products differently, and the differences between numbers of ranks exceed the
# tolerances of these tests. Both sides use the kernels of all other processors.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")


def run_deepspeed(task: str, given: Any, world: int, directory: Path) -> Any:
    """Run `deepspeed_side` on `world` ranks and return the JSON that it wrote.

    Raises:
        AssertionError: see `run_ranks`.
    """
    source, out = directory / f"{task}.json", directory / f"{task}-out.json"
    source.write_text(json.dumps(given))
    logs = [directory / f"{task}-rank{rank}.log" for rank in range(world)]
    run_peer(DEEPSPEED, [task, str(source), str(out)], world, logs)
    return json.loads(out.read_text())


def run_peer(peer: Peer, arguments: list[str], world: int, logs: list[Path]) -> None:
    """Run a peer once per rank, like `run_ranks`."""
    port = _free_port()
    environments = [_environment(rank, world, port) for rank in range(world)]
    _check(peer.run(arguments, environments, logs, LIMIT_S), logs)


def run_ranks(command: list[str], world: int, logs: list[Path]) -> None:
    """Run a command once per rank, as a launcher would, for at most `LIMIT_S` seconds.

    Args:
        logs: a file for the output of each rank.

    Raises:
        AssertionError: a rank failed or timed out. The message includes the end of its output.
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
    by = time.monotonic() + LIMIT_S
    try:
        codes = [_code(process, by) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    _check(codes, logs)


def _check(codes: list[Code], logs: list[Path]) -> None:
    told = (
        f"Rank {rank} {code}:\n{log.read_text()[-3000:]}"
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True))
    )
    assert codes == [0] * len(codes), "\n".join(told)


def _code(process: subprocess.Popen[bytes], by: float) -> Code:
    try:
        return process.wait(max(by - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return f"has not ended in {LIMIT_S:g} s"


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        **operators.environment(),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
