"""Identity of ranks that mpirun or srun started without `launch`, from the variables that these set.

Otherwise `mpirun -n 4 python train.py` and `srun -n 4 python train.py` would silently be four worlds of one
rank.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from launcher.errors import ConfigError

PORT = 29500
"""Default rendezvous port, the same as torch's and DeepSpeed's."""


class _Starter(NamedTuple):
    """Variables set by a program that starts ranks."""

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
    # variables of a job step: a batch script itself also has SLURM_NTASKS, but is a single process
    _Starter("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def take_ranks(environment: MutableMapping[str, str] | None = None, port: int = PORT) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT if mpirun or srun
    started several ranks and RANK and WORLD_SIZE are not set.

    Args:
        environment: default: the environment of this process.
        port: the rendezvous port, if MASTER_PORT is not set.

    Raises:
        ConfigError: the ranks are on several machines, and MASTER_ADDR is not set.
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
            f"{starter.command} started {world} ranks on several machines, but there is no rendezvous address",
            where="MASTER_ADDR",
            fix=f"set MASTER_ADDR to the host of the first rank, or use `launch --hostfile ...` instead of "
            f"{starter.command}",
        )
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", str(port))
    env["RANK"], env["WORLD_SIZE"] = env[starter.rank], str(world)
    env["LOCAL_RANK"] = env[starter.local_rank]
    env["LOCAL_WORLD_SIZE"] = str(local or 1)


def take_arguments(init_method: str | None, rank: int, world_size: int) -> None:
    """Set RANK and WORLD_SIZE to the arguments of a program; -1: not given.

    Raises:
        ConfigError: one of the two is missing, or there is no rendezvous address.
    """
    env = os.environ
    if init_method is None and rank < 0 and world_size < 0:
        return
    given = {"RANK": rank, "WORLD_SIZE": world_size}
    said = {name: _said(name, number, init_method) for name, number in given.items()}
    if said["RANK"] is None and said["WORLD_SIZE"] == 1:
        said["RANK"] = 0
    lacking = [name for name, number in said.items() if number is None]
    if lacking:
        raise ConfigError(
            f"init_distributed() was called with {_told(init_method, rank, world_size)}, but {lacking[0]} is missing",
            where="init_distributed()",
            fix=f"pass {lacking[0].lower()}=, or set {lacking[0]}; `launch` and torchrun set both",
        )
    if said["WORLD_SIZE"] != 1 and init_method in (None, "env://") and "MASTER_ADDR" not in env:
        raise ConfigError(
            f"init_distributed() was called with {_told(init_method, rank, world_size)}, but there is no "
            "rendezvous address",
            where="MASTER_ADDR",
            fix='pass init_method="tcp://HOST:PORT" or "file:///PATH", or set MASTER_ADDR and MASTER_PORT',
        )
    env.update({name: str(number) for name, number in said.items()})


def _said(name: str, number: int, init_method: str | None) -> int | None:
    """Return the value from the argument, else from the URL (`tcp://host:port?rank=0&world_size=2`), else
    from the environment."""
    if number >= 0:
        return number
    query = parse_qs(urlsplit(init_method or "").query).get(name.lower())
    text = query[0] if query else os.environ.get(name)
    return int(text) if text is not None and text.isdecimal() else None


def _told(init_method: str | None, rank: int, world_size: int) -> str:
    told = {"init_method": init_method, "rank": rank, "world_size": world_size}
    return ", ".join(f"{name}={value}" for name, value in told.items() if value not in (None, -1))


def check_arguments(rank: int, world_size: int, here: tuple[int, int]) -> None:
    """Raise ConfigError if an existing process group has another rank or size than requested."""
    asked = (here[0] if rank < 0 else rank, here[1] if world_size < 0 else world_size)
    if asked != here:
        raise ConfigError(
            f"rank {asked[0]} of {asked[1]} was requested, but in the existing process group this is rank "
            f"{here[0]} of {here[1]}",
            where="init_distributed()",
            fix="omit the arguments, or call it before anything else initializes torch.distributed",
        )


def _number(text: str | None) -> int:
    """Parse a number; 0 if there is none. srun writes `4`, and `4(x2)` for two nodes of four."""
    digits = (text or "").partition("(")[0].partition(",")[0]
    return int(digits) if digits.isdecimal() else 0
