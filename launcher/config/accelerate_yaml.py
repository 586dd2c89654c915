"""The configuration and the machine settings in accelerate's YAML (written by `accelerate config`).

The keys are converted as in accelerate, to a JSON in which the script fills in every "auto". Keys that would
change the training and that this engine does not support are errors, and so are other types of machines
(TPU).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config.document import Document
from launcher.config.problems import in_json, nearest, show
from launcher.config.reader import read_file
from launcher.errors import ConfigError, shortened
from launcher.files import read_small

STAGE = "zero_stage"
STAGES = {"DEEPSPEED": 2, "MULTI_GPU": 0, "MULTI_CPU": 0, "NO": 0}
"""distributed_type -> the ZeRO stage if none is set, as in accelerate; 0 is equivalent to DDP."""

PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "no": (), "bf16": ("bf16",), "fp16": ("fp16",), "fp8": ("bf16", "fp8"),
}  # fmt: skip
"""mixed_precision -> the sections of the JSON that it enables."""
ACCUMULATION = "gradient_accumulation_steps"
SECTIONS: Mapping[str, str] = {
    ACCUMULATION: ACCUMULATION,
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    STAGE: "zero_optimization.stage",
}
"""Keys of `deepspeed_config` -> their paths in the JSON."""

OF_MACHINES = {"deepspeed_hostfile", "deepspeed_multinode_launcher"} | {
    f"deepspeed_{verb}_filter" for verb in ("inclusion", "exclusion")
}
FP8, FP8_BACKEND, FP8_GATHERS = "fp8_config", "backend", "enable_fsdp_float8_all_gather"
FP8_KEYS = {FP8_BACKEND, FP8_GATHERS, "pad_inner_dim"}
"""Keys of accelerate's torchao backend; sizes need no padding, since only multiples of 16 are computed in float8."""
FILE, OF_SCRIPT = "deepspeed_config_file", {"zero3_init_flag", "deepspeed_moe_layer_cls_names"}
TOP = {
    "compute_environment", "distributed_type", "deepspeed_config", "mixed_precision", ACCUMULATION,
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "use_cpu",
    "enable_cpu_affinity", FP8,
}  # fmt: skip
IDLE = {
    "main_training_function", "rdzv_backend", "same_network", "downcast_bf16", "debug",
    "tpu_name", "tpu_zone", "tpu_env", "tpu_vm", "tpu_use_cluster", "tpu_use_sudo", "commands", "command_file",
}  # fmt: skip
"""Keys without effect: they configure how accelerate itself starts processes."""
ELSEWHERE = {
    "fsdp_config": "zero_stage: 3 in deepspeed_config",
    "megatron_lm_config": "tensor_parallel and pipeline in the JSON",
    "parallelism_config": "tensor_parallel and pipeline in the JSON",
    "dynamo_config": "compile in the JSON",
    "dynamo_backend": "compile in the JSON",
    "mpirun_config": "launch --launcher openmpi",
}
"""Sections of other engines -> what to write instead."""


def read_yaml(path: str | Path) -> Document:
    """Read the configuration of a YAML file: the JSON that it refers to, or the values of its keys.

    Raises:
        ConfigError: the file is not accelerate's, or requests something that is not supported.
    """
    tree = checked(str(path))
    section = tree.get("deepspeed_config") or {}
    if section.get(FILE) is None:
        return Document(Path(path).name, _built(tree, section, str(path)))
    doubled = sorted(set(section) & set(SECTIONS)) + ["mixed_precision"] * (precision_of(tree) != "no")
    if doubled:
        them = "it" if len(doubled) == 1 else "them"
        raise ConfigError(
            f"{', '.join(doubled)} cannot be combined with {FILE}",
            where=str(path),
            fix=f"set {them} in {section[FILE]}, and delete {them} here",
        )
    return read_file(Path(section[FILE]))


def _built(tree: Mapping[str, Any], section: Mapping[str, Any], path: str) -> dict[str, Any]:
    made: dict[str, Any] = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    said = {STAGE: STAGES[tree["distributed_type"]], "gradient_clipping": "auto", ACCUMULATION: "auto"}
    said |= {key: tree[key] for key in (ACCUMULATION,) if key in tree}
    for key, value in {**said, **section}.items():
        if key in SECTIONS and not _is_none(value):
            _put(made, SECTIONS[key].split("."), value)
    precision = precision_of(tree)
    if precision not in PRECISIONS:
        raise ConfigError(
            f"unsupported mixed_precision: {in_json(precision)}",
            where=path,
            fix=f"write one of {', '.join(PRECISIONS)}",
        )
    for name in PRECISIONS[precision]:
        made[name] = {"enabled": True}
    if precision == "fp8":
        made["fp8"] |= _of_torchao(tree.get(FP8) or {}, path)
    return made


def _of_torchao(section: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return keys of the JSON's `fp8` for an `fp8_config`."""
    backend = str(section.get(FP8_BACKEND) or "AO")
    if backend.upper() not in ("AO", "TORCHAO"):
        raise ConfigError(
            f"unsupported {FP8}.{FP8_BACKEND}: {in_json(backend)}",
            where=path,
            fix="write AO: torchao's layers are used",
        )
    _check_keys(section, FP8_KEYS, f"{path} {FP8}")
    return {"all_gather": section[FP8_GATHERS]} if section.get(FP8_GATHERS) is not None else {}


def precision_of(tree: Mapping[str, Any]) -> str:
    """Return `mixed_precision`; YAML parses the word no as false."""
    return str(tree.get("mixed_precision") or "no").lower()


def _is_none(value: Any) -> bool:
    """Return whether a value is unset; accelerate writes the string none for that."""
    return value is None or (isinstance(value, str) and value.lower() == "none")


def _put(tree: dict[str, Any], steps: list[str], value: Any) -> None:
    *sections, key = steps
    for name in sections:
        tree = tree.setdefault(name, {})
    tree[key] = value


def checked(path: str) -> dict[str, Any]:
    """Parse the YAML file, and check that all of its keys are known.

    Raises:
        ConfigError: see `read_yaml`.
    """
    tree = _parsed(path)
    section = tree.get("deepspeed_config") or {}
    if not isinstance(section, dict):
        raise ConfigError(
            f"deepspeed_config must be a section, not {show(section)}", where=path, fix="write keys in it"
        )
    _check_keys(tree, TOP | IDLE | ELSEWHERE.keys(), path)
    _check_keys(section, {*SECTIONS, *OF_MACHINES, *OF_SCRIPT, FILE}, f"{path} deepspeed_config")
    if not isinstance(tree.get(FP8) or {}, dict):
        raise ConfigError(
            f"{FP8} must be a section, not {show(tree[FP8])}", where=path, fix="write keys in it"
        )
    single = {key: tree[key] for key in TOP & tree.keys() - {"deepspeed_config", FP8}}
    _check_plain(single | section | (tree.get(FP8) or {}), path)
    for key, instead in ELSEWHERE.items():
        if tree.get(key) and str(tree[key]).lower() != "no":  # older versions write dynamo_backend: 'NO'
            raise ConfigError(
                f"{key} configures another engine", where=path, fix=f"delete it, and use {instead}"
            )
    kind = tree.setdefault("distributed_type", "DEEPSPEED" if section else "NO")
    if kind not in STAGES:
        raise ConfigError(
            f"unsupported distributed_type: {in_json(kind)}",
            where=path,
            fix=f"write one of {', '.join(STAGES)}",
        )
    if tree.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError(
            f"unsupported compute_environment: {in_json(tree['compute_environment'])}",
            where=path,
            fix="write LOCAL_MACHINE",
        )
    return tree


def _parsed(path: str) -> dict[str, Any]:
    import yaml

    text = read_small(
        Path(path), "the accelerate configuration", where="--config", fix="give the path of the file"
    )
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = shortened(" ".join(str(error).split()), 300)
        raise ConfigError(f"this is not valid YAML: {reason}", where=path) from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(
            "not an accelerate configuration", where=path, fix="create one with `accelerate config`"
        )
    return tree


def _check_plain(values: Mapping[str, Any], path: str) -> None:
    """Raise `ConfigError` for lists and sections: expanded YAML aliases could exceed any memory."""
    for key, value in values.items():
        if isinstance(value, list | dict):
            kind = "a list" if isinstance(value, list) else "a section"
            raise ConfigError(f"{key} must be a single value, not {kind}", where=path, fix="write one value")


def _check_keys(tree: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in tree:
        if key not in known:
            near = nearest(str(key), known)
            raise ConfigError(
                f'unknown accelerate key "{shortened(key)}"',
                where=where,
                fix=f"did you mean {near}?" if near else "delete it",
            )
