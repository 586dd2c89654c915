"""Ranks started by mpirun and srun: what they read from the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.comm.started_by import check_arguments, take_arguments, take_ranks
from launcher.errors import ConfigError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
SLURM = {
    **{"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "3"},
    **{"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NTASKS": "4"},
}
TAKEN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH, SLURM], ids=["openmpi", "mpich", "slurm"])
def test_ranks_of_one_machine(variables: dict[str, str]) -> None:
    environment = dict(variables)
    take_ranks(environment, port=1234)
    assert environment == {**variables, **TAKEN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script itself
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"},
        {},
    ],
    ids=["batch script", "one rank", "launched", "nothing"],
)
def test_one_process_stays_one(variables: dict[str, str]) -> None:
    environment = dict(variables)
    take_ranks(environment)
    assert environment == variables


def test_several_machines_need_a_place_to_meet() -> None:
    apart = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}
    with pytest.raises(ConfigError, match="srun started 4 ranks on several machines"):
        take_ranks(dict(apart))
    environment = {**apart, "MASTER_ADDR": "node1"}
    take_ranks(environment)
    assert (environment["MASTER_ADDR"], environment["LOCAL_WORLD_SIZE"]) == ("node1", "2")


# ---- what a program says itself -----------------------------------------------------------------------

NOWHERE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Run without a launcher, and remove variables that are set meanwhile."""
    for name in NOWHERE:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("method", "rank", "size"),
    [
        ("tcp://127.0.0.1:1", 1, 2),
        ("file:///tmp/meet", 1, 2),
        ("tcp://127.0.0.1:1?rank=1&world_size=2", -1, -1),
    ],
)
def test_arguments_take_the_place_of_a_launcher(
    alone: pytest.MonkeyPatch, method: str, rank: int, size: int
) -> None:
    take_arguments(method, rank, size)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")


def test_arguments_come_before_the_environment(alone: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "127.0.0.1")):
        alone.setenv(name, value)
    take_arguments(None, 3, -1)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "8")


def test_a_world_of_one_needs_no_more(alone: pytest.MonkeyPatch) -> None:
    take_arguments(None, -1, 1)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")


MEET = """
import sys
import torch, torch.distributed as dist
from launcher.integrations.processes import init_distributed
init_distributed(init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), total.item())
"""


def test_two_programs_meet_as_they_say(alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", MEET, f"file://{tmp_path}/meet", str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [one.communicate(timeout=120)[0].split() for one in programs] == [
        ["0", "2", "3.0"],
        ["1", "2", "3.0"],
    ]


@pytest.mark.parametrize(
    ("method", "rank", "size", "lacking"),
    [
        ("tcp://127.0.0.1:1", -1, -1, "RANK is missing"),
        (None, -1, 2, "RANK is missing"),
        (None, 1, -1, "WORLD_SIZE is missing"),
        (None, 1, 2, "there is no rendezvous address"),
        ("env://", 1, 2, "there is no rendezvous address"),
    ],
)
def test_half_of_it_is_an_error(
    alone: pytest.MonkeyPatch, method: str | None, rank: int, size: int, lacking: str
) -> None:
    with pytest.raises(ConfigError, match=lacking):
        take_arguments(method, rank, size)
    assert not {*NOWHERE} & {*os.environ}


def test_another_place_than_in_the_group_that_there_is() -> None:
    check_arguments(-1, -1, (1, 2))
    check_arguments(1, 2, (1, 2))
    for rank, size in ((0, 2), (1, 4)):
        with pytest.raises(ConfigError, match="this is rank 1 of 2"):
            check_arguments(rank, size, (1, 2))
