"""`deepspeed.launcher.runner`: hostfile parsing, for programs that start DeepSpeed themselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from launcher.cluster.environment import EXTRA_PREFIXES
from launcher.cluster.hostfile import Host, read_hostfile
from launcher.cluster.selection import select
from launcher.integrations.processes import logger

EXPORT_ENVS = EXTRA_PREFIXES
"""Prefixes of additional environment variables exported to other nodes; programs may add to them."""


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Return host -> number of slots, or None if the file does not exist.

    Raises:
        ConfigError: a line is invalid.
    """
    if not Path(hostfile_path).is_file():
        logger.warning("hostfile %s not found: only this machine is used", hostfile_path)
        return None
    return OrderedDict((host.name, len(host.slots)) for host in read_hostfile(hostfile_path))


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """Return host -> the slots that remain after filtering.

    Args:
        resource_pool: host -> number of slots.
        inclusion, exclusion: filters like --include and --exclude: `NODE@NODE:0,2`; "" for none.

    Raises:
        ConfigError: both are given, or one names an unknown host or slot.
    """
    hosts = [Host(name, tuple(range(slots))) for name, slots in resource_pool.items()]
    chosen = select(hosts, include=inclusion or None, exclude=exclusion or None)
    return OrderedDict((host.name, list(host.slots)) for host in chosen)
