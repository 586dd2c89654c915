"""The ranks of this machine, started, monitored and ended together.

When one rank dies, for whatever reason, the others are stopped within a short grace period, and the rank that
failed first is reported. torch's elastic launcher is not used: it would cost each node an import of torch
before the first rank starts. The error files and environment variables are torch elastic's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import IO, Any

from launcher.cluster import cores, facts, memory_killer, processes, rank
from launcher.cluster.failure import (
    ErrorRecord,
    Failure,
    append_to_logs,
    first_failure,
    is_full,
    read_record,
    with_tail,
)
from launcher.cluster.gpus import MASKS
from launcher.cluster.node_spec import NodeSpec, open_log
from launcher.cluster.selection import masked_devices
from launcher.cluster.terminal import PseudoTerminal
from launcher.errors import ConfigError
from launcher.monitor import flight_recorder
from launcher.scratch import Scratch

PIECE = 1 << 16


class LocalRanks:
    """Runs the ranks of one `NodeSpec`. Call `poll` until it is not None, then `finish`, which stops them.

    Raises:
        ConfigError: they cannot be started: the log directory cannot be written, a program is missing, ...
    """

    def __init__(self, share: NodeSpec) -> None:
        self.share = share
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files: list[IO[bytes]] = []
        self._outputs: dict[int, IO[bytes]] = {}
        self._terminal: PseudoTerminal | None = None
        self._alive_at = time.time()
        self._kills = memory_killer.kills()
        self._failed: dict[int, int] | None = None
        self._left: list[int] = []
        self._watched: Path | None = None
        self._scratch: Scratch | None = None
        try:
            self._start()
        except OSError as error:
            self.finish(0)
            raise ConfigError(
                f"the ranks cannot be started: {error}",
                where=f"{share.log_dir}, {sys.executable}",
                fix="make sure that the run's directory is writable on every node",
            ) from None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def poll(self) -> bool | None:
        """Return None while the ranks run, False once one has failed, and True if all have succeeded."""
        codes = [process.poll() for process in self._processes]
        if any(codes):
            return False
        if None in codes:
            self._alive_at = time.time()
            return None
        return True

    def output(self) -> list[tuple[int, bytes]]:
        """Return (rank, new output) of the ranks whose output is shown."""
        pieces = []
        for shown, file in self._outputs.items():
            if data := file.read(PIECE):
                pieces.append((shown, data))
        if self._terminal is not None and (data := self._terminal.read()):
            pieces.append((0, data))
        return pieces

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of rank 0's terminal to that of the user's terminal."""
        if self._terminal is not None:
            self._terminal.resize(rows, columns)

    def finish(self, grace_s: float = processes.GRACE_S, hurry: Callable[[], bool] | None = None) -> None:
        """End all processes of the ranks, descendants included: SIGTERM, up to `grace_s` seconds or until
        `hurry` returns True, then SIGKILL."""
        if self._failed is None:
            codes = {r: process.poll() for r, process in enumerate(self._processes)}
            self._failed = {r: code for r, code in codes.items() if code}
            self._left = [r for r, code in codes.items() if code == 0]
        processes.end_descendants(grace_s, hurry=hurry)
        for process in self._processes:
            process.poll()

    def stalled_s(self) -> float | None:
        """Return for how many seconds no rank of this node has begun an operation; None if none ever has."""
        signs = (
            [flight_recorder.read(self._watched / f"{r}.beacon") for r in self._every()]
            if self._watched
            else []
        )
        return min((sign.since_s for sign in signs if sign is not None), default=None)

    def request_stacks(self) -> None:
        """Have every rank write the stacks of its threads; `states` reads them a moment later."""
        processes.signal_all(self.pids, rank.SHOW_STACKS)

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each rank: the fields of `hang.RankState` except for the host."""
        found: list[dict[str, Any]] = []
        if self._watched is None:
            return found
        for local_rank in self._every():
            sign = flight_recorder.read(self._watched / f"{local_rank}.beacon")
            stacks = self._watched / f"{local_rank}.stacks"
            found.append(
                {
                    "rank": self.share.first_rank + local_rank,
                    "number": sign and sign.number,
                    "text": sign.text if sign else "",
                    "among": sign.among if sign else "",
                    "since_s": sign.since_s if sign else 0.0,
                    "stack": stacks.read_text(errors="replace") if stacks.exists() else "",
                }
            )
        return found

    def status(self) -> list[dict[str, Any]]:
        """Return what each rank is doing and its step times, as plain values for `RunStatus.take`."""
        found: list[dict[str, Any]] = []
        if self._watched is None:
            return found
        for local_rank, process in enumerate(self._processes):
            file = self._watched / f"{local_rank}.beacon"
            sign, counters = flight_recorder.read(file), flight_recorder.read_counters(file)
            found.append(
                {
                    "rank": self.share.first_rank + local_rank,
                    "pid": process.pid,
                    "doing": sign.text if sign else "",
                    "since_s": round(sign.since_s, 3) if sign else 0.0,
                    "counters": counters and astuple(counters),
                }
            )
        return found

    def _every(self) -> range:
        return range(len(self._processes))

    def close(self) -> None:
        """Close the files; call it when `output` has no more."""
        if self._scratch is not None:
            self._scratch.close()
        if self._terminal is not None:
            self._terminal.close()
        for file in (*self._files, *self._outputs.values()):
            file.close()

    def failure(self) -> Failure | None:
        """Return the first failure among the ranks that had failed before `finish`, if any. Call it after
        `finish`."""
        share = self.share
        found = {r: read_record(str(share.record(r))) for r in self._every()}
        records: dict[int, ErrorRecord] = {r: record for r, record in found.items() if record is not None}
        if not self._failed and not records:
            return None
        append_to_logs(records, {r: share.log(r) for r in self._every()})
        first = first_failure(self._failed or {}, records, dict(enumerate(self.pids)), self._alive_at)
        local_rank = first.rank
        killer = None
        if first.exit_code == -9:
            killer = memory_killer.evidence(first.pid, self._kills)
        first = replace(
            first,
            rank=share.first_rank + local_rank,
            local_rank=local_rank,
            memory_killer=killer,
            disk_full=is_full(Path(share.log_dir)),
            left_before=tuple(share.first_rank + r for r in self._left),
        )
        return with_tail(first, share.log(local_rank))

    def _start(self) -> None:
        share = self.share
        Path(share.log_dir).mkdir(parents=True, exist_ok=True)
        if share.watched and share.kind != "program":
            self._scratch = Scratch(Path(tempfile.gettempdir()), "launch-", "ranks")
            self._watched = self._scratch.path
        common = {**os.environ, **share.environment, **self._devices()}
        if share.nodes > 1 and "GLOO_SOCKET_IFNAME" not in common:
            # By default gloo uses the address of the host's own name, which is often a loopback address.
            interface = facts.interface_towards(share.master_addr, share.master_port)
            common |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        shares = None
        if share.bind_cores is not None:
            listed = cores.parse_core_list(share.bind_cores) if share.bind_cores else cores.usable_cores()
            shares = cores.share_cores(listed, share.ranks)
        if "OMP_NUM_THREADS" not in common:
            common["OMP_NUM_THREADS"] = str(cores.threads(share.ranks, shares))
        for local_rank in range(share.ranks):
            share.record(local_rank).unlink(missing_ok=True)
            variables = {**common, **share.identity(local_rank)}
            if self._watched is not None:
                flight_recorder.prepare(self._watched / f"{local_rank}.beacon")
                variables[flight_recorder.VARIABLE] = str(self._watched / f"{local_rank}.beacon")
                variables["LAUNCHER_STACKS"] = str(self._watched / f"{local_rank}.stacks")
            if shares is not None:
                variables["LAUNCHER_CORES"] = ",".join(map(str, shares[local_rank]))
            self._processes.append(self._popen(local_rank, variables))

    def _popen(self, local_rank: int, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        share = self.share
        log, number = share.log(local_rank), share.first_rank + local_rank
        if number == 0 and share.terminal is not None:
            self._terminal = PseudoTerminal(log, share.terminal, keep=share.attempt > 0)
            out: IO[bytes] | int = self._terminal.slave
        else:
            out = open_log(log, keep=share.attempt > 0)
            self._files.append(out)
            if number in share.shown:
                self._outputs[number] = log.open("rb", buffering=0)
                self._outputs[number].seek(0, os.SEEK_END)
        start = [sys.executable, "-u", rank.__file__, share.kind, share.target]
        command = [*start, *share.arguments_of(local_rank)]
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach only the front end
        )

    def _devices(self) -> dict[str, str]:
        """Return the variable that makes only the chosen slots visible."""
        slots = self.share.slots
        if slots is None:
            return {}
        name = next((name for name in MASKS if os.environ.get(name) is not None), MASKS[0])
        mask = masked_devices(os.environ.get(name), slots, f"node {self.share.node}")
        return {} if mask is None else {name: mask}
