"""Small DeepSpeed helpers that scripts import: per-rank logging, seeds, memory, loaders, devices."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from launcher.comm import pick_device
from launcher.monitor.memory import current_memory_bytes, peak_memory_bytes
from launcher.pipeline.partition.best_cut import partition

logger = logging.getLogger("launcher")
log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
GIB = 2**30
F = TypeVar("F", bound=Callable[..., Any])
TORCH_INFO = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": "0.0",
}


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Return whether torch's version is within these bounds; `2.7` and "2.7" are equivalent."""
    here = [int(part) for part in torch.__version__.partition("+")[0].split(".") if part.isdigit()]

    def numbers(version: Any) -> list[int]:
        return [int(part) for part in str(version).split(".")]

    return (min_version is None or here >= numbers(min_version)) and (
        max_version is None or here[: len(numbers(max_version))] <= numbers(max_version)
    )


# ---- logging -------------------------------------------------------------------------------------


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """Return the message prefixed with this rank, or None if this rank is not in `ranks`. None, or a -1 in
    `ranks`, selects all ranks."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    wanted = not ranks or -1 in ranks or rank in ranks
    return f"[Rank {rank}] {message}" if wanted else None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks."""
    if (text := get_dist_msg(message, ranks)) is not None:
        logger.log(level, text)


@cache
def _log_once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log like `log_dist`, but only once per message."""
    _log_once(message, tuple(ranks or ()), level)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print a message on these ranks."""
    if (text := get_dist_msg(message, ranks)) is not None:
        print(text, flush=True)


def print_json_dist(message: Any, ranks: Sequence[int] | None = None, path: str | None = None) -> None:
    """Add the rank to a dict, and print it as JSON or write it to `path`, on these ranks."""
    if get_dist_msg("", ranks) is not None:
        message["rank"] = dist.get_rank() if dist.is_initialized() else -1
        if path is None:
            print(json.dumps(message), flush=True)
        else:
            Path(path).write_text(json.dumps(message))


def print_configuration(args: Any, name: str) -> None:
    """Log all attributes of `args`."""
    logger.info("%s:", name)
    for key, value in sorted(vars(args).items()):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), value)


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Print on rank 0, or on every rank if `force` is true."""
    if force or not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


@cache
def warning_once(*args: Any, **keywords: Any) -> None:
    """Log a warning once per message."""
    logger.warning(*args, **keywords)


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def get_log_level_from_string(log_level_str: str) -> int:
    """Return a log level by name; raise ValueError if it is unknown."""
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str} is not a log level; the levels are {', '.join(log_levels)}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether the current log level is at most this one."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


# ---- seeds, memory, devices -----------------------------------------------------------------------


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory use of this process on rank 0. Does nothing unless `force`, as in DeepSpeed."""
    if not force or (dist.is_initialized() and dist.get_rank() > 0):
        return
    device = pick_device()
    now, most = current_memory_bytes(device) / GIB, peak_memory_bytes(device) / GIB
    host = f", host {current_memory_bytes() / GIB:.2f} GiB" if device.type != "cpu" else ""
    logger.info("%s: %s %.2f GiB, peak %.2f GiB%s", message, device, now, most, host)


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print the device memory in use by this process, on every rank or on one."""
    if print_rank in (-1, dist.get_rank() if dist.is_initialized() else 0):
        device = pick_device()
        print_dist(f"{msg}: {current_memory_bytes(device) / GIB:.2f} GiB on {device}")
        if reset_max and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def get_ma_status() -> int:
    """Return the bytes that this process holds on its device."""
    return current_memory_bytes(pick_device())


def empty_cache() -> None:
    """Release cached memory that no tensor uses to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return the item with its tensors moved to `device`; with a criterion, only tensors that satisfy it."""
    wanted = criterion_func or (lambda _: True)
    return tree_map_only(torch.Tensor, lambda t: t.to(device) if wanted(t) else t, item)


def transpose(data: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its last two dimensions swapped, contiguous in memory."""
    return data.transpose(-1, -2).contiguous()


def instrument_w_nvtx(func: F) -> F:
    """Return the function unchanged: the engine records its own profiler ranges."""
    return func


noop_decorator = instrument_w_nvtx
noop_context = nullcontext


class OnDevice:
    """Builds tensors on a device and in a dtype: `with OnDevice(dtype=torch.bfloat16, device="meta"): ...`.

    Args:
        dtype: default dtype of floating-point tensors.
        device: default device of tensors.
        enabled: false makes this do nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True, **others: Any) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            context: AbstractContextManager[Any] = torch.device(self.device)
            self._stack.enter_context(context)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


# ---- data and files -------------------------------------------------------------------------------


class RepeatingLoader:
    """Iterates over a loader indefinitely, restarting it when it is exhausted."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def ensure_directory_exists(filename: str) -> None:
    """Create the parent directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the boundaries [num_parts + 1] of parts of equal size. Leftover items go to the first parts."""
    least, over = divmod(num_items, num_parts)
    return [part * least + min(part, over) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the boundaries [num_parts + 1] of contiguous parts with the lightest possible heaviest part."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return partition(list(weights), num_parts)


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the single value that all items are equal to."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected one value, not {len(found)}: {found}")
    return found.pop()
