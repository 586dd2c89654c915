"""Ranks for tests, started once (`worker_pool.py`), and the truth they compare with (`reference.py`)."""

from tests.pool.worker import RankContext
from tests.pool.worker_pool import RanksFailed, WorkerPool

__all__ = ["RankContext", "RanksFailed", "WorkerPool"]
