"""`NodeSpec`: the part of a job that one node runs; it differs between nodes only in a few numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

MEMORY_VARIABLE = "LAUNCHER_MEMORY"
"""Names the directory that the agent of a node provides for `checkpoint.peer_memory`."""


def open_log(path: Path, *, keep: bool) -> IO[bytes]:
    """Open a log for writing, unbuffered, and readable by its owner only: the output of ranks may be private.

    Args:
        keep: append to what the file already contains, as a restart does.
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
    """Rows and columns of the user's terminal, which rank 0 sees as its own; None if there is no terminal."""
    append_local_rank: bool = False
    """Append `--local_rank=N` to the arguments, as DeepSpeed's launcher does."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every rank, in addition to those that identify it."""
    bind_cores: str | None = None
    """Cores to divide among the ranks, `""` for all; None leaves placement to the operating system."""
    slots: Sequence[int] | None = None
    """Devices visible to the ranks, numbered as in the hostfile; None does not restrict them."""
    run: str = ""
    """Identifies the run: the same for all its attempts, and different from every other run."""
    owned: str | None = None
    """A directory that the run must own exclusively (`owner.py`); the agent of rank 0 claims it."""
    watched: bool = False
    """Ranks report what they are doing, and can be asked for their stacks."""
    attempt: int = 0
    """0 at first, incremented by every restart; the same on all nodes."""

    def log(self, local_rank: int) -> Path:
        return Path(self.log_dir) / f"{self.log_prefix}rank{self.first_rank + local_rank}.log"

    def record(self, local_rank: int) -> Path:
        """Return the path to which a rank writes how it failed.

        Scripts of two runs may share a log directory, but must not share failure records.
        """
        suffix = f".{self.run[:8]}.error.json" if self.run else ".error.json"
        return self.log(local_rank).with_suffix(suffix)

    def arguments_of(self, local_rank: int) -> list[str]:
        return [*([f"--local_rank={local_rank}"] if self.append_local_rank else []), *self.arguments]

    def identity(self, local_rank: int) -> dict[str, str]:
        """Return the variables that identify a rank."""
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
