"""A pool of ranks for tests (`worker_pool.py`), and the reference that they are compared with (`reference.py`)."""

from tests.pool.worker import RankContext
from tests.pool.worker_pool import RanksFailed, WorkerPool

__all__ = ["RankContext", "RanksFailed", "WorkerPool"]
