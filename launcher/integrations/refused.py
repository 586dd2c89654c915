"""DeepSpeed names that are not available: the reasons, the alternatives, and the errors that report them.

One table serves people (docs/deepspeed_api.md is written from it) and scripts (error messages quote it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import LauncherError

PACKAGE = "deepspeed"
ELSEWHERE = "with DeepSpeed installed, `launch --no_deepspeed_shim ...` runs the script on DeepSpeed itself"


class NotHere(LauncherError, AttributeError):
    """A DeepSpeed name that is not available."""


class NoSuchModule(LauncherError, ModuleNotFoundError):
    """A DeepSpeed module that is not available."""


@dataclass(frozen=True)
class Refusal:
    """The reason why something is not available.

    Args:
        why: one sentence, without the period.
        instead: what to use instead; "" if only DeepSpeed itself provides it.
    """

    why: str
    instead: str = ""


INSIDE = Refusal(
    "it is internal to DeepSpeed's engine, and launcher's engine has no such part",
    "use the methods of the engine that docs/deepspeed_api.md lists",
)
PARTS = Refusal(
    "it is internal to DeepSpeed's ZeRO, whose shards lie otherwise than launcher's",
    "read and change values through deepspeed.zero.GatheredParameters and deepspeed.utils.safe_get_full_fp32_param "
    "and its kin",
)
EXPERTS = Refusal(
    "it is internal to DeepSpeed's layers of experts",
    'use deepspeed.moe.layer.MoE, or a Hugging Face model with "expert_parallel": {"size": N} in the JSON',
)
SEQUENCES = Refusal(
    "this way of sharing sequences over ranks is not available",
    "use sequence_parallel_size in the JSON, UlyssesSPAttentionHF, or DistributedAttention",
)
INFERENCE = Refusal(
    "inference kernels are not available: launcher trains",
    "generate with the model itself: transformers' generate() works under every stage",
)
COMPRESSION = Refusal("compression and quantization of a model are not available", "train the model as it is")
KERNELS = Refusal(
    "its own GPU kernels are not available", "use torch's operators, or the model of transformers"
)
BUILDERS = Refusal(
    "DeepSpeed's C++ and CUDA operators are not built here",
    "nothing has to be built: optimizers and offload work without",
)
DEVICES = Refusal(
    "only CUDA devices and CPUs are supported", "use get_accelerator(), which is the device of this rank"
)
TUNING = Refusal(
    "the autotuner is not available",
    "`launch plan` says which settings fit the memory, before a run",
)
PASSES = Refusal(
    "the compiler passes of DeepCompile are not available",
    "engine.compile() compiles the blocks of the model with torch.compile",
)
CONVERSION = Refusal(
    "its functions for files of checkpoints are not available",
    "engine.load_checkpoint() loads launcher's and DeepSpeed's checkpoints on any number of ranks and at any stage, "
    "without a conversion",
)
KEYS = Refusal(
    "names of keys are not kept as constants here",
    "write the key as a string, as docs/config.md lists it",
)
SECTIONS = Refusal(
    "it belongs to DeepSpeed's way of reading the JSON",
    "read sections from deepspeed.DeepSpeedConfig(...) or engine.config",
)
PIPES = Refusal(
    "it is internal to DeepSpeed's pipeline engine, and launcher's stages run by a schedule of their own",
    "choose the schedule in the JSON: pipeline.schedule",
)
WRITERS = Refusal(
    "DeepSpeed's writers of files are not available",
    "engine.save_checkpoint() writes in the background as the JSON says",
)
RUNNERS = Refusal("machines are not started from Python here", "write `launch --hostfile ...`")
SAMPLING = Refusal(
    "it is internal to DeepSpeed's data pipeline",
    "the section data_efficiency of the JSON does what docs/config.md lists",
)
SPARSE = Refusal("gradients of embeddings are dense here", "leave out sparse=True of nn.Embedding")
SCALES = Refusal(
    "the engine scales losses by itself", "read engine.loss_scale(), and set the section fp16 of the JSON"
)
OPTIMIZERS = Refusal(
    "the optimizer is not available",
    "use one of those that docs/config.md lists under optimizer.type, or pass initialize(optimizer=...)",
)

ENGINE: Mapping[Refusal, str] = {
    TUNING: "autotuning_enabled autotuning_metric autotuning_profile_model_info autotuning_model_info",
    EXPERTS: "expert_parallel_group expert_data_parallel_group moe_layers load_moe_state_dict gate_modules",
    PASSES: "register_compile_pass is_deepcompile_enabled is_deepcompile_active get_deepcompile_backend "
    "compile_autosp compile_autotp get_compile_time",
    SPARSE: "sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain sparse_all_gather",
    CONVERSION: "save_zero_checkpoint save_non_zero_checkpoint checkpoint_engine",
    SAMPLING: "random_ltd_enabled random_ltd_config random_ltd_scheduler set_custom_curriculum_learning_schedule "
    "set_data_post_process_func",
    SCALES: "dynamic_loss_scale_args",
    Refusal(
        "gradients are reduced while backward goes on", "call backward() and step(); no_sync() puts it off"
    ): "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback coalesce_grad_reduction",
    Refusal(
        "its timers have other names",
        "get_wall_clock_timers(), or wall_clock_breakdown and timers in the JSON",
    ): "engine_timers engine_timers_cache print_forward_breakdown fwd_duration",
    Refusal(
        "the engine keeps no copy of what initialize() was given", "keep it yourself"
    ): "client_optimizer client_lr_scheduler basic_optimizer collate_fn training_data",
}
"""Reason -> methods and attributes of DeepSpeed's engine."""

REFUSED: Mapping[str, Refusal] = {
    "accelerator": DEVICES,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator": Refusal(
        "it has no meaning for the CUDA devices and CPUs of launcher", "call torch itself"
    ),
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.build_extension": BUILDERS,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.create_op_builder": BUILDERS,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.get_op_builder": BUILDERS,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.op_builder_dir": BUILDERS,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.set_compile_backend": Refusal(
        "a backend for all compilations cannot be set", "name it in the call: engine.compile(backend=...)"
    ),
    "accelerator.real_accelerator": DEVICES,
    "autotuning": TUNING,
    "checkpoint": CONVERSION,
    "comm": Refusal(
        "it is internal to DeepSpeed's communication",
        "deepspeed.comm has every function of torch.distributed",
    ),
    "comm.ccl": DEVICES,
    "comm.mori": DEVICES,
    "comm.config": SECTIONS,
    "comm.constants": KEYS,
    "compat": INSIDE,
    "compile": PASSES,
    "compression": COMPRESSION,
    "constants": KEYS,
    "datastates": WRITERS,
    "elasticity": Refusal("the elastic agent is not available", "write `launch --max_restarts N ...`"),
    "env_report": Refusal("the report of operators is not available", "write `launch check`"),
    "git_version_info": INSIDE,
    "inference": INFERENCE,
    "io": WRITERS,
    "launcher": RUNNERS,
    "linear": Refusal("layers with their own low-rank adapters are not available", "use PEFT's LoRA"),
    "model_implementations": INFERENCE,
    "module_inject": Refusal(
        "layers are not replaced by hand here",
        "tensor_parallel in the JSON splits the layers; partition_config names layers of your own",
    ),
    "module_inject.auto_ep": EXPERTS,
    "module_inject.containers": INFERENCE,
    "moe": EXPERTS,
    "monitor": Refusal(
        "it is internal to DeepSpeed's writers of metrics",
        "use deepspeed.monitor.monitor.MonitorMaster, or tensorboard, csv_monitor, wandb and comet of the JSON",
    ),
    "nvme": Refusal("the tools that measure NVMe are not available", "write `launch bench io`"),
    "ops": KERNELS,
    "ops.adam": OPTIMIZERS,
    "ops.fp_quantizer": COMPRESSION,
    "ops.lion": OPTIMIZERS,
    "ops.lamb": OPTIMIZERS,
    "ops.op_builder": BUILDERS,
    "ops.compile": BUILDERS,
    "ops.gds": BUILDERS,
    "ops.pin_memory": BUILDERS,
    "ops.quantizer": COMPRESSION,
    "ops.random_ltd": SAMPLING,
    "parameter": PARTS,
    "pipe": PIPES,
    "profiling": KEYS,
    "profiling.config": SECTIONS,
    "profiling.flops_profiler": Refusal(
        "it is internal to DeepSpeed's profiler", "use get_model_profile() or FlopsProfiler"
    ),
    "replace_transformer_layer": INFERENCE,
    "runtime": INSIDE,
    "runtime.activation_checkpointing": Refusal(
        "it is internal to DeepSpeed's checkpoint function",
        "use deepspeed.checkpointing.checkpoint(), configure() and reset()",
    ),
    "runtime.activation_checkpointing.config": SECTIONS,
    "runtime.base_optimizer": PARTS,
    "runtime.bf16_optimizer": PARTS,
    "runtime.checkpoint_engine": WRITERS,
    "runtime.chunked_cross_entropy": Refusal(
        "its loss in chunks is not a function here",
        "the engine computes the loss of causal LMs in tiles by itself",
    ),
    "runtime.config": KEYS,
    "runtime.config.DeepSpeedConfig": Refusal(
        "the key is not kept here", "see docs/config.md for those that are"
    ),
    "runtime.config_utils": SECTIONS,
    "runtime.constants": KEYS,
    "runtime.data_pipeline": SAMPLING,
    "runtime.domino": Refusal("Domino is not available", "tensor_parallel overlaps its sends by itself"),
    "runtime.fp16": PARTS,
    "runtime.fp16.onebit": OPTIMIZERS,
    "runtime.fp16.loss_scaler": SCALES,
    "runtime.engine.DeepSpeedEngine": Refusal(
        "neither launcher's engine nor its model has that name",
        "use the methods that docs/deepspeed_api.md lists",
    ),
    **{
        f"runtime.engine.DeepSpeedEngine.{name}": refusal
        for refusal, names in ENGINE.items()
        for name in names.split()
    },
    "runtime.pipe.engine.PipelineEngine": Refusal(
        "neither launcher's engine nor its model has that name",
        "use the methods that docs/deepspeed_api.md lists",
    ),
    "runtime.pipe.module.PipelineModule": PIPES,
    "runtime.hybrid_engine": INFERENCE,
    "runtime.hybrid_engine_graph": INFERENCE,
    "runtime.lr_schedules": Refusal(
        "schedules are not built from command-line arguments here", "write the section scheduler of the JSON"
    ),
    "runtime.pipe": PIPES,
    "runtime.precision_config": SECTIONS,
    "runtime.rollout": INFERENCE,
    "runtime.sequence_parallel": SEQUENCES,
    "runtime.sparse_tensor": SPARSE,
    "runtime.state_dict_factory": CONVERSION,
    "runtime.superoffload": Refusal(
        "SuperOffload is not available", "offload_optimizer with device cpu steps on the host"
    ),
    "runtime.tensor_parallel": Refusal(
        "tensor parallelism has no objects of its own here", "write tensor_parallel.autotp_size in the JSON"
    ),
    "runtime.torch_autocast": INSIDE,
    "runtime.utils": INSIDE,
    "runtime.weight_quantizer": COMPRESSION,
    "runtime.zenflow": Refusal("ZenFlow is not available", "use offload_optimizer as it is"),
    "runtime.zero": PARTS,
    "runtime.zero.muon": Refusal(
        "Muon is not a class here", 'write {"optimizer": {"type": "Muon"}} in the JSON'
    ),
    "runtime.zero.config": SECTIONS,
    "runtime.zero.offload_config": SECTIONS,
    "runtime.zero.leaf_module_config": SECTIONS,
    "sequence": SEQUENCES,
    "utils": INSIDE,
    "utils.groups._create_expert_data_and_model_parallel": EXPERTS,
    "utils.groups.expert_tensor_parallel_world_size": EXPERTS,
    "utils.comms_logging": Refusal("it is internal to DeepSpeed's log", "deepspeed.comm.log_summary()"),
    "utils.config": SECTIONS,
    "utils.debug": Refusal(
        "helpers for DeepSpeed's own debugging are not available", "print the names of the model"
    ),
    "utils.numa": RUNNERS,
    "utils.tensor_fragment": PARTS,
    "utils.mixed_precision_linkage": PARTS,
    "utils.static_cache": INFERENCE,
    "utils.zero_to_fp32": CONVERSION,
    "utils.zero_to_torch": CONVERSION,
    # top-level names
    "DeepSpeedHybridEngine": INFERENCE,
    "DeepSpeedInferenceConfig": INFERENCE,
    "DeepSpeedTransformerConfig": KERNELS,
    "DeepSpeedTransformerLayer": KERNELS,
    "DualPipeVEngine": PIPES,
    "DualPipeVModule": PIPES,
    **dict.fromkeys(
        ("KV", "MLA_KV", "MLA_Q", "NOT_HEAD_BLOCKED", "QUERY", "resolve_per_head_muon_after_sharding"),
        Refusal("roles of a projection's heads are not named here", "tensor_parallel finds them by itself"),
    ),
    **dict.fromkeys(
        ("merge_tp_model_init_into_config", "record_tp_model_init_args", "set_autotp_mode"),
        Refusal("tensor parallelism is configured only in the JSON", "write tensor_parallel.autotp_size"),
    ),
    "default_inference_config": INFERENCE,
}
"""Dotted name below `deepspeed`, or a dotted prefix -> why it is not available. The longest match is used."""

_ALL = Refusal("launcher's engine has no such name")


def refusal_of(name: str) -> Refusal:
    """Return why a name below `deepspeed` is not available."""
    parts = name.split(".")
    for number in range(len(parts), 0, -1):
        if (found := REFUSED.get(".".join(parts[:number]))) is not None:
            return found
    return _ALL


def missing(name: str, shown: str = "") -> tuple[str, dict[str, str]]:
    """Return the message and the keyword arguments of the error about a name below `deepspeed`.

    Args:
        shown: the name as the script wrote it, if different.
    """
    refusal = refusal_of(name)
    fix = f"{refusal.instead}; {ELSEWHERE}" if refusal.instead else ELSEWHERE
    return f"{shown or f'{PACKAGE}.{name}'} is not available: {refusal.why}", {"fix": fix}
