"""DeepSpeed constants that scripts import: config keys, and names of timers, files and environment variables.

The value of most is their name in lower case. Defaults are not included: `docs/config.md` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = """
BUFFER_DTYPE CHECKPOINT CHECK_OVERFLOW COMMUNICATION_DATA_TYPE DATALOADER_DROP_LAST DATA_PARALLEL_GROUP DATA_TYPES
DISABLE_ALLGATHER DISABLE_PYTHON_GC DUMP_STATE FP16 FP16_MASTER_WEIGHTS_AND_GRADS GLOBAL_RANK
GRADIENT_ACCUMULATION_STEPS GRADIENT_ALLREDUCE_OP GRADIENT_CLIPPING GRADIENT_PREDIVIDE_FACTOR GRAD_ACCUM_DTYPE
KEEP_IN_FP32_MODULES LEGACY_FUSION LOG_LEVEL MANAGED_GRADIENT_ACCUMULATION MAX_GRAD_NORM MEMORY_BREAKDOWN OPTIMIZER
PARAM_DTYPE PRESCALE_GRADIENTS SCHEDULER SEQ_PARALLEL_COMMUNICATION_DATA_TYPE STEPS_PER_PRINT TORCH_AUTOCAST
TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU TYPE VOCABULARY_SIZE WALL_CLOCK_BREAKDOWN
ZERO_ALLOW_UNTESTED_OPTIMIZER ZERO_FORCE_DS_CPU_OPTIMIZER
"""
_FILES = """
BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP BUFFER_NAMES CAT_DIM CLIP_GRAD DS_VERSION FP32_FLAT_GROUPS FP32_GROUPS
FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES GROUP_PADDINGS LOSS_SCALER OPTIMIZER_STATE_DICT ORIGINAL_VOCAB_SIZE
PADDED_VOCAB_SIZE PARAM PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_SUB_PARAMS PARAM_GROUPS PARAM_N_SUB_PARAMS PARAM_SHAPES
PARAM_SLICE_MAPPINGS PARTITION_COUNT PIPELINE_REPLICATED_PARAMETER_PATTERNS SINGLE_PARTITION_OF_FP32_GROUPS
SUB_PARAMS_SHAPE SUB_PARAM_SHAPE TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO
VOCABULARY_PARAMETER_PATTERNS VOCAB_TENSOR ZERO_STAGE
"""
_SCHEDULES = """
COS_MIN_RATIO CYCLE_FIRST_STAIR_COUNT CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR CYCLE_MAX_MOM CYCLE_MIN_LR CYCLE_MIN_MOM
CYCLE_SECOND_STAIR_COUNT CYCLE_SECOND_STEP_SIZE DECAY_LR_RATE DECAY_MOM_RATE DECAY_STEP_SIZE EDGE_VALUE
LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_SCHEDULE MID_VALUE
TOTAL_NUM_STEPS WARMUP_MAX_LR WARMUP_MIN_LR WARMUP_MIN_RATIO WARMUP_NUM_STEPS WARMUP_TYPE
"""
_DATA = """
CURRICULUM_LEARNING DATA_EFFICIENCY DATA_ROUTING DATA_SAMPLING DYNAMIC_BATCHING RANDOM_LTD RANDOM_LTD_LAYER_ID
RANDOM_LTD_LAYER_NUM
"""

NAMED: Mapping[str, str] = {
    "runtime.constants": _KEYS,
    "runtime.config": "ADAM_W_MODE EXPERT_PARALLEL",
    "checkpoint": " ".join(
        name for name in _FILES.split() if "PATTERNS" in name or "VOCAB_SIZE" in name or "CAT_DIM_0" in name
    )
    + " UNIVERSAL_CHECKPOINT_INFO",
    "checkpoint.constants": _FILES,
    "comm.constants": "COMMS_LOGGER",
    "profiling.constants": "FLOPS_PROFILER",
    "runtime.precision_config": "FP16",
    "runtime.lr_schedules": _SCHEDULES,
    "runtime.data_pipeline.constants": _DATA,
    "runtime.zero.config": "ZERO_OPTIMIZATION",
    "utils.config": "TIMERS",
}
"""Module -> constants whose value is their name in lower case."""

_VERSION = {
    "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version",
    "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
}

VALUES: Mapping[str, Mapping[str, Any]] = {
    "runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 1024 * 1024},
    "constants": {
        "CROSS_RANK": "CROSS_RANK",
        "CROSS_SIZE": "CROSS_SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
        "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
    },
    "runtime.constants": {
        "BFLOAT16": "bf16",
        "BFLOAT16_ENABLED": "enabled",
        "BFLOAT16_MASTER_WEIGHTS_AND_GRADS": "bf16_master_weights_and_grads",
        "BFLOAT16_OLD": "bfloat16",
        "BFLOAT16_OPTIMIZER_STATES": "bf16_optimizer_states",
        "CHECKPOINT_TAG_VALIDATION": "tag_validation",
        "CHECKPOINT_TAG_VALIDATION_MODES": ["WARN", "IGNORE", "FAIL"],
        "FP16_AUTO_CAST": "auto_cast",
        "FP16_CONSECUTIVE_HYSTERESIS": "consecutive_hysteresis",
        "FP16_ENABLED": "enabled",
        "FP16_HYSTERESIS": "hysteresis",
        "FP16_INITIAL_SCALE_POWER": "initial_scale_power",
        "FP16_LOSS_SCALE": "loss_scale",
        "FP16_LOSS_SCALE_WINDOW": "loss_scale_window",
        "FP16_MIN_LOSS_SCALE": "min_loss_scale",
        "GRADIENT_ALLREDUCE_OP_MEAN": "mean",
        "GRADIENT_ALLREDUCE_OP_SUM": "sum",
        "GRADIENT_ALLREDUCE_OP_SUPPORTED": ("mean", "sum"),
        "LOAD_UNIVERSAL_CHECKPOINT": "load_universal",
        "OPTIMIZER_PARAMS": "params",
        "PIPE_REPLICATED": "ds_pipe_replicated",
        "ROUTE_ENCODE": "encode",
        "ROUTE_EVAL": "eval",
        "ROUTE_PREDICT": "predict",
        "ROUTE_TRAIN": "train",
        "SCHEDULER_PARAMS": "params",
        "TORCH_AUTOCAST_DTYPE": "dtype",
        "TORCH_AUTOCAST_ENABLED": "enabled",
        "TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES": "lower_precision_safe_modules",
        "USE_NODE_LOCAL_STORAGE_CHECKPOINT": "use_node_local_storage",
    },
    "runtime.precision_config": {"BFLOAT16": "bf16", "BFLOAT16_OLD": "bfloat16"},
    "runtime.config": {
        **{
            f"{name.upper()}_OPTIMIZER": name
            for name in ("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "muon", "musgd")
        },
        "DEEPSPEED_OPTIMIZERS": [
            "adagrad",
            "adam",
            "adamw",
            "lamb",
            "muadam",
            "muadamw",
            "musgd",
            "lion",
            "muon",
        ],
        "TORCH_ADAM_PARAM": "torch_adam",
        "ADAM_W_MODE_DEFAULT": True,
    },
    "checkpoint": _VERSION,
    "checkpoint.constants": {
        "BF16_ZERO_FILE_PREFIX": "bf16_zero_pp_rank_",
        "FP16_ZERO_FILE_PREFIX": "fp16_zero_pp_rank_",
        "FP32_WEIGHT_KEY": "fp32",
        "LAYER_FILE_PREFIX": "layer_",
        "MODEL_FILE_PREFIX": "mp_rank_",
        "MODEL_FILE_SUFFIX": "_model_states.pt",
        "OPTIM_FILE_SUFFIX": "_optim_states.pt",
        "ZERO_FILE_PREFIX": "zero_pp_rank_",
        **_VERSION,
    },
    "checkpoint.deepspeed_checkpoint": {"ARGS_KEY": "args", "CHECKPOINT_INFO_KEY": "checkpoint_info"},
    "moe.sharded_moe": {
        "FIRST_ALLTOALL_TIMER": "1st_a2a",
        "MOE_TIMER": "moe",
        "SECOND_ALLTOALL_TIMER": "2nd_a2a",
        "TOPK_GATE_TIMER": "topk_gate",
    },
    "comm.constants": {
        f"{name}_BACKEND": name.lower() for name in ("CCL", "GLOO", "HCCL", "MPI", "NCCL", "SCCL")
    },
    "runtime.lr_schedules": {
        "LR_RANGE_TEST": "LRRangeTest",
        "ONE_CYCLE": "OneCycle",
        "WARMUP_COSINE_LR": "WarmupCosineLR",
        "WARMUP_DECAY_LR": "WarmupDecayLR",
        "WARMUP_LINEAR_RATE": "linear",
        "WARMUP_LOG_RATE": "log",
        "WARMUP_LR": "WarmupLR",
    },
    "runtime.data_pipeline.constants": {
        "CURRICULUM_LEARNING_ENABLED": "enabled",
        "DATA_EFFICIENCY_ENABLED": "enabled",
        "DATA_SAMPLING_ENABLED": "enabled",
        "DATA_SAMPLING_NUM_WORKERS": "num_workers",
        "RANDOM_LTD_ENABLED": "enabled",
        "RANDOM_LTD_GLOBAL_BATCH_SIZE": "global_batch_size",
        "RANDOM_LTD_LAYER_TOKEN_LR_ENABLED": "enabled",
        "RANDOM_LTD_LAYER_TOKEN_LR_SCHEDULE": "layer_token_lr_schedule",
        "RANDOM_LTD_MICRO_BATCH_SIZE": "micro_batch_size",
    },
    "runtime.pipe.engine": {
        "BATCH_INPUT_TIMER": "batch_input",
        "PIPE_RECV_GRAD_TIMER": "pipe_recv_grad",
        "PIPE_RECV_INPUT_TIMER": "pipe_recv_input",
        "PIPE_SEND_GRAD_TIMER": "pipe_send_grad",
        "PIPE_SEND_OUTPUT_TIMER": "pipe_send_output",
        "TRAIN_BATCH_TIMER": "train_batch",
    },
    "utils.config": {"TIMERS_THROUGHPUT": "throughput"},
    "utils.timer": {
        "BACKWARD_GLOBAL_TIMER": "bwd",
        "BACKWARD_INNER_GLOBAL_TIMER": "bwd_inner",
        "BACKWARD_INNER_MICRO_TIMER": "bwd_inner_microstep",
        "BACKWARD_MICRO_TIMER": "bwd_microstep",
        "BACKWARD_REDUCE_GLOBAL_TIMER": "bwd_allreduce",
        "BACKWARD_REDUCE_MICRO_TIMER": "bwd_allreduce_microstep",
        "FORWARD_GLOBAL_TIMER": "fwd",
        "FORWARD_MICRO_TIMER": "fwd_microstep",
        "STEP_GLOBAL_TIMER": "step",
        "STEP_MICRO_TIMER": "step_microstep",
        "TIME_EPSILON": 1e-6,
    },
    "launcher.constants": {
        f"{name}_LAUNCHER": name.lower() for name in ("IMPI", "MPICH", "MVAPICH", "OPENMPI", "PDSH", "SLURM")
    },
    "launcher.runner": {"DLTS_HOSTFILE": "/job/hostfile"},
}
"""Module -> the remaining constants and their values."""


def constants_of(module: str) -> dict[str, Any]:
    """Return all constants of a module by name."""
    return {**{name: name.lower() for name in NAMED.get(module, "").split()}, **VALUES.get(module, {})}
