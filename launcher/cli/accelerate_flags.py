"""Machine settings from accelerate's YAML as flags of `launch`; flags on the command line take precedence."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

from launcher.cli.flags import LONGEST_COUNT
from launcher.cluster.hostfile import check_size
from launcher.config.accelerate_yaml import checked, precision_of
from launcher.config.problems import show
from launcher.errors import ConfigError

logger = logging.getLogger("launcher")
RUNNERS = {"openmpi": "openmpi", "mvapich": "mpich", "pdsh": "pdsh"}
"""deepspeed_multinode_launcher -> --launcher; `standard` and `nossh` run the same command on each node."""


def take(flags: argparse.Namespace) -> None:
    """Fill in flags that the command line does not set from the YAML, and log them."""
    tree = checked(flags.config)
    taken = {
        name: value
        for name, value in _flags_of(tree, flags.config).items()
        if value is not None and getattr(flags, name) in (None, False, "auto")
    }
    for name, value in taken.items():
        setattr(flags, name, value)
    logger.info(
        "flags from %s: %s", flags.config, " ".join(_spelt(*flag) for flag in taken.items()) or "none"
    )


def _spelt(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name} {value}"


def _flags_of(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the flags that the YAML sets.

    Raises:
        ConfigError: a value is not a whole number, or processes are not distributed evenly over the machines.
    """
    nodes, ranks = _whole(tree, "num_machines", path) or 1, _whole(tree, "num_processes", path)
    check_size(nodes, ranks or nodes, path)
    if ranks is not None and ranks % nodes:
        raise ConfigError(
            f"num_processes {ranks} is not a multiple of num_machines {nodes}",
            where=path,
            fix="give every machine the same number of processes",
        )
    found: dict[str, Any] = {
        "num_gpus": None if ranks is None else ranks // nodes,
        "device": "cpu" if tree.get("use_cpu") or tree["distributed_type"] == "MULTI_CPU" else None,
        "bind_cores_to_rank": _switch(tree, "enable_cpu_affinity", path) or None,
    }
    slots = tree.get("gpu_ids")
    if slots not in (None, "all") and nodes == 1:
        found["include"] = f"localhost:{slots}"
    return found | (_of_several(tree, nodes, path) if nodes > 1 else {})


def _of_several(tree: Mapping[str, Any], nodes: int, path: str) -> dict[str, Any]:
    section = tree.get("deepspeed_config") or {}
    runner = section.get("deepspeed_multinode_launcher") or "pdsh"
    found = {
        "master_addr": tree.get("main_process_ip"),
        "master_port": _whole(tree, "main_process_port", path),
    }
    if runner in ("standard", "nossh"):
        rank = _whole(tree, "machine_rank", path) or 0
        return found | {"no_ssh": True, "num_nodes": nodes, "node_rank": rank}
    if runner not in RUNNERS:
        raise ConfigError(
            f"deepspeed_multinode_launcher is {show(runner)}",
            where=path,
            fix=f"write one of {', '.join([*RUNNERS, 'standard', 'nossh'])}, or --launcher slurm on the command line",
        )
    return found | {
        "launcher": RUNNERS[runner],
        "hostfile": section.get("deepspeed_hostfile"),
        "include": section.get("deepspeed_inclusion_filter"),
        "exclude": section.get("deepspeed_exclusion_filter"),
    }


def _switch(tree: Mapping[str, Any], key: str, path: str) -> bool:
    value = tree.get(key) or False
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {show(value)}", where=path, fix="write true or false")
    return value


def _whole(tree: Mapping[str, Any], key: str, path: str) -> int | None:
    value = tree.get(key)
    if value is None or value == -1:  # accelerate's value for "not set"
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 10**LONGEST_COUNT:
        raise ConfigError(f"{key} is {show(value)}", where=path, fix="write a whole number")
    return value


def variables(path: str) -> dict[str, str]:
    """Return the environment variables that accelerate's own launcher would set in addition to the JSON."""
    tree = checked(path)
    section = tree.get("deepspeed_config") or {}
    precision = precision_of(tree)
    # float8 is the engine's, by the JSON: accelerate must not convert the model, too.
    found = {"ACCELERATE_MIXED_PRECISION": "bf16" if precision == "fp8" else precision}
    if section.get("zero3_init_flag") is not None:
        found["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = str(section["zero3_init_flag"]).lower()
    if section.get("deepspeed_moe_layer_cls_names") is not None:
        found["ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"] = str(section["deepspeed_moe_layer_cls_names"])
    return found
