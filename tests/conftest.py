"""What every test shares: one pool of ranks a session, one thread a process, no network."""

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

# Ranks inherit these: several ranks share few cores, and nothing may wait for a download.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A busy machine is no bug.
settings.register_profile("launcher", deadline=None)
settings.load_profile("launcher")

# The comparison with DeepSpeed takes minutes and needs the package: it runs when asked for.
_PARITY = os.environ.get("LAUNCHER_TEST_PARITY") == "1" and importlib.util.find_spec("deepspeed") is not None
collect_ignore = [] if _PARITY else ["parity_deepspeed", "parity_megatron"]

# Workers take whole files, in this order: what takes long begins early, so that they end together.
LONG = (
    "test_killed_saves.py",
    "test_transformers.py",
    "test_recipes.py",
    "test_dry_run.py",
    "test_recipe.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported: which device it finds, and that others stay away from GPUs."""
    device = config.getoption("--device")
    os.environ[DEVICE_VARIABLE] = device
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # else a process that asks for GPUs cannot fork ranks that use them
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After `-k` and `-m` have chosen."""
    deselect(config, items)
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """What imports and collection have made stays: collections of garbage, which some code asks for, pass over it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Ranks that live as long as the session: `pool.run(function, world, *args)`."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """Engines live on the pool's ranks: a process group that a test leaves in this process breaks those after it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this test has left a process group in the tests' own process: run it on the pool")


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """A test that runs `launch` in this process, perhaps quietly, leaves the log to the next one as it was."""
    ours = logging.getLogger("launcher")
    was = ours.level, ours.propagate, list(ours.handlers)
    yield
    ours.setLevel(was[0])
    ours.propagate, ours.handlers = was[1], was[2]
