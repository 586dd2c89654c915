"""`deepspeed.launcher.runner`: which hosts a hostfile names, for programs that start DeepSpeed themselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from launcher.cluster.environment import EXTRA_PREFIXES
from launcher.cluster.hostfile import Host, read_hostfile
from launcher.cluster.selection import select
from launcher.integrations.processes import logger

EXPORT_ENVS = EXTRA_PREFIXES
"""Prefixes of more variables that are passed on to other nodes; a program may add to them."""


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Return host -> its number of slots; None where there is no such file.

    Raises:
        ConfigError: a line is wrong.
    """
    if not Path(hostfile_path).is_file():
        logger.warning("there is no hostfile %s: this machine alone is used", hostfile_path)
        return None
    return OrderedDict((host.name, len(host.slots)) for host in read_hostfile(hostfile_path))


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """Return host -> its slots that are left.

    Args:
        resource_pool: host -> its number of slots.
        inclusion, exclusion: as --include and --exclude: `NODE@NODE:0,2`; "" for none.

    Raises:
        ConfigError: both are given, or one names what is not there.
    """
    hosts = [Host(name, tuple(range(slots))) for name, slots in resource_pool.items()]
    chosen = select(hosts, include=inclusion or None, exclude=exclusion or None)
    return OrderedDict((host.name, list(host.slots)) for host in chosen)
