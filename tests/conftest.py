"""Fixtures and settings of all tests: one pool of ranks per session, one thread per process, no network."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.pool import WorkerPool
from tests.pool.worker import DEVICE_VARIABLE
from tests.thinning import deselect, pytest_addoption  # noqa: F401  (pytest calls the second)

# Ranks inherit these: few cores are shared, and nothing may wait for a download.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A busy machine is not a bug.
settings.register_profile("launcher", deadline=None)
settings.load_profile("launcher")

# The comparison with DeepSpeed takes minutes and needs the package, so it runs on request only.
_PARITY = os.environ.get("LAUNCHER_TEST_PARITY") == "1" and importlib.util.find_spec("deepspeed") is not None
collect_ignore = [] if _PARITY else ["parity_deepspeed", "parity_megatron"]

# Workers take whole files, in this order: long ones start early, so that the workers end together.
LONG = (
    "test_killed_saves.py",
    "test_transformers.py",
    "test_recipes.py",
    "test_dry_run.py",
    "test_recipe.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Set the device that tests use, and keep other processes off the GPUs, before any test is imported."""
    device = config.getoption("--device")
    os.environ[DEVICE_VARIABLE] = device
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # otherwise a process that checks for GPUs cannot fork ranks that use them
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases after `-k` and `-m` were applied."""
    deselect(config, items)
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Exclude objects from imports and collection from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Yield ranks that live as long as the session: `pool.run(function, world, *args)`."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """Fail a test that leaves a process group in this process, since engines run on the pool's ranks."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this test has left a process group in the tests' own process: run it on the pool")


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Restore the log after a test that runs `launch` in this process, possibly with less output."""
    ours = logging.getLogger("launcher")
    was = ours.level, ours.propagate, list(ours.handlers)
    yield
    ours.setLevel(was[0])
    ours.propagate, ours.handlers = was[1], was[2]
