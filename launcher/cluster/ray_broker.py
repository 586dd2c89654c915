"""Broker between the front end and Ray: reserves nodes of a Ray cluster, and runs commands on them.

The front end starts this program, and owns it: when its input ends, Ray takes back the placement group and
ends everything that runs in it. It needs Ray, but nothing of this package. It prints one JSON object: `hosts`
and `socket`, or `problem` and `fix`. Then it serves the socket: a client sends {"host", "argv"} on one line
and receives the output of the command; when it disconnects, the command is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any

ANSWER_S = 5.0
"""How long the head of the cluster has to accept a connection."""
NO_CLUSTER = "start launch on a node of the cluster (ray start ...), or pass --address HOST:6379"
PLACED_S = 60.0
"""How long Ray may take to find free resources."""


class NoRoomError(Exception):
    """Ray cannot provide the requested nodes; `fix` suggests a remedy."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.fix = what, fix


class Command:
    """Runs a command on a node, as an actor there."""

    def address(self) -> str:
        """Return the address of this node."""
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, argv: list[str]) -> Iterator[bytes]:
        """Yield the output of the command, line by line. The command dies with this process: Ray ends the
        actor, but not its children."""
        import ctypes
        import signal
        import subprocess

        def tie() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            with contextlib.suppress(PermissionError):  # Ray lowers the priority of its workers
                os.setpriority(os.PRIO_PROCESS, 0, 0)

        environment = {
            name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
        }  # set by Ray
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=tie,
        )
        assert process.stdout is not None
        yield from process.stdout
        if code := process.wait():
            yield f"it ended with exit code {code}\n".encode()


def place(asked: dict[str, Any]) -> list[tuple[str, int, Any]]:
    """Return (address, slots, actor) of each node that Ray provides.

    Args:
        asked: `address` of the cluster; `nodes` and `slots` (None: all); `device`, "cpu" or "GPU".
    """
    try:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError as error:
        raise NoRoomError(f"Ray is not installed here: {error}", "pip install ray") from None
    _check_answers(asked["address"])
    try:
        ray.init(address=asked["address"], log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        at = "on this machine" if asked["address"] == "auto" else f"at {asked['address']}"
        raise NoRoomError(
            f"no Ray cluster was found {at}: {error}",
            NO_CLUSTER,
        ) from None
    kind = "CPU" if asked["device"] == "cpu" else "GPU"
    there = sorted(
        (int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]), reverse=True
    )
    there = [count for count in there if count]
    nodes = asked["nodes"] or len(there)
    slots = asked["slots"] or (there[nodes - 1] if 0 < nodes <= len(there) else 0)
    fitting = sum(count >= slots for count in there)
    if not slots or fitting < nodes:
        raise NoRoomError(
            f"requested {nodes} nodes with {slots or 'some'} {kind}s each, but the Ray cluster has {len(there)} nodes "
            f"with {kind}s ({', '.join(map(str, there[:8])) or 'none'})",
            "request fewer: --num_nodes, --num_gpus; --device cpu counts CPUs",
        )
    if not asked["reserve"]:
        names = [
            node["NodeManagerAddress"] for node in ray.nodes() if node["Resources"].get(kind, 0) >= slots
        ]
        return [(name, slots, None) for name in names[:nodes]]
    group = placement_group([{kind: float(slots)}] * nodes, strategy="STRICT_SPREAD")
    if not group.wait(PLACED_S):
        raise NoRoomError(
            f"Ray could not allocate {nodes} nodes with {slots} {kind}s each within {PLACED_S:g} s",
            "other jobs are using them: see `ray status`; request fewer, or wait",
        )
    actors = []
    for index in range(nodes):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        amount = {"num_cpus": slots} if kind == "CPU" else {"num_cpus": 0, "num_gpus": slots}
        actors.append(
            ray.remote(Command).options(scheduling_strategy=where, max_restarts=-1, **amount).remote()
        )
    addresses = ray.get([actor.address.remote() for actor in actors], timeout=PLACED_S)
    if several := sorted({address for address in addresses if addresses.count(address) > 1}):
        raise NoRoomError(
            f"Ray allocated several nodes with the address {several[0]}: ranks could not tell them apart",
            "start each with its own address: ray start --node-ip-address ADDRESS ...",
        )
    return [(address, slots, actor) for address, actor in zip(addresses, actors, strict=True)]


def _check_answers(address: str) -> None:
    """Raise NoRoomError if nothing answers at HOST:PORT; Ray itself would wait for a minute."""
    if address == "local":
        raise NoRoomError("--address local would start a new single-machine Ray cluster", NO_CLUSTER)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():  # "auto", or a URL
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise NoRoomError(f"there is no Ray cluster at {address}: {error}", NO_CLUSTER) from None


def serve(server: socket.socket, actors: dict[str, Any]) -> None:
    """Serve clients of this user only: any process of the machine can connect."""
    while True:
        client, _ = server.accept()
        peer = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if peer[1] != os.getuid():
            client.close()
            continue
        threading.Thread(target=_answer, args=[client, actors], daemon=True).start()


def _answer(client: socket.socket, actors: dict[str, Any]) -> None:
    import ray

    with client, client.makefile("rb") as lines, contextlib.suppress(OSError):
        order = json.loads(lines.readline())
        actor = actors[order["host"]]
        said = actor.run.options(num_returns="streaming").remote(order["argv"])
        threading.Thread(target=_end_with, args=[lines, actor], daemon=True).start()
        try:
            for line in said:
                client.sendall(ray.get(line))
        except ray.exceptions.RayError as error:
            client.sendall(f"Ray has lost the node: {str(error).splitlines()[0]}\n".encode())


def _end_with(lines: Any, actor: Any) -> None:
    """End the command when its client disconnects; Ray restarts the actor for the next one."""
    import ray

    with contextlib.suppress(OSError, ValueError):
        while lines.read(1 << 16):
            pass
    with contextlib.suppress(Exception):
        ray.kill(actor, no_restart=False)


def main() -> None:
    """Read the request, report the nodes that Ray provides, and serve until the input ends."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of Ray must not reach the front end
    asked = json.loads(sys.stdin.readline())
    # Started before waiting for Ray, which may take long: this process must not outlive the front end.
    threading.Thread(target=_leave_with_front_end, daemon=True).start()
    try:
        placed = place(asked)
    except NoRoomError as error:
        print(json.dumps({"problem": error.what, "fix": error.fix}), file=told, flush=True)
        raise SystemExit(1) from None
    server = socket.socket(socket.AF_UNIX)
    server.bind("")  # Linux picks an abstract name: no file is left behind, however this ends
    server.listen()
    hosts = [[address, slots] for address, slots, _ in placed]
    name = server.getsockname()[1:].decode()
    print(json.dumps({"hosts": hosts, "socket": name}), file=told, flush=True)
    serve(server, {address: actor for address, _, actor in placed})


def _leave_with_front_end() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
