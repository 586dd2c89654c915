"""The replica that this process belongs to (`fault_tolerance`), from variables that `launch` sets."""

from __future__ import annotations

import os
from collections.abc import Mapping

ADDRESS, SECRET = "LAUNCHER_COORDINATOR", "LAUNCHER_REPLICA_SECRET"
"""Variables with the address of the coordinator of the replicas, and the secret to authenticate with it."""
REPLICA, REPLICAS, RUN = "LAUNCHER_REPLICA", "LAUNCHER_REPLICAS", "LAUNCHER_REPLICA_RUN"
"""Variables with this process's replica index, the number of replicas, and the name of the whole run."""


def replica_of(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (index of this process's replica, number of replicas); (0, 1) without replicas."""
    return int(environment.get(REPLICA, "0")), int(environment.get(REPLICAS, "1"))
