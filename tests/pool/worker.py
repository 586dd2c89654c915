"""One rank of the pool: joins the process group, then runs the functions that it receives.

Lifecycle of a rank: `serve` (join, send "ready"), then for each job: `_fresh` state, the function, `_settle`, the
answer. A job and its answer are pickled, so tensors are copied by value.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SEED = 1234
DEVICE_VARIABLE = "LAUNCHER_TEST_DEVICE"  # "cuda": ranks have a GPU (`device.py`)


_modules = 0  # number of imported modules at the last gc.freeze()


@dataclass(frozen=True)
class RankContext:
    """The first argument of a function that runs on the pool.

    Args:
        rank: this rank, 0 to world - 1.
        world: ranks in this run; torch.distributed's default group has exactly these.
        group: that process group: gloo, and NCCL between GPUs.
    """

    rank: int
    world: int
    group: Any


@dataclass(frozen=True)
class Place:
    """The rank's number, the world size, and the directory of the pool's files."""

    rank: int
    world: int
    directory: Path
    port: int

    @property
    def log(self) -> Path:
        """Return the file with everything that the rank printed."""
        return self.directory / f"rank{self.rank}.log"

    @property
    def stacks(self) -> Path:
        """Return the file with the stacks of the rank's threads, written on `signal.SIGUSR1` and when it crashes."""
        return self.directory / f"rank{self.rank}.stacks"


@dataclass(frozen=True)
class Job:
    """A function by name, its arguments, and the import path on which it is found."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: list[str] = field(default_factory=lambda: list(sys.path))


@dataclass(frozen=True)
class Answer:
    """The result of a job: a value, or the traceback as text. `spoiled`: the rank must not be used again."""

    value: Any = None
    error: str | None = None
    spoiled: bool = False


def serve(place: Place, pipe: Connection) -> None:
    """Run a rank's process. Returns when the pipe closes."""
    _redirect(place)
    _die_with_parent()
    os.environ.update(_environment(place))
    try:
        context = _join(place)
    except Exception:
        _send(pipe, Answer(error=traceback.format_exc(), spoiled=True))
        return
    gc.collect()
    _freeze_imports()
    _send(pipe, Answer(value="ready"))
    environment = dict(os.environ)
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        _fresh(environment)
        _send(pipe, _work(context, message))


def _redirect(place: Place) -> None:
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = open(place.stacks, "w")  # noqa: SIM115  (faulthandler keeps the descriptor)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)


def _die_with_parent() -> None:
    """Exit when the parent exits.

    A rank blocked in a collective would outlive a killed pytest, so a thread waits for it.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="die with parent").start()


def _environment(place: Place) -> dict[str, str]:
    rank, world = str(place.rank), str(place.world)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
        **(one_gpu(place.rank) if os.environ.get(DEVICE_VARIABLE) == "cuda" else {}),
    }


def one_gpu(rank: int) -> dict[str, str]:
    """Return the variables with which a rank sees one GPU and can share it.

    NCCL refuses two ranks of one host on a GPU, so each rank claims to be a separate host. They communicate over the
    loopback interface.
    """
    import torch

    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = mask.split(",") if mask else [str(index) for index in range(torch.cuda.device_count())]
    return {
        "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)],
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank {rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def _join(place: Place) -> RankContext:
    import torch
    import torch.distributed as dist

    from launcher.comm.setup import BACKENDS
    from tests.pool.device import DEVICE

    torch.set_num_threads(1)
    store = dist.FileStore(str(place.directory / "store"), place.world)
    # The pool has a timeout; gloo's own would hide which rank was late.
    dist.init_process_group(
        BACKENDS[DEVICE.type],
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(hours=1),
    )
    dist.barrier()
    return RankContext(place.rank, place.world, dist.group.WORLD)


def _fresh(environment: dict[str, str]) -> None:
    """Reset the state before every function, whatever the previous one did."""
    import numpy as np
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)


def _work(context: RankContext, message: bytes) -> Answer:
    try:
        job: Job = pickle.loads(message)
        sys.path.extend(entry for entry in job.path if entry not in sys.path)
        value = _find(job)(context, *job.args, **job.kwargs)
        spoiled = not _settle(context)
        return Answer(value, spoiled=spoiled)
    except (Exception, SystemExit):
        return Answer(error=traceback.format_exc(), spoiled=True)


def _find(job: Job) -> Callable[..., Any]:
    found: Any = importlib.import_module(job.module)
    for name in job.qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _settle(context: RankContext) -> bool:
    """Return whether the default group still works. A leftover collective fails here, in the test that started it."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.group.WORLD is not context.group:
        return False
    dist.barrier()
    # A group that the function created has threads, which would live as long as the process.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not context.group:
            dist.destroy_process_group(group)
    gc.collect()
    _freeze_imports()
    return True


def _freeze_imports() -> None:
    """Exclude imported modules from later garbage collections, which run after every function."""
    global _modules
    if len(sys.modules) > _modules:
        _modules = len(sys.modules)
        gc.freeze()


def _packed(answer: Answer) -> bytes:
    """Return the pickled answer, with GPU tensors moved to the host, where tests compare them."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            on_gpu = isinstance(value, torch.Tensor) and value.is_cuda
            return value.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL) if on_gpu else NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer).dump(answer)
    return buffer.getvalue()


def _send(pipe: Connection, answer: Answer) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        message = _packed(answer)
    except Exception:
        message = pickle.dumps(Answer(error=traceback.format_exc(), spoiled=True))
    try:
        pipe.send_bytes(message)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)
