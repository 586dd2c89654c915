"""Runners: commands that start Python on a node, with pipes of this process as its input and output.

There is one command per node, whatever the runner: its pipes are the node's control stream, so that all
runners detect the same faults and shut down in the same way.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launcher.cluster import dial
from launcher.cluster.hostfile import Host
from launcher.cluster.node import ONE_LINE
from launcher.cluster.ray_nodes import RayNodes
from launcher.errors import ConfigError


@dataclass(frozen=True)
class RunnerOptions:
    """The user's options for reaching nodes."""

    extra: Sequence[str] = ()
    """`--launcher_args`, for the runner's own command."""
    ssh_port: int | None = None
    venv_script: str | None = None
    """A shell script that is sourced on the node first."""
    python: str = field(default=sys.executable)
    connect_s: float = 9.0
    ray: RayNodes | None = None
    """The nodes that Ray has provided, for its runner."""


@dataclass(frozen=True)
class Runner:
    """A way to start a command on a node."""

    command: Callable[[Host, RunnerOptions], list[str]]
    program: str
    """The program that must be installed on this machine."""
    dials: bool = False
    """Its command forwards no input: a TCP connection to the agent is the control stream instead
    (`dial.py`)."""


def command(name: str, host: Host, settings: RunnerOptions) -> list[str]:
    """Return the command that starts the agent on a host."""
    return RUNNERS[name].command(host, settings)


def check_runner(name: str) -> None:
    """Check that a runner is known and installed.

    Raises:
        ConfigError: there is no such runner, or its program is not installed here.
    """
    if name not in RUNNERS:
        named = ", ".join(RUNNERS)
        raise ConfigError(f"unknown launcher {name!r}", where="--launcher", fix=f"use one of: {named}")
    program = RUNNERS[name].program
    if shutil.which(program) is None:
        raise ConfigError(
            f"the launcher {name} requires the program {program}, which is not installed here",
            where=f"--launcher {name}",
            fix="install it, or omit --launcher: ssh is enough",
        )


def _pdsh(host: Host, settings: RunnerOptions) -> list[str]:
    port = ["env", f"PDSH_SSH_ARGS_APPEND=-p {settings.ssh_port}"] if settings.ssh_port else []
    line = _shell_line(settings, dial.one_line())
    user, _, name = host.name.rpartition("@")
    login = ["-l", user] if user else []
    return [*port, "pdsh", "-R", "ssh", "-S", "-N", *login, "-w", name, *settings.extra, line]


def _python(settings: RunnerOptions) -> list[str]:
    """Return the command that runs the agent's one-line program, for runners without a shell."""
    start = [settings.python, "-c", ONE_LINE]
    return ["sh", "-c", _shell_line(settings)] if settings.venv_script else start


def _shell_line(settings: RunnerOptions, code: str = ONE_LINE) -> str:
    """Return the same command as a shell command line."""
    start = "exec " + shlex.join([settings.python, "-c", code])
    return f". {shlex.quote(settings.venv_script)} && {start}" if settings.venv_script else start


def _here(host: Host, settings: RunnerOptions) -> list[str]:
    return _python(settings)


def _ssh(host: Host, settings: RunnerOptions) -> list[str]:
    port = ["-p", str(settings.ssh_port)] if settings.ssh_port else []
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, int(settings.connect_s - 1))),
        "ServerAliveInterval": "5",
        "ForwardX11": "no",
        "ControlPath": "none",
    }
    said = [text for name, value in options.items() for text in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *port, *said, *settings.extra, "--", host.name, _shell_line(settings)]


def _slurm(host: Host, settings: RunnerOptions) -> list[str]:
    # One job step per node, next to other steps of the job, with all of the job's resources on that node.
    step = ["--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap", "--mem=0", "--cpu-bind=none"]
    return ["srun", *step, "--unbuffered", "--quit-on-interrupt", *settings.extra, *_python(settings)]


def _openmpi(host: Host, settings: RunnerOptions) -> list[str]:
    one = ["-np", "1", "--host", host.name, "--bind-to", "none"]
    return ["mpirun", *one, *settings.extra, *_python(settings)]


def _mpich(host: Host, settings: RunnerOptions) -> list[str]:
    return ["mpirun", "-np", "1", "-hosts", host.name, *settings.extra, *_python(settings)]


def _impi(host: Host, settings: RunnerOptions) -> list[str]:
    return [*_mpich(host, settings)[:5], "-genv", "I_MPI_PIN", "0", *settings.extra, *_python(settings)]


def _ray(host: Host, settings: RunnerOptions) -> list[str]:
    assert settings.ray is not None, "Ray was asked for nodes"
    return settings.ray.command(host, ["sh", "-c", _shell_line(settings, dial.one_line())])


RUNNERS = {
    "ssh": Runner(_ssh, "ssh"),
    "pdsh": Runner(_pdsh, "pdsh", dials=True),
    "slurm": Runner(_slurm, "srun"),
    "openmpi": Runner(_openmpi, "mpirun"),
    "mpich": Runner(_mpich, "mpirun"),
    "impi": Runner(_impi, "mpirun"),
    "ray": Runner(_ray, sys.executable, dials=True),
}
HERE = Runner(_here, sys.executable)
"""This machine: starts the command directly."""
