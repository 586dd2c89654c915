"""Ranks that mpirun and srun started: what they take from the environment."""

from __future__ import annotations

import pytest

from launcher.comm.started_by import take_ranks
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
