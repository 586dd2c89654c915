"""Rewrites obsolete keys to current ones: `convert` rewrites a document and reports every change.

Simple cases are lines of the two tables; the others are functions in `RULES`, in the order in which they run.
A rule applies only if the intent is unambiguous: anything else is left for the checks to reject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from launcher.config.document import Document, Rewriter
from launcher.config.problems import Path
from launcher.config.section import as_switch

GATHERS = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
RENAMED = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": GATHERS,
    "zero_optimization.gather_fp16_weights_on_model_save": GATHERS,
    "zero_optimization.aio": "aio",
    "aio.thread_count": "aio.intra_op_parallelism",
    "autotuning.start_step": "autotuning.start_profile_step",
    "autotuning.end_step": "autotuning.end_profile_step",
    "optimizer.params.max_grad_norm": "gradient_clipping",
}
"""Old path -> current path; the value is kept."""

NO_LOSS_SCALE = "bfloat16 has the range of float32 and needs no loss scale; only fp16 has one"
LOSS_SCALE = (
    "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale",
)  # fmt: skip
ONE_BIT = "belongs to the 1-bit optimizers, which DeepSpeed removed"
ONE_BIT_KEYS = (
    "freeze_step", "cuda_aware", "comm_backend_name", "var_freeze_step", "var_update_scaler", "local_step_scaler",
    "local_step_clipper", "coeff_beta", "factor_max", "factor_min", "factor_threshold",
)  # fmt: skip
DROPPED = {
    **{f"bf16.{key}": NO_LOSS_SCALE for key in LOSS_SCALE},
    "bf16.auto_cast": "floating-point inputs follow the dtype of the model",
    "bf16.opt_level": "an option of Apex",
    "fp16.opt_level": "an option of Apex; `fp16` corresponds to its level O2",
    "fp16.fp16_opt_level": "an option of Apex; `fp16` corresponds to its level O2",
    "fp16.fp16_backend": "an option of an old trainer",
    "fp16.backend": "an option of an old trainer",
    **{f"optimizer.params.{key}": ONE_BIT for key in ONE_BIT_KEYS},
    "disable_allgather": "had no effect in DeepSpeed either",
    "sparse_gradients": "gradients of embeddings are reduced as dense tensors; the result is the same",
    "cuda_visible_devices": "DeepSpeed never read it; the environment variable CUDA_VISIBLE_DEVICES selects the GPUs",
    "seed": "DeepSpeed never read it; the flag --seed of the recipes sets the seed",
    "zero_optimization.legacy_stage1": "there is only one implementation of stage 1",
    "zero_optimization.grad_hooks": "was never a key in DeepSpeed's code",
    "zero_optimization.offload_optimizer.buffer_size": "never had an effect here; it is a key of offload_param",
}
"""Path -> why it can be removed without changing the training."""

APEX = {
    "enabled", "opt_level", "loss_scale", "min_loss_scale", "max_loss_scale", "cast_model_type", "verbosity",
    "num_losses", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "cast_model_outputs",
}  # fmt: skip
CURRICULUM = {
    "enabled", "curriculum_type", "min_difficulty", "max_difficulty", "schedule_type", "schedule_config",
}  # fmt: skip
COMPRESSION = {
    "layer_reduction", "weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning",
    "head_pruning", "channel_pruning",
}  # fmt: skip
"""Members of sections that are converted as a whole. If a section has any other member, such as a typo, it is
left to the checks."""


def convert(document: Document) -> Document:
    """Return a copy with current keys; `conversions` lists the changes, `origins` the paths of moved keys."""
    work = Rewriter(document)
    for rule in RULES:
        rule(work)
    return work.document


def _renamed(work: Rewriter) -> None:
    for old, new in RENAMED.items():
        if work.has(old):
            work.move(old, new, f"write `{new}`")


def _dropped(work: Rewriter) -> None:
    for path, why in DROPPED.items():
        if work.has(path):
            work.drop(path, f"removed: {why}")


def _boolean_zero(work: Rewriter) -> None:
    """Convert `"zero_optimization": true` to stage 1, including its `allgather_size`."""
    written = work.get("zero_optimization")
    size = work.get("allgather_size")
    if isinstance(written, bool):
        tree: dict[str, Any] = {"stage": int(written)}
        if written and size is not None:
            tree["allgather_bucket_size"] = size
        work.put("zero_optimization", tree, f'write {{"stage": {int(written)}}}')
    if work.has("allgather_size"):
        left_out = "removed: it applied only to the old boolean `zero_optimization`"
        moved = "write `zero_optimization.allgather_bucket_size`"
        work.drop("allgather_size", moved if written is True else left_out)


def _cpu_offload(work: Rewriter) -> None:
    """Convert the switches that preceded the offload sections to these sections."""
    pin = work.take(
        "zero_optimization.cpu_offload_use_pin_memory", "write `pin_memory` in the offload section"
    )
    for old, section in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
        ("cpu_offload_params", "offload_param"),
    ):
        path, new = f"zero_optimization.{old}", f"zero_optimization.{section}"
        if work.switch(path) is None:
            continue
        if work.switch(path) is False:
            work.drop(path, f"removed: without `{section}` nothing is offloaded")
        elif work.get(new) is not None:
            work.problem(path, f"is set together with `{new}`, which replaced it", f"delete `{old}`")
        else:
            tree = {"device": "cpu"} | ({"pin_memory": pin} if as_switch(pin) is not None else {})
            work.replace(path, new, tree, f'write `{new}`: {{"device": "cpu"}}')


def _zero_sizes(work: Rewriter) -> None:
    """Drop sizes of 0, which old versions of DeepSpeed accepted."""
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        path = f"zero_optimization.{key}"
        if work.get(path) == 0 and not isinstance(work.get(path), bool):
            work.drop(path, "removed: a bucket cannot hold 0 elements; the default applies")


def _fp16_switch(work: Rewriter) -> None:
    """Rename the switch in Megatron's files, `"fp16": {"fp16": true}`."""
    if work.switch("fp16.fp16") is not None:
        if work.has("fp16.enabled"):
            work.drop("fp16.fp16", "removed: `fp16.enabled` replaces it")
        else:
            work.move("fp16.fp16", "fp16.enabled", "write `fp16.enabled`")
    if work.get("fp16.type") == "fp16":
        work.drop("fp16.type", "removed: the section's name implies it")


def _checkpoint_activations(work: Rewriter) -> None:
    """Convert a Megatron key that DeepSpeed never read: drop it if false, do what was intended if true."""
    value, new = work.switch("checkpoint_activations"), "activation_checkpointing"
    if value is False:
        work.drop("checkpoint_activations", f"removed: without `{new}` nothing is recomputed")
    elif value is True and not work.has(new):
        work.replace(
            "checkpoint_activations", new, {}, f"write `{new}`: {{}}; DeepSpeed never read the old key"
        )


def _fp32_allreduce(work: Rewriter) -> None:
    value = work.switch("fp32_allreduce")
    if value is True and not work.has("communication_data_type"):
        new = "communication_data_type"
        work.replace("fp32_allreduce", new, "fp32", f'write `{new}`: "fp32"')
    elif value is not None:
        work.drop("fp32_allreduce", "removed: `communication_data_type` replaces it")


def _amp(work: Rewriter) -> None:
    """Convert Apex's levels: O1 was autocast in float16, O2 and O3 a float16 model."""
    amp = work.get("amp")
    if not isinstance(amp, dict) or not amp.keys() <= APEX:
        return
    level = amp.get("opt_level", "O1")
    on = as_switch(amp.get("enabled"))
    if on is False or amp.get("enabled") in (None, "auto") or level == "O0":
        work.drop("amp", "removed: Apex is disabled")
    elif on and level in ("O1", "auto") and not work.has("torch_autocast"):
        tree = {"enabled": True, "dtype": "float16"}
        work.replace("amp", "torch_autocast", tree, "Apex O1 corresponds to `torch_autocast` in float16")
    elif on and level in ("O2", "O3") and not work.has("fp16"):
        work.replace("amp", "fp16", {"enabled": True}, f"Apex {level} corresponds to `fp16`")


def _one_bit(work: Rewriter) -> None:
    plain = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}
    name = work.get("optimizer.type")
    new = plain.get(name.lower()) if isinstance(name, str) else None
    if new is not None:
        what = f'"{name}" is replaced by "{new}": the same updates, without gradient compression'
        work.put("optimizer.type", new, what)


def _curriculum(work: Rewriter) -> None:
    """Move curriculum learning by sequence length out of the section that preceded data_efficiency."""
    old, new = "curriculum_learning", "data_efficiency"
    section = work.get(old)
    if not isinstance(section, dict) or not section.keys() <= CURRICULUM:
        return
    if as_switch(section.get("enabled", False)) is False:
        work.drop(old, "removed: it is disabled")
        return
    if section.get("curriculum_type", "seqlen") != "seqlen" or work.has(new):
        return
    metric = {key: value for key, value in section.items() if key not in ("enabled", "curriculum_type")}
    metric = {"difficulty_type": "value", "clustering_type": "single_cluster", **metric}
    learning = {"enabled": section["enabled"], "curriculum_metrics": {"seqlen": metric}}
    tree = {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}
    where = f"{new}.data_sampling.curriculum_learning"
    work.replace(old, new, tree, f"write `{where}` with the metric `seqlen`")
    inside: Path = (new, "data_sampling", "curriculum_learning", "curriculum_metrics", "seqlen")
    work.same_place((old,), inside)


def _monitor_config(work: Rewriter) -> None:
    """Move the members to the top level. The section is from old documentation; DeepSpeed never read it."""
    section = work.get("monitor_config")
    if not isinstance(section, dict):
        return
    for key in list(section):
        if key in ("tensorboard", "wandb", "csv_monitor", "comet") and not work.has(key):
            work.move(f"monitor_config.{key}", key, f"write `{key}` at the top level")
    if not work.get("monitor_config") or work.get("monitor_config") == {"enabled": False}:
        work.drop("monitor_config", None)


def _compression(work: Rewriter) -> None:
    """Drop a section, common in templates, that lists every technique and disables all of them."""
    section = work.get("compression_training")
    if not isinstance(section, dict) or not section.keys() <= COMPRESSION:
        return
    if section and all(_is_off(technique) for technique in section.values()):
        work.drop("compression_training", "removed: none of its techniques is enabled")


def _is_off(technique: Any) -> bool:
    return [as_switch(switch) for switch in _switches(technique)] == [False]


def _switches(technique: Any) -> Iterator[Any]:
    """Yield the values of `enabled` in a compression technique."""
    if isinstance(technique, dict):
        for key, value in technique.items():
            if key == "enabled":
                yield value
            elif key != "different_groups":
                yield from _switches(value)


def _comm_names(work: Rewriter) -> None:
    """Replace torch's dtype names with the short ones of the JSON."""
    names = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
    for path in (
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "data_types.grad_accum_dtype",
        "data_types.param_dtype",
        "data_types.buffer_dtype",
    ):
        value = work.get(path)
        short = names.get(value.removeprefix("torch.").lower()) if isinstance(value, str) else None
        if short:
            work.put(path, short, f'"{value}" is torch\'s name: write "{short}"')


RULES: tuple[Callable[[Rewriter], None], ...] = (
    _monitor_config,
    _renamed,
    _boolean_zero,
    _cpu_offload,
    _zero_sizes,
    _fp16_switch,
    _checkpoint_activations,
    _fp32_allreduce,
    _amp,
    _one_bit,
    _curriculum,
    _compression,
    _comm_names,
    _dropped,
)
"""In this order: keys are moved to their current paths before their values are examined."""


def converted_paths() -> Iterator[tuple[str, str]]:
    """Yield (old path, what it is converted to), for the documentation."""
    yield from ((old, f"`{new}`") for old, new in RENAMED.items())
    yield from ((path, f"removed: {why}") for path, why in DROPPED.items())
    yield from OTHERS.items()


OTHERS = {
    "zero_optimization: true": '`zero_optimization`: {"stage": 1}',
    "allgather_size": "`zero_optimization.allgather_bucket_size` if `zero_optimization` is true; else removed",
    "zero_optimization.cpu_offload": '`zero_optimization.offload_optimizer`: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": '`zero_optimization.offload_param`: {"device": "cpu"}',
    "zero_optimization.cpu_offload_params": '`zero_optimization.offload_param`: {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "`pin_memory` of the offload section",
    "zero_optimization.reduce_bucket_size: 0": "removed: the default applies",
    "fp16.fp16": "`fp16.enabled`",
    "checkpoint_activations": "`activation_checkpointing`: {} if true, else removed",
    "fp32_allreduce": '`communication_data_type`: "fp32"',
    "amp": "`torch_autocast` in float16 for O1, `fp16` for O2 and O3",
    "optimizer.type: OneBitAdam, ZeroOneAdam, OneBitLamb": "Adam, Adam, Lamb, without gradient compression",
    "curriculum_learning": "`data_efficiency.data_sampling.curriculum_learning` with the metric `seqlen`",
    "monitor_config": "its members at the top level",
    "compression_training": "removed if none of its techniques is enabled",
}
"""Descriptions of what the functions in RULES do."""
