"""The front end's side of `--launcher ray`: the nodes that Ray provides, and the command that reaches one."""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.hostfile import Host
from launcher.errors import ConfigError

CLIENT = """\
import json, os, socket, sys
try:
    broker = socket.socket(socket.AF_UNIX)
    broker.connect("\\0" + sys.argv[1])
    broker.sendall(json.dumps({"host": sys.argv[2], "argv": sys.argv[3:]}).encode() + b"\\n")
    while data := broker.recv(1 << 16):
        os.write(1, data)
    sys.exit("Ray has ended the command, or the program that holds the nodes (ray_broker.py) has ended")
except OSError as error:
    sys.exit(f"the program that holds Ray's nodes (ray_broker.py) is gone: {error}")
"""
"""The client program for each node: prints what the broker sends for it, and disconnects when it is
killed."""


ANSWER_S = 100.0
"""Time limit for connecting to Ray and finding free resources."""


@dataclass(frozen=True)
class RayNodes:
    """Nodes of a Ray cluster that are reserved for this run until this process ends.

    Args:
        socket: the name of the broker's socket (`ray_broker.py`).
    """

    hosts: list[Host]
    socket: str

    def command(self, host: Host, argv: list[str]) -> list[str]:
        """Return a command that runs `argv` on a host and prints its output."""
        return [sys.executable, "-c", CLIENT, self.socket, host.name, *argv]


def ask_ray(
    address: str, nodes: int | None, slots: int | None, device: str | None, *, reserve: bool = True
) -> RayNodes:
    """Request nodes from a Ray cluster.

    Args:
        address: of the cluster; "auto": the cluster that this machine belongs to.
        nodes, slots: how many nodes, and GPUs (on a CPU: cores) of each; None: all.
        reserve: False only queries which nodes there are.

    Raises:
        ConfigError: there is no cluster, or it has too few free resources.
    """
    asked = {"address": address, "nodes": nodes, "slots": slots, "device": device, "reserve": reserve}
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the broker)
    broker = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_broker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,  # Ctrl-C must reach only the front end
    )
    assert broker.stdin and broker.stdout
    atexit.register(_end, broker)
    broker.stdin.write(json.dumps(asked).encode() + b"\n")
    broker.stdin.flush()
    try:
        if not select.select([broker.stdout], [], [], ANSWER_S)[0]:
            broker.kill()
            raise ConfigError(
                f"Ray has not answered within {ANSWER_S:g} s at {address}",
                where="--launcher ray",
                fix="specify the head node's port, usually 6379: --address HOST:6379; see `ray status`",
            )
        told = json.loads(broker.stdout.readline())
    except ValueError:
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()
        told = {"problem": last[-1] if last else "the broker has ended", "fix": "see `ray status`"}
    if "problem" in told:
        raise ConfigError(told["problem"], where="--launcher ray", fix=told["fix"])
    return RayNodes([Host(name, tuple(range(count))) for name, count in told["hosts"]], told["socket"])


def _end(broker: subprocess.Popen[bytes]) -> None:
    assert broker.stdin is not None
    broker.stdin.close()
    try:
        broker.wait(timeout=10)
    except subprocess.TimeoutExpired:
        broker.kill()
