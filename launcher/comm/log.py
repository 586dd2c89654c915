"""The log of this process's collectives (`comms_logger`): `launcher.comm.log_summary()`, as in DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from launcher.comm.observe import Timing, observers
from launcher.comm.plain import gather_plain

if TYPE_CHECKING:
    from launcher.monitor.comms import CommsLog

_log: CommsLog | None = None
_unread: list[Timing] = []  # on CUDA read after the step: reading at once would synchronize


def start_log(*, operations: frozenset[str] | None, by_unit: bool, verbose: bool) -> CommsLog:
    """Log every collective from now on, until `stop_log`. A log that is already running is ended.

    Args:
        operations: the operations to log; None: all.
        by_unit: log each unit separately.
        verbose: print each, on rank 0.
    """
    from launcher.monitor.comms import CommsLog

    global _log
    stop_log()
    prints = print if verbose and dist.get_rank() == 0 else None
    _log = CommsLog(operations=operations, by_unit=by_unit, verbose=prints)
    observers.append(_note)
    return _log


def stop_log() -> None:
    """Stop logging, and discard the log."""
    global _log
    if _log is not None:
        observers.remove(_note)
        _log = None
        _unread.clear()


def read_log() -> CommsLog | None:
    """Return the log, with every collective that has been waited for; None if comms_logger is off.

    On CUDA, call it from time to time.
    """
    if _log is not None:
        for timing in _unread:
            record = timing.record
            _log.add(record.op, record.tag, record.nbytes, record.sent, timing.seconds, timing.blocked)
        _unread.clear()
    return _log


def log_summary(show_straggler: bool = False) -> None:
    """Print the log of rank 0.

    Args:
        show_straggler: add how long rank 0 waited for slower ranks: its time minus the least time of any
            rank. Every rank must call it then.
    """
    log = read_log()
    if log is None:
        if dist.get_rank() == 0:
            print("no collectives were logged: comms_logger.enabled is false", flush=True)
        return
    least = None
    if show_straggler:
        every = gather_plain({key: row.seconds for key, row in log.rows.items()})
        least = {key: min(rank.get(key, seconds) for rank in every) for key, seconds in every[0].items()}
    if dist.get_rank() == 0:
        print(f"collectives of rank 0 of {dist.get_world_size()}\n{log.table(least)}", flush=True)


def _note(timing: Timing) -> None:
    if _log is not None and _log.logs(timing.record.op):
        _unread.append(timing)
        if _log.verbose is not None:
            read_log()
