"""Ranks that mpirun or srun started without `launch`: which rank this is, by the variables that they set.

`mpirun -n 4 python train.py` and `srun -n 4 python train.py` would else be four worlds of one rank, without a word.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import NamedTuple

from launcher.errors import ConfigError

PORT = 29500
"""Where ranks meet that were told no port; torch's and DeepSpeed's default."""


class _Starter(NamedTuple):
    """Variables of a program that starts ranks."""

    command: str
    rank: str
    world: str
    local_rank: str
    local_world: str


_STARTERS = (  # Slurm last: inside a job mpirun starts its own processes with srun
    _Starter(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Starter("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # of a step: a batch script itself has SLURM_NTASKS, and is one process
    _Starter("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def take_ranks(environment: MutableMapping[str, str] | None = None, port: int = PORT) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT where mpirun or srun started
    several ranks and nobody has set them.

    Args:
        environment: default: that of this process.
        port: where the ranks meet, if MASTER_PORT does not say it.

    Raises:
        ConfigError: the ranks are on several machines, and nothing says where the first one is.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env or "WORLD_SIZE" in env:
        return
    starter = next((starter for starter in _STARTERS if {*starter[1:4]} <= {*env}), None)
    if starter is None or _number(env[starter.world]) < 2:
        return
    world, local = _number(env[starter.world]), _number(env.get(starter.local_world))
    if "MASTER_ADDR" not in env and local != world:
        raise ConfigError(
            f"{starter.command} started {world} ranks on several machines, and nothing says where they meet",
            where="MASTER_ADDR",
            fix=f"set MASTER_ADDR to the host of the first rank, or write `launch --hostfile ...` in the place of "
            f"{starter.command}",
        )
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", str(port))
    env["RANK"], env["WORLD_SIZE"] = env[starter.rank], str(world)
    env["LOCAL_RANK"] = env[starter.local_rank]
    env["LOCAL_WORLD_SIZE"] = str(local or 1)


def _number(text: str | None) -> int:
    """0 where there is none; srun writes `4`, and `4(x2)` for two nodes of four."""
    digits = (text or "").partition("(")[0].partition(",")[0]
    return int(digits) if digits.isdecimal() else 0
