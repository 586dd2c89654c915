"""`NodeSpec`: what one node runs of a job; the same for all nodes but for a few numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

MEMORY_VARIABLE = "LAUNCHER_MEMORY"
"""Tells ranks where the agent of their node holds memory for `checkpoint.peer_memory`."""


def open_log(path: Path, *, keep: bool) -> IO[bytes]:
    """Return a log for writing, unbuffered. What ranks print may be nobody else's business.

    Args:
        keep: go on after what it holds already, as a restart does.
    """

    def private(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    return open(path, "ab" if keep else "wb", buffering=0, opener=private)


@dataclass(frozen=True)
class NodeSpec:
    """Everything that an agent needs to start the ranks of its node; it travels as JSON."""

    kind: str
    """`script` (a .py file), `module` (as `python -m`) or `program` (an executable)."""
    target: str
    arguments: Sequence[str]
    log_dir: str
    ranks: int = 1
    """The number of ranks on this node."""
    first_rank: int = 0
    """Ranks are numbered node by node."""
    world_size: int = 1
    node: int = 0
    nodes: int = 1
    log_prefix: str = ""
    shown: Sequence[int] = (0,)
    """Ranks whose output goes to the front end as well as to their logs."""
    terminal: tuple[int, int] | None = None
    """Rows and columns of the user's terminal, which rank 0 then thinks it has; None where there is none."""
    append_local_rank: bool = False
    """Append `--local_rank=N` to the arguments, as DeepSpeed's launcher does."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every rank, beside those that say who it is."""
    bind_cores: str | None = None
    """Cores to share out among the ranks, `""` for all; None leaves that to the operating system."""
    slots: Sequence[int] | None = None
    """Devices to show to the ranks, counted as in the hostfile; None shows what is visible anyway."""
    run: str = ""
    """The same for all attempts of a run, and for no other run."""
    owned: str | None = None
    """A directory that the run must have for itself (`owner.py`); the agent of rank 0 takes it."""
    watched: bool = False
    """Ranks show what they do, and can be asked for their stacks."""
    attempt: int = 0
    """0, then one more with every restart; the same on all nodes."""

    def log(self, local_rank: int) -> Path:
        return Path(self.log_dir) / f"{self.log_prefix}rank{self.first_rank + local_rank}.log"

    def record(self, local_rank: int) -> Path:
        """Return where a rank writes how it failed. Scripts of two runs may share a directory of logs, and no
        failure."""
        suffix = f".{self.run[:8]}.error.json" if self.run else ".error.json"
        return self.log(local_rank).with_suffix(suffix)

    def arguments_of(self, local_rank: int) -> list[str]:
        return [*([f"--local_rank={local_rank}"] if self.append_local_rank else []), *self.arguments]

    def identity(self, local_rank: int) -> dict[str, str]:
        """Return the variables that tell a rank who it is."""
        return {
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "LOCAL_SIZE": str(self.ranks),
            "GROUP_RANK": str(self.node),
            "CROSS_RANK": str(self.node),
            "CROSS_SIZE": str(self.nodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "LAUNCHER_PID": str(os.getpid()),
            "LAUNCHER_ATTEMPT": str(self.attempt),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_ERROR_FILE": str(self.record(local_rank)),
        }
