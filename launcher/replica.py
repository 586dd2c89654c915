"""To which replica of a run this process belongs (`fault_tolerance`): variables that `launch` sets."""

from __future__ import annotations

import os
from collections.abc import Mapping

ADDRESS, SECRET = "LAUNCHER_COORDINATOR", "LAUNCHER_REPLICA_SECRET"
"""Variables that tell a rank where to ask who trains together, and what it must know."""
REPLICA, REPLICAS, RUN = "LAUNCHER_REPLICA", "LAUNCHER_REPLICAS", "LAUNCHER_REPLICA_RUN"
"""Variables that say to which replica a process belongs, how many there are, and the name of the whole run."""


def replica_of(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (number of this process's replica, how many there are); (0, 1) where there is one."""
    return int(environment.get(REPLICA, "0")), int(environment.get(REPLICAS, "1"))
