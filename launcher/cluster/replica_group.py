"""Exchange of tensors between the ranks at the same position in several replicas, any of which may die.

Each replica is a world of its own: its process groups do not include other replicas. Between replicas there
is one gloo group per position, created anew in every epoch (`cluster/membership.py`). All of its
communication is pairwise: a rank that dies closes its connections, and every rank that waits for it notices
at once. A rank that notices releases the group, which closes its own connections, and so on: no rank waits
forever. GPU tensors travel through host memory.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.cluster import handshake
from launcher.comm.gloo import GlooTransport
from launcher.comm.pending import Pending
from launcher.comm.transport import Alone, Transport
from launcher.errors import LauncherError
from launcher.replica import ADDRESS, SECRET, replica_of

CONNECT_S = 10.0
PIECE = 64 << 20
"""Bytes per message of a `StateChannel`."""


class ReplicaLost(Exception):
    """A member of the epoch is gone or silent."""


class LeftBehind(RuntimeError):
    """The other replicas have continued without this one, whose ranks must be restarted."""


class RunIsOver(Exception):
    """The run has ended while this replica was away."""


@dataclass(frozen=True)
class Epoch:
    """The decision of the coordinator. See `Membership`.

    Args:
        members: replicas that train together.
        makes_step: the step whose result this replica already has must be applied.
        donor: the replica that sends its state to this one; None: this one needs no state.
        serves: replicas that receive their state from this one.
    """

    number: int
    members: tuple[int, ...]
    makes_step: bool
    donor: int | None
    serves: tuple[int, ...]


class ReplicaGroup:
    """The connection to the coordinator, and the process groups of the current epoch.

    Args:
        place: position of this rank in its replica.
        timeout_s: how long to wait for a silent member.

    Attributes:
        epoch: the current epoch; None before `ask`, and after a loss.

    Raises:
        LauncherError: the coordinator cannot be reached.
    """

    def __init__(self, place: int, timeout_s: float) -> None:
        self.number, _ = replica_of()
        self.place, self.timeout_s = place, timeout_s
        self.epoch: Epoch | None = None
        self._waiting_in = -1
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._transport: Transport = Alone(0, 1)
        self._groups: list[dist.ProcessGroup] = []
        address, _, port = os.environ[ADDRESS].rpartition(":")
        claim = f"{self.number}.{place}.{os.environ.get('LAUNCHER_ATTEMPT', '0')}"
        try:
            self._connection = socket.create_connection((address, int(port)), CONNECT_S)
            self._session = handshake.call(self._connection, os.environ[SECRET], claim, CONNECT_S)
        except (OSError, ValueError) as error:
            raise LauncherError(
                f"the front end of the replicas does not answer at {address}:{port}: {error}"
            ) from None
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._here = self._connection.getsockname()[0]
        self._server = self._new_server()
        threading.Thread(target=self._listen, daemon=True).start()

    # ---- membership -------------------------------------------------------------------------

    def ask(self, step: int, kind: str, *, has_result: bool = False) -> Epoch:
        """Wait for the next epoch and return it.

        Every rank of the replica must call this, and call it again if `self.epoch` is None afterwards: a
        member has died meanwhile.

        Args:
            step, kind, has_result: see `membership.Question`.

        Raises:
            RunIsOver: the others have completed all steps.
            LeftBehind: the others continue without this replica.
        """
        self.let_go()
        self._server = self._new_server()
        address = self._here, self._server.port
        self._say("ask", step=step, kind=kind, has_result=has_result, address=address)
        answer = self._answer("epoch")
        members, serves = tuple(answer["members"]), tuple(answer["serves"])
        epoch = Epoch(answer["epoch"], members, answer["makes_step"], answer["donor"], serves)
        self.epoch = epoch
        try:
            self._meet(epoch, answer["meet"])
        except RuntimeError:
            self.let_go()
        return epoch

    def let_go(self) -> None:
        """Leave the group; the other members notice at once."""
        self.epoch = None
        self._transport = Alone(0, 1)
        self._groups = []

    def has_served(self) -> None:
        """Record that the state has been sent to the joining replicas."""
        if self.epoch is not None:
            self.epoch = replace(self.epoch, serves=())

    def end(self) -> bool:
        """Report that all steps are done. Return whether this replica must write the results of the run and
        then call `written`."""
        self.let_go()
        self._say("end")
        return bool(self._answer("write", "over")["is"] == "write")

    def written(self) -> None:
        """Tell the coordinator that the run's results are written."""
        self._say("written")

    @property
    def waiting(self) -> bool:
        """Return whether a replica waits to join."""
        return self.epoch is not None and self.epoch.number == self._waiting_in

    @property
    def leads(self) -> bool:
        """Return whether this replica acts for all: it saves checkpoints and writes metrics."""
        return self.epoch is not None and self.epoch.members[0] == self.number

    def _say(self, what: str, /, **more: Any) -> None:
        text = json.dumps({"is": what, **more}).encode()
        self._connection.sendall(self._session.sends.closed(text) + b"\n")

    def _answer(self, *kinds: str) -> dict[str, Any]:
        while True:
            answer = self._answers.get()
            if answer["is"] in kinds:
                return answer
            if answer["is"] == "over":
                raise RunIsOver
            if answer["is"] == "expelled":
                raise LeftBehind(
                    f"the other replicas have continued without replica {self.number}: it was silent"
                )
            if answer["is"] == "lost":
                raise LauncherError("the connection to the front end of the replicas was lost")

    def _listen(self) -> None:
        try:
            with self._connection.makefile("rb") as stream:
                for line in stream:
                    message = json.loads(self._session.takes.opened(line[:-1]))
                    if message["is"] == "waiting":
                        self._waiting_in = message["epoch"]
                    else:
                        self._answers.put(message)
        except (OSError, ValueError):
            pass
        self._answers.put({"is": "lost"})

    def _new_server(self) -> dist.TCPStore:
        return dist.TCPStore(self._here, 0, is_master=True, wait_for_workers=False)

    def _meet(self, epoch: Epoch, address: Sequence[Any]) -> None:
        """Connect to the same position in the other members, twice: for gradients, and for the state of
        joining replicas."""
        index, number = epoch.members.index(self.number), len(epoch.members)
        if number == 1:
            return
        connect = timedelta(seconds=CONNECT_S)
        store = self._server
        if index:
            host, port = address
            store = dist.TCPStore(host, port, is_master=False, timeout=connect)
        store.set_timeout(connect)
        gloo: Any = dist.ProcessGroupGloo
        for name in "gradients", "state":
            options = gloo._Options()
            options._timeout = timedelta(seconds=self.timeout_s)
            options._devices = [gloo.create_device(hostname=self._here)]
            prefixed = dist.PrefixStore(f"{epoch.number}/{self.place}/{name}", store)
            self._groups.append(gloo(prefixed, index, number, options))
        self._transport = GlooTransport(self._groups[0])

    # ---- exchange ---------------------------------------------------------------------------

    def swap(self, mine: Tensor) -> list[Tensor]:
        """Return the tensor that each member passes, in member order. Shapes must be the same on all members.

        Raises:
            ReplicaLost: a member is gone.
        """
        slices = [
            mine if peer == self._transport.rank else torch.empty_like(mine)
            for peer in range(self._transport.degree)
        ]
        with _losses():
            self._transport.all_gather_slices(slices).wait()
        return slices

    def weighted_sums(self, tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
        """Return the sum over members of weight x tensor, as fp32 [numel] on the CPU; inputs are not changed.

        Raises:
            ReplicaLost: a member is gone.
        """
        transport = self._transport
        full: list[Tensor] = []
        for tensor in tensors:
            size = -(-tensor.numel() // transport.degree)
            made = torch.zeros(size * transport.degree)
            torch.mul(tensor.reshape(-1).to("cpu", torch.float32), weight, out=made[: tensor.numel()])
            full.append(made)
        with _losses():
            _wait(
                [
                    transport.reduce_scatter(f, _slice(f, transport), _all(f, transport), accumulate=False)
                    for f in full
                ]
            )
            _wait([transport.all_gather(f, _all(f, transport)) for f in full])
        return [made[: tensor.numel()] for made, tensor in zip(full, tensors, strict=True)]

    def channel(self, replica: int) -> StateChannel:
        """Return the channel to the same position in a member, for its state; valid for the current epoch.

        Raises:
            ReplicaLost: there is no epoch.
        """
        if self.epoch is None or len(self._groups) < 2:
            raise ReplicaLost("the group is gone")
        return StateChannel(self._groups[1], self.epoch.members.index(replica))


class StateChannel:
    """Sends bytes to one peer, or receives them. Methods raise `ReplicaLost`."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer

    def send(self, content: Tensor) -> None:
        """Send [n] uint8; the receiver must know n."""
        with _losses():
            for piece in content.split(PIECE):
                self._group.send([piece], self._peer, 0).wait()

    def receive(self, content: Tensor) -> None:
        """Receive as much as `content` holds."""
        with _losses():
            for piece in content.split(PIECE):
                self._group.recv([piece], self._peer, 0).wait()

    def send_text(self, text: str) -> None:
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.send(torch.tensor([content.numel()]).view(torch.uint8))
        self.send(content)

    def receive_text(self) -> str:
        size = torch.zeros(1, dtype=torch.int64)
        self.receive(size.view(torch.uint8))
        content = torch.empty(int(size), dtype=torch.uint8)
        self.receive(content)
        return content.numpy().tobytes().decode()


def _all(full: Tensor, transport: Transport) -> slice:
    return slice(0, full.numel() // transport.degree)


def _slice(full: Tensor, transport: Transport) -> Tensor:
    return full.chunk(transport.degree)[transport.rank]


def _wait(started: Sequence[Pending]) -> None:
    for pending in started:
        pending.wait()


class _losses:
    """Inside the `with` block, errors of gloo about a lost peer are raised as `ReplicaLost`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise ReplicaLost(str(error)) from None
