"""The ranks of this machine: started and watched through torch elastic, ended as one.

When one rank dies, however it dies, the others are stopped within `GRACE_S` and a moment, and the rank that
failed first is named. Imports torch: import this only once the configuration is known to be right.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil
import torch
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, SubprocessContext

from launcher.cluster import processes, rank
from launcher.cluster.failure import (
    ErrorRecord,
    Failure,
    append_to_logs,
    describe,
    exit_code,
    first_failure,
    read_record,
)
from launcher.cluster.terminal import TerminalCopy
from launcher.errors import ConfigError

POLL_S = 0.05
GRACE_S = 3.0
"""How long a rank has between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class LocalRun:
    """Everything needed to start the ranks of one machine."""

    kind: str
    """`script` (a .py file), `module` (as `python -m`) or `program` (an executable)."""
    target: str
    arguments: Sequence[str]
    ranks: int
    log_dir: Path
    places: Sequence[str] = ()
    """What each rank is in the mesh, for people: "stage 1, dp 0"; empty where nobody knows."""
    log_prefix: str = ""
    show_rank_0: bool = True
    """Copy rank 0's output to the terminal as well as to its log."""
    append_local_rank: bool = False
    """Append `--local_rank=N` to the arguments, as DeepSpeed's launcher does."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every rank, beside those that say who it is."""
    cores: Sequence[Sequence[int]] | None = None
    """Cores that each rank is bound to; None leaves that to the operating system."""

    def log(self, local_rank: int) -> Path:
        return self.log_dir / f"{self.log_prefix}rank{local_rank}.log"


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    message: str | None = None
    """What to tell the user where it failed or was interrupted."""


def run(spec: LocalRun) -> Outcome:
    """Start the ranks, wait for them, and return when no process of the run is left."""
    processes.adopt_orphans()
    ranks = _Ranks(spec)
    started = time.time()
    try:
        ranks.start()
        alive_at = started
        while (result := ranks.wait(timeout=0)) is None:
            alive_at = time.time()
            time.sleep(POLL_S)
    except SignalException as error:
        _hold_signals()
        ranks.close()
        return Outcome(128 + error.sigval, f"stopped by {error.sigval.name}; logs: {spec.log_dir}")
    finally:
        _hold_signals()
        ranks.finish()
    if not result.is_failed():
        return Outcome(0)
    failure, records = ranks.first_failure(alive_at)
    append_to_logs(records, {local_rank: spec.log(local_rank) for local_rank in range(spec.ranks)})
    shown = spec.show_rank_0 and failure.rank == 0
    place = spec.places[failure.rank] if spec.places else ""
    log = spec.log(failure.rank)
    return Outcome(exit_code(failure), describe(failure, log, log_was_shown=shown, place=place))


def choose_device(wanted: str, ranks: int | None) -> tuple[str, int]:
    """The kind of device and the number of ranks.

    Args:
        wanted: `auto`, `cuda` or `cpu`.
        ranks: what the user asked for, or None: one per GPU, one on CPU.

    Raises:
        ConfigError: CUDA is wanted and not there, or more ranks than GPUs.
    """
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and gpus == 0:
        raise ConfigError("this machine has no CUDA device", where="--device cuda", fix="write --device cpu")
    if gpus == 0:
        return "cpu", ranks or 1
    if ranks is not None and ranks > gpus:
        raise ConfigError(
            f"{ranks} ranks are wanted and this machine shows {gpus} CUDA devices",
            where=f"--num_gpus {ranks}",
            fix=f"write --num_gpus {gpus}, or --device cpu to run the ranks on the CPU",
        )
    return "cuda", ranks or gpus


def choose_port(addr: str, wanted: int | None) -> int:
    """The rendezvous port: a free one, or the wanted one.

    Raises:
        ConfigError: the wanted port is taken.
    """
    with socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((addr, wanted or 0))
        except OSError as error:
            raise ConfigError(
                f"{addr}:{wanted or 'any port'} cannot be used: {error.strerror or error}",
                where="--master_addr, --master_port",
                fix="leave both flags out: a free port is picked",
            ) from None
        return int(probe.getsockname()[1])


class _RankLogs(LogsSpecs):
    """stdout of rank r to its log (or pseudo-terminal); stderr joins it in `rank.py`."""

    def __init__(self, spec: LocalRun, terminal: TerminalCopy | None) -> None:
        super().__init__(log_dir=str(spec.log_dir))
        self._spec, self._terminal = spec, terminal

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        spec = self._spec
        stdouts = {local_rank: str(spec.log(local_rank)) for local_rank in envs}
        tee = {0: stdouts[0]} if spec.show_rank_0 and self._terminal is None else {}
        if self._terminal is not None:
            stdouts[0] = self._terminal.path
        error_files = {r: str(spec.log_dir / f"{spec.log_prefix}rank{r}.error.json") for r in envs}
        for local_rank, path in error_files.items():
            Path(path).unlink(missing_ok=True)
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = path
        return LogsDest(stdouts, dict.fromkeys(envs, ""), tee, {}, error_files)

    @property
    def root_log_dir(self) -> str:
        return str(self._spec.log_dir)


class _Ranks(SubprocessContext):
    """torch elastic's subprocesses, ended faster and with everything below them."""

    def __init__(self, spec: LocalRun) -> None:
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        self._spec = spec
        self._others = [child.pid for child in psutil.Process().children()]
        self._dead_at_close: dict[int, int] | None = None
        on_terminal = spec.show_rank_0 and sys.stdout.isatty()
        self._terminal = TerminalCopy(spec.log(0)) if on_terminal else None
        super().__init__(
            name="rank",
            entrypoint=sys.executable,
            args={local_rank: _command(spec, local_rank) for local_rank in range(spec.ranks)},
            envs={local_rank: _environment(spec, local_rank) for local_rank in range(spec.ranks)},
            logs_specs=_RankLogs(spec, self._terminal),
            log_line_prefixes={0: ""},
        )

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if self._dead_at_close is None:
            codes = {r: handler.proc.poll() for r, handler in self.subprocess_handlers.items()}
            self._dead_at_close = {r: code for r, code in codes.items() if code}
        processes.end_descendants(GRACE_S, except_for=self._others)
        super()._close(death_sig, timeout=1)

    def finish(self) -> None:
        """Leave no process and no unread output, also where starting was interrupted half way."""
        processes.end_descendants(GRACE_S, except_for=self._others)
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def first_failure(self, alive_at: float) -> tuple[Failure, dict[int, ErrorRecord]]:
        """The first failure, and the records of all ranks.

        Args:
            alive_at: the last time all ranks were seen alive (seconds since the epoch).
        """
        found = {r: read_record(path) for r, path in self.error_files.items()}
        records = {r: record for r, record in found.items() if record is not None}
        return first_failure(self._dead_at_close or {}, records, self.pids(), alive_at), records


def _command(spec: LocalRun, local_rank: int) -> tuple[str, ...]:
    appended = [f"--local_rank={local_rank}"] if spec.append_local_rank else []
    return ("-u", rank.__file__, spec.kind, spec.target, *appended, *spec.arguments)


def _environment(spec: LocalRun, local_rank: int) -> dict[str, str]:
    variables = {
        **spec.environment,
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(spec.ranks),
        "LOCAL_WORLD_SIZE": str(spec.ranks),
        "LOCAL_SIZE": str(spec.ranks),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(spec.master_port),
        "LAUNCHER_PID": str(os.getpid()),
    }
    if spec.cores is not None:
        variables["LAUNCHER_CORES"] = ",".join(str(core) for core in spec.cores[local_rank])
    return variables


def _hold_signals() -> None:
    """The run is ending already: a second Ctrl-C must not leave half of it alive."""

    def ignore(number: int, frame: FrameType | None) -> None:
        return None

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, ignore)
