"""Adapters for DeepSpeed names that have no direct equivalent in launcher."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import launcher
import launcher.integrations.lr_schedules  # adds DeepSpeed's attributes to schedules
from launcher.checkpointing import checkpoint
from launcher.config.source import read
from launcher.engine import Engine
from launcher.errors import ConfigError
from launcher.integrations.marks import mark_small  # the import adds DeepSpeed's attributes to parameters
from launcher.integrations.processes import check_accelerate, init_distributed, logger
from launcher.integrations.refused import NotHere, missing
from launcher.integrations.served import VERSION
from launcher.models.units import SPREAD_OVER
from launcher.zero import PartitionedInit, ShardedParameter
from launcher.zero.features.context import GatheredParameters


def _explain(name: str) -> NotHere:
    """Return the error for a method or attribute of DeepSpeed's engine that does not exist."""
    what, how = missing(f"runtime.engine.DeepSpeedEngine.{name}", f"DeepSpeedEngine.{name}")
    return NotHere(what, **how)


setattr(Engine, "explain", staticmethod(_explain))  # noqa: B010

# ---- the engine -----------------------------------------------------------------------------------


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    *positional: Any,
    config: Any = None,
    config_params: Any = None,
    **keywords: Any,
) -> Any:
    """Call `launcher.initialize` with a config as Hugging Face's libraries write it.

    Raises:
        ConfigError: the config is not supported, or it configures pipeline stages, which Hugging Face's
            training loops do not support.
    """
    if positional:
        raise ConfigError(
            "only args and model can be positional arguments",
            where="deepspeed.initialize()",
            fix="pass all others as keyword arguments",
        )
    init_distributed(dist_init_required=keywords.get("dist_init_required"))
    check_accelerate()
    given = config if config is not None else config_params
    if (asked := getattr(model, TP_SIZE, 1)) > 1:
        given = _with_tp_size(given if isinstance(given, Mapping) else read(given).tree, asked)
    if isinstance(given, Mapping):
        if keywords.get("mpu") is None:
            _check_trainer(given)
        given = _as_meant(given, dist.get_world_size())
    if model is not None and dist.get_world_size() > 1:
        _check_experts(model)
    made = launcher.initialize(args, model, config=given, **keywords)
    made[0].fp32_script = True
    if made[0].zero_optimization_stage() == 3:
        mark_small(made[0].module)
    if made[0].resolved.expert_parallel.degree > 1:
        _let_accelerate_gather()
    logger.info("DeepSpeed info: version=%s, API provided by launcher's engine", VERSION)
    if made[1] is not None:
        made[1].parameter_offload = _Offload(made[0].module)  # type: ignore[attr-defined]
    return made


def _check_experts(model: nn.Module) -> None:
    """Reject experts that a script has distributed over ranks itself: their gradients would be averaged with
    those of other experts.

    Raises:
        ConfigError: the model has such experts.
    """
    ours = {
        id(param)
        for module in model.modules()
        if hasattr(module, SPREAD_OVER)
        for param in module.parameters()
    }
    for name, param in model.named_parameters():
        spread = re.fullmatch(r"ep_size_(\d+)", str(getattr(param, "group_name", "")))
        if not getattr(param, "allreduce", True) and spread and int(spread[1]) > 1 and id(param) not in ours:
            raise ConfigError(
                f"{name} is marked as an expert parameter that differs between ranks, but belongs to no MoE layer "
                "of this engine",
                where="deepspeed.initialize()",
                fix='use deepspeed.moe.layer.MoE, or a Hugging Face model with "expert_parallel": {"size": N}',
            )


def _as_meant(config: Mapping[str, Any], world: int) -> dict[str, Any]:
    """Return the config with the peculiarities of Hugging Face's libraries normalized."""
    meant: dict[str, Any] = {}
    for key, value in config.items():
        meant[key] = dict(value) if isinstance(value, Mapping) else value
    # TRL writes dotted paths as keys, and sizes as floats.
    for key in [key for key in meant if "." in key]:
        (section, _, name), value = key.partition("."), meant.pop(key)
        meant.setdefault(section, {})[name] = int(value) if isinstance(value, float) else value
    stages = meant.get("pipeline", {}).get("stages")
    if stages not in (None, 1):
        raise ConfigError(
            f"pipeline.stages is {stages}, but Hugging Face's training loop runs the whole model on every rank",
            where="pipeline.stages",
            fix="delete the section, or train with `launch --config DS.json pretrain` or `finetune`, which support "
            "stages",
        )
    _count_tensor_parallel(meant, world)
    _leave_out_data_parallel(meant, world)
    return meant


def _check_trainer(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the config enables sequence parallelism but Hugging Face's Trainer does not: its
    sampler would give each rank different sequences."""
    size = config.get("sequence_parallel_size") or 1
    trainers: Any = getattr(sys.modules.get("transformers.integrations.deepspeed"), TRAINERS, None)
    if hasattr(trainers and trainers(), "mismatches") and (
        (isinstance(size, int) and size > 1) or config.get("context_parallel")
    ):
        raise ConfigError(
            "the config enables sequence parallelism, but the Trainer's sampler gives each rank different sequences",
            where="sequence_parallel_size" if size != 1 else "context_parallel",
            fix="enable it in the Trainer, too: TrainingArguments(parallelism_config=ParallelismConfig(sp_backend="
            f'"deepspeed", sp_size={size if size != 1 else "N"}))',
        )


def _leave_out_data_parallel(config: dict[str, Any], world: int) -> None:
    """Drop the data-parallel degree that DeepSpeed's tensor-parallel examples set, if it is the derived one.
    Any other value is kept, and rejected later."""
    size = config.get("tensor_parallel", {}).get("autotp_size") or 1
    given = config.get("data_parallel_size")
    if isinstance(given, int) and isinstance(size, int) and given * size == world:
        del config["data_parallel_size"]


def _count_tensor_parallel(config: dict[str, Any], world: int) -> None:
    """Drop a train_batch_size that counts all ranks, including tensor-parallel ranks that share data."""
    size = config.get("tensor_parallel", {}).get("autotp_size", 1)
    train, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    accumulation = config.get("gradient_accumulation_steps", 1)
    numbers = all(isinstance(value, int) for value in (size, train, micro, accumulation))
    if numbers and size > 1 and train == micro * accumulation * world:
        del config["train_batch_size"]


TRAINERS = "_hf_deepspeed_config_weak_ref"
"""Attribute of transformers that references the config of this process's TrainingArguments, if any."""

TP_SIZE = "_launcher_tp_size"
"""Attribute that `tp_model_init` sets on a model."""


def tp_model_init(
    model: nn.Module, tp_size: int = 1, dtype: torch.dtype | None = None, config: Any = None, **others: Any
) -> nn.Module:
    """Return the model unchanged: initialize() splits its layers.

    Args:
        tp_size: tensor-parallel degree, if the config does not set it.
        dtype, config: unused; both come from the config of initialize().
    """
    setattr(model, TP_SIZE, tp_size)
    return model


def _with_tp_size(config: Mapping[str, Any], asked: int) -> dict[str, Any]:
    """Return the config with the degree that was passed to tp_model_init().

    Raises:
        ConfigError: the config sets another degree.
    """
    section = dict(config.get("tensor_parallel") or {})
    said = section.setdefault("autotp_size", asked)
    if said != asked:
        raise ConfigError(
            f"tp_model_init() was called with tp_size={asked}, but the JSON sets {said}",
            where="tensor_parallel.autotp_size",
            fix="use the same number in both, or omit one of them",
        )
    return {**config, "tensor_parallel": section}


class _Offload:
    """Stand-in for the object whose hooks TRL removes before it generates inside GatheredParameters. It has
    no hooks: gathered parameters stay gathered during forwards."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        pass


def autocast_if_enabled(engine: Engine) -> AbstractContextManager[Any]:
    """Return the context of the engine's forward: autocast if `torch_autocast` is enabled."""
    return engine.autocasting()


class CheckpointFunction:
    """DeepSpeed's internal interface to `checkpointing.checkpoint()`."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Return run_function(*args), and append its outputs to `all_outputs`."""
        outputs = checkpoint(run_function, *args)
        all_outputs += outputs if isinstance(outputs, tuple) else [outputs]
        return outputs


# ---- parameters -----------------------------------------------------------------------------------


class _Unsplit:
    """Callable that returns the config without its `tensor_parallel` section, for transformers.

    Args:
        whole: returns the full config.
    """

    def __init__(self, whole: Callable[[], dict[str, Any] | None]) -> None:
        self.whole = whole

    def __call__(self) -> dict[str, Any] | None:
        config = self.whole()
        return config and {key: value for key, value in config.items() if key != "tensor_parallel"}


def Init(
    module: nn.Module | None = None, *, dtype: torch.dtype | None = None, **keywords: Any
) -> PartitionedInit:
    """Return a `PartitionedInit` in which transformers loads weights, in the 16-bit dtype of the config.

    If transformers sees a `tensor_parallel` section it renames no weights, because DeepSpeed has split the
    layers by then. Here initialize() splits them later, so the section is hidden from transformers.
    """
    hugging = sys.modules.get("transformers.integrations.deepspeed")
    known = getattr(hugging, "deepspeed_config", None)
    if known is not None and not isinstance(known, _Unsplit):
        setattr(hugging, "deepspeed_config", _Unsplit(known))  # noqa: B010
    config = keywords.get("config_dict_or_path") or keywords.get("config")
    return PartitionedInit(module, dtype=dtype or (_sixteen_bits(config) if config else None), **keywords)


def _sixteen_bits(config: Any) -> torch.dtype | None:
    """Return the 16-bit dtype of a config that may be incomplete; initialize() validates it later."""
    tree = read(config).tree
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        section = tree.get(key)
        if isinstance(section, dict) and section.get("enabled") is True:
            return dtype
    return None


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Do nothing: parameters outside of blocks are unsharded during the whole forward."""


def unchanged(constructor: Callable[..., Any], *dtypes: Any, **others: Any) -> Callable[..., Any]:
    """Return a tensor constructor unchanged."""
    return constructor


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return the item with its tensors cloned, so that a view is saved without its base tensor."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(device), item)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model with all of its parameters gathered, so that generate() needs no communication."""
    inner = getattr(model, "module", model)
    with GatheredParameters([param for param in inner.parameters() if isinstance(param, ShardedParameter)]):
        yield inner


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Do nothing: with `optimizer.type` Muon, the engine selects the matrices itself."""


def enable_universal_checkpoint(param_list: Any) -> None:
    """Do nothing: checkpoints load on any number of ranks without conversion."""


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Return whether ZeRO supports the optimizer: any torch optimizer, elementwise or not."""
    return isinstance(optimizer, torch.optim.Optimizer)


def _let_accelerate_gather() -> None:
    """Make accelerate's Accelerator gather full state dicts from engines with expert parallelism. By itself
    it gathers only if the config shards parameters or splits layers."""
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is None or hasattr(accelerator.get_state_dict, "of_launcher"):
        return
    theirs = accelerator.get_state_dict

    @wraps(theirs)
    def get_state_dict(self: Any, model: Any, *args: Any, **keywords: Any) -> Any:
        if isinstance(model, Engine) and model.resolved.expert_parallel.degree > 1:
            return model._consolidated_16bit_state_dict()
        return theirs(self, model, *args, **keywords)

    get_state_dict.of_launcher = True  # type: ignore[attr-defined]
    accelerator.get_state_dict = get_state_dict
