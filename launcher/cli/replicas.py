"""A run of several replicas (`fault_tolerance`): one front end per replica, and their common coordinator.

A replica is an ordinary run on its part of the slots: its front end starts the ranks, monitors them and
restarts them. The ranks of all replicas find each other through the coordinator (`cluster/coordinator.py`).
The output of the first replica is shown as is; lines of the others are prefixed with the replica's number.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

from launcher import owner
from launcher.cli.flags import value_of, without
from launcher.cli.request import RunRequest, hosts_of, run_directory, selected
from launcher.cluster.coordinator import Coordinator
from launcher.cluster.hostfile import Host
from launcher.cluster.membership import Membership
from launcher.config.fault_tolerance import FaultToleranceConfig
from launcher.errors import ConfigError
from launcher.owner import Ownership
from launcher.replica import ADDRESS, REPLICA, REPLICAS, RUN, SECRET

RESTARTS = 100
"""Default of `--max_restarts` for each replica."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
logger = logging.getLogger("launcher")


def run_replicas(
    flags: argparse.Namespace, run: RunRequest, argv: Sequence[str], section: FaultToleranceConfig
) -> int:
    """Run the command line as `section.replicas` replicas; return the exit code.

    Args:
        argv: the whole command line.

    Raises:
        ConfigError: the run cannot be divided into replicas.
    """
    replicas = section.replicas
    _check(flags, run, replicas)
    own = list(argv[: len(argv) - len(run.arguments) - 1])
    name = argv[len(own)]
    parts = _divided(flags, own, replicas)
    if flags.dry_run:
        return _front_end(0, [*parts[0], name, *run.arguments], {REPLICAS: str(replicas)}).wait()
    directory = run_directory(value_of(run.arguments, "--output-dir"), run.name)
    run_id = uuid.uuid4().hex
    ownership = owner.take(directory, run_id, logger.warning)
    arguments = [*without(run.arguments, "--output-dir"), "--output-dir", str(directory)]
    server = socket.create_server(("", 0), backlog=1024)
    ranks = _ranks(flags) // replicas
    secret = secrets.token_hex(16)
    environment = {
        ADDRESS: f"{_own_address(flags)}:{server.getsockname()[1]}",
        SECRET: secret,
        REPLICAS: str(replicas),
        RUN: run_id,
    }
    logger.info("%d replicas of %d ranks", replicas, ranks)
    processes = [
        _front_end(number, [*part, name, *arguments], environment) for number, part in enumerate(parts)
    ]
    coordinator = Coordinator(server, secret, Membership(replicas, ranks, answer_s=section.timeout_s))
    try:
        codes = _watch(processes, coordinator, ownership)
    finally:
        for process in processes:
            process.kill()
        coordinator.close()
        ownership.give_back()
    return (
        0 if 0 in codes else flags.checkpoint_exit_code if flags.checkpoint_exit_code in codes else codes[-1]
    )


def _check(flags: argparse.Namespace, run: RunRequest, replicas: int) -> None:
    problem = None
    if not run.is_ours:
        problem = "replicas need a recipe: pretrain or finetune"
    elif flags.no_ssh or (flags.launcher or "ssh").lower() not in ("ssh", "pdsh"):
        problem = "replicas can start ranks only on this machine, or over ssh or pdsh"
    elif flags.min_nodes or flags.max_nodes or flags.elastic_training or flags.on_straggler != "warn":
        problem = "--min_nodes, --max_nodes, --elastic_training and --on_straggler cannot be combined with replicas, "
        problem += "which restart on their own hosts"
    elif not flags.hostfile and not flags.num_gpus:
        problem = "the total number of ranks is unknown; set --num_gpus"
    elif (ranks := _ranks(flags)) % replicas:
        problem = f"{ranks} ranks cannot be divided into {replicas} replicas"
    if problem is not None:
        raise ConfigError(problem, where="fault_tolerance.replicas", fix="see the guide: When things break")


def _hosts(flags: argparse.Namespace) -> list[Host]:
    return selected(hosts_of(flags, "ssh"), flags)


def _ranks(flags: argparse.Namespace) -> int:
    return sum(len(host.slots) for host in _hosts(flags)) if flags.hostfile else int(flags.num_gpus)


def _divided(flags: argparse.Namespace, own: Sequence[str], replicas: int) -> list[list[str]]:
    """Return the launcher's flags for each replica, which gets contiguous slots."""
    each = _ranks(flags) // replicas
    rest = without(own, "--include", "-i", "--exclude", "-e", "--num_nodes", "--num_gpus", "--max_restarts")
    rest += ["--max_restarts", str(RESTARTS if flags.max_restarts is None else flags.max_restarts)]
    if not flags.hostfile:
        return [[*rest, "--num_gpus", str(each)] for _ in range(replicas)]
    slots = [(host.name, slot) for host in _hosts(flags) for slot in host.slots]
    parts = []
    for number in range(replicas):
        chosen: dict[str, list[str]] = {}
        for name, slot in slots[number * each : (number + 1) * each]:
            chosen.setdefault(name, []).append(str(slot))
        parts.append([*rest, "--include", "@".join(f"{n}:{','.join(s)}" for n, s in chosen.items())])
    return parts


def _own_address(flags: argparse.Namespace) -> str:
    """Return the address of this machine that ranks on all hosts can reach."""
    for host in _hosts(flags) if flags.hostfile else ():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host.name, 9))  # sends nothing: selects the local address of the route
            if not (found := probe.getsockname()[0]).startswith("127."):
                return str(found)
    return "127.0.0.1"


def _front_end(number: int, arguments: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start the front end of a replica. It dies with this process, upon which its agents stop the ranks."""
    devices = _devices(number, arguments)
    masks = {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.cli.main", *arguments],
        env={**os.environ, **environment, **masks, REPLICA: str(number)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if number else None,
        stderr=subprocess.STDOUT if number else None,
        text=True,
        errors="replace",
        start_new_session=True,  # this process forwards Ctrl-C
        preexec_fn=_die_with_parent,
    )
    if number:
        threading.Thread(target=_show, args=(number, process), daemon=True).start()
    return process


def _devices(number: int, arguments: Sequence[str]) -> str:
    """Return the GPUs of this machine that belong to the replica; "" if a hostfile's slots select them."""
    count = value_of(arguments, "--num_gpus")
    if count is None:
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    first, last = number * int(count), (number + 1) * int(count)
    return ",".join(visible[first:last] if visible != [""] else map(str, range(first, last)))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _show(number: int, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"replica {number}: {line}", end="", flush=True)


def _watch(
    processes: Sequence[subprocess.Popen[str]], coordinator: Coordinator, ownership: Ownership
) -> list[int]:
    """Wait until all front ends have exited; return their exit codes in the order in which they exited.

    Raises:
        ConfigError: another run has taken over the output directory.
    """
    stopped: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        stopped.append(number)
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, pass_on)
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        ownership.check()
        if stopped:
            coordinator.admit_nobody()
        for number, process in enumerate(processes):
            if number not in codes and (code := process.poll()) is not None:
                codes[number] = code
                coordinator.ended(number)
                if code and len(codes) < len(processes) and not stopped:
                    logger.warning("replica %d has ended (exit code %d)", number, code)
        time.sleep(0.1)
    return list(codes.values())
