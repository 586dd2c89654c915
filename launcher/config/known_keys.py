"""DeepSpeed keys that this launcher does not implement (data).

One key per line: `name | value that requests nothing | purpose | what to do instead`. The last two columns
are optional, and each enclosing section adds two spaces of indentation. `*` stands for any name. A section
whose `enabled` (or `device`) is off requests nothing, whatever its other keys are.
To implement a key, give it a field in its section and delete its line here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Status = Literal["later", "old", "ignored", "idle"]
"""Idle keys tune what DeepSpeed does in another way and do not change numerics: they are accepted."""

LATER = """
optimizer
  params
    per_head_muon | false | Muon: orthogonalize each attention head separately
scheduler
  params
    scale_fn | | CyclicLR: a function, which JSON cannot hold | use `mode`, or pass initialize(lr_scheduler=...)
tensor_parallel
  tp
    mpu | | a Python object, which JSON cannot hold | delete it; layers are split over neighbouring ranks
    tp_group | | a Python process group, which JSON cannot hold | delete it; layers are split over neighbouring ranks
data_parallel_size | | data-parallel degree used with sequence parallelism
use_data_before_expert_parallelism | false | rank order in expert groups
expert_parallel
  expert_tensor_parallel_size | 1 | tensor parallelism within an expert | delete it; each expert is whole on its rank
  load_balance_coeff | | coefficient of the balance loss; DeepSpeed rejects it | set the model's router_aux_loss_coef
  route_norm |  | normalization of the routing weights | delete it; it is set by the model's config
  route_scale | 1.0 | scale of the routing weights | delete it; it is set by the model's config
  score_apply | "auto" | where the routing weights are applied | delete it; it is set by the model's config
  expert_activation |  | activation function of the experts | delete it; it is set by the model's config
  num_expert_groups |  | number of expert groups | delete it; it is set by the model's config
  num_limited_groups |  | number of groups that a token may use | delete it; it is set by the model's config
  score_func | "auto" | scoring function of the router | delete it; it is set by the model's config
  top_k | "auto" | experts per token | delete it; it is set by the model's config
  routed_scaling_factor | "auto" | scale of the experts' output | delete it; it is set by the model's config
  has_shared_experts |  | whether there are shared experts | delete it; it is set by the model's config
datastates_ckpt | | a package for asynchronous checkpoints | write "checkpoint": {"writer": {"decoupled": true}}
  host_cache_size | | host memory for asynchronous checkpoints | write "checkpoint": {"writer": {"decoupled": true}}
compile
  offload_activation | false | DeepCompile: offload activations | write activation_checkpointing.cpu_checkpointing
  offload_opt_states | false | DeepCompile: offload optimizer state | shard it: zero_optimization.stage 1, 2 or 3
  offload_parameters | false | DeepCompile: offload parameters | shard them: zero_optimization.stage 3
hybrid_engine
  enabled | false | one engine for training and generation | call engine.module.generate() on all ranks
  max_out_tokens | | maximum number of generated tokens
  inference_tp_size | | tensor-parallel degree for generation
  release_inference_cache | | free the cache after generation
  pin_parameters | | page-lock the parameters
  tp_gather_partition_size | | size of the gather group
  enable_cuda_graph | | use CUDA graphs
weight_quantization
  enabled | | quantized weights | delete it; bf16 halves their size, and zero_optimization.stage 3 shards them
  num_bits | | number of bits
  q_type | | symmetric or asymmetric
  q_groups | | number of groups
  quantized_initialization | | options for quantizing while the model is built
  post_init_quant | | options per module name
data_efficiency
  data_sampling
    curriculum_learning
      curriculum_metrics
        * | | metrics other than seqlen need DeepSpeed's index files | use the metric `seqlen`
          index_to_sample_path | | index file
          index_to_metric_path | | index file
          difficulty_type | | type of difficulty
          clustering_type | | type of clustering
          min_difficulty | | initial difficulty
          max_difficulty | | final difficulty
          schedule_type | | schedule type
          schedule_config
            total_curriculum_step | | length of the schedule
            difficulty_step | | step granularity
            root_degree | | root degree
            difficulty | | difficulty levels
            max_step | | last step of each level
    dynamic_batching
      enabled | false | batches with equally many tokens, from DeepSpeed's precomputed file of lengths
      metrics_path | | file of sequence lengths
      lr_scaling_method | | scaling rule for the learning rate
      min_batch_size | | minimum batch size
      max_batch_size | | maximum batch size
      max_tokens | | tokens per batch
      sequence_picking_order | | order of the sequences
      verbose | | verbose output
  data_routing
    enabled | false | random-LTD: layers that drop tokens, which needs another forward for every block
    random_ltd
      enabled | false | layers drop tokens at random
      total_layer_num | | number of layers
      random_ltd_layer_num | | number of layers that drop tokens
      random_ltd_layer_id | | indices of these layers
      model_mask_name | | name of the mask
      model_type | | encoder or decoder
      hidden_state_order | | layout of the hidden state
      micro_batch_size | | set by DeepSpeed itself
      global_batch_size | | set by DeepSpeed itself
      random_ltd_schedule
        min_value | | initial number of tokens
        max_value | | final number of tokens
        schedule_type | | schedule type
        schedule_config
          require_steps | | length of the schedule
          seq_per_step | | step granularity
      layer_token_lr_schedule
        enabled | false | learning rate by tokens and layers
        total_layer_tokens | | length of the schedule
        warmup_type | | warm-up type
        warmup_layer_tokens | | length of the warm-up
autotuning
  enabled | false | search for fast settings | compare tokens_per_s in metrics.jsonl of short runs with each value
  fast | | tune only the micro batch size
  results_dir | | directory of results
  exps_dir | | directory of experiments
  overwrite | | repeat existing experiments
  start_profile_step | | first timed step
  end_profile_step | | last timed step
  metric | | metric to optimize
  metric_path | | file of the metric
  tuner_type | | search method
  tuner_early_stopping | | number of trials without improvement
  tuner_num_trials | | maximum number of trials
  arg_mappings | | keys -> flags of the script
  max_train_batch_size | | maximum batch size
  min_train_batch_size | | minimum batch size
  max_train_micro_batch_size_per_gpu | | maximum micro batch size
  min_train_micro_batch_size_per_gpu | | minimum micro batch size
  num_tuning_micro_batch_sizes | | number of micro batch sizes to try
  mp_size | | model-parallel degree
  model_info
    profile | | profile the model
    num_params | | number of parameters
    hidden_size | | hidden size
    num_layers | | number of layers
  model_info_path | | file with information on the model
"""

OLD = """
amp
  enabled | false | NVIDIA Apex | use "bf16": {"enabled": true} or "fp16": {"enabled": true}
  opt_level | | optimization level of Apex
zero_optimization
  zeropp_loco_param
    err_beta | | error feedback for quantized gradients, which DeepSpeed removed
    reset_T | | error feedback for quantized gradients, which DeepSpeed removed
nebula
  enabled | false | Azure's checkpoint service | write "checkpoint": {"writer": {"decoupled": true}}
  persistent_storage_path | | storage path
  persistent_time_interval | | seconds between two checkpoints
  num_of_version_in_retention | | number of checkpoints to keep
  enable_nebula_load | | load from the service
  nebula_load_path | | path to load from
curriculum_learning
  enabled | false | old form of data_efficiency.data_sampling.curriculum_learning
  curriculum_type | | type of curriculum
  min_difficulty | | initial difficulty
  max_difficulty | | final difficulty
  schedule_type | | schedule type
  schedule_config | | parameters of the schedule
progressive_layer_drop
  enabled | false | layers are dropped at random | delete it; every layer runs in every step, as in DeepSpeed today
  theta | | minimum share of layers
  gamma | | decay rate
quantize_training | false | quantization during training | delete it; quantize what save_16bit_model() exports
eigenvalue | false | eigenvalues of blocks, which only controlled quantize_training | delete it
graph_harvesting | false | CUDA graph of the bf16 step | write "compile": {"enabled": true} to launch fewer kernels
sparse_attention | | block-sparse attention | use a model with local attention (sliding_window of Mistral)
  mode | | sparsity layout
  block | | block size
  different_layout_per_head | | separate layout for each head
  num_local_blocks | | number of local blocks
  num_global_blocks | | number of global blocks
  attention | | unidirectional or bidirectional
  horizontal_global_attention | | global rows
  num_different_global_patterns | | number of global patterns
  num_random_blocks | | number of random blocks
  local_window_blocks | | sizes of the local windows
  global_block_indices | | indices of the global blocks
  global_block_end_indices | | end indices of the global blocks
  num_sliding_window_blocks | | number of sliding window blocks
compression_training | | compression library | delete it; prune or quantize what save_16bit_model() exports
  layer_reduction | | reduction of the number of layers
  weight_quantization
    shared_parameters | | options of weight quantization
    different_groups
      * | | a group of modules
  activation_quantization
    shared_parameters | | options of activation quantization
    different_groups
      * | | a group of modules
  sparse_pruning
    shared_parameters | | options of sparse pruning
    different_groups
      * | | a group of modules
  row_pruning
    shared_parameters | | options of row pruning
    different_groups
      * | | a group of modules
  head_pruning
    shared_parameters | | options of head pruning
    different_groups
      * | | a group of modules
  channel_pruning
    shared_parameters | | options of channel pruning
    different_groups
      * | | a group of modules
"""

IGNORED = """
tensor_parallel
  injection_policy_tuple | | layer names from a Python caller, which training detects itself | write `partition_config`
monitor_config | | from examples in old documentation | write `tensorboard`, `wandb` or `csv_monitor`
"""


IDLE = """
compile
  deepcompile | | engine.compile(), or "enabled": true, compiles each block; gathers of ZeRO overlap with or without it
  passes | | zero_optimization, sequence_parallel_size and tensor_parallel set what is sharded and split
  autoep_non_moe | | each block is compiled
  free_activation | | activations are freed during backward
  free_activation_threshold | | activations are freed during backward
  offload_activation_pin_memory | | it applies only with offload_activation
  double_buffer | | buffers of gathered parameters are always reused
  symmetric_memory | | collectives are those of the backend
  debug_log | | set the environment variable TORCH_LOGS=graph_code to print the graphs
  sync_before_reduce | | reductions wait for their inputs
  sync_after_reduce | | reductions wait for their inputs
  sync_before_allgather | | gathers wait for their inputs
  sync_after_allgather | | gathers wait for their inputs
  keep_int_input_tensors | | no inputs are kept
  keep_all_input_tensors | | no inputs are kept
expert_parallel
  validate_folding_routing | | validation of the routing
  async_split_plan | | asynchronous planning of the exchange
  preset_model | | preset for a known model
  moe_layer_pattern | | name pattern of the MoE layers
  expert_pattern | | name pattern of the experts
  router_pattern | | name pattern of the router
  use_grouped_mm | | grouped matrix multiplication
  disable_triton_grouped_mm | | disables the Triton kernel
  combine_impl | | kernel of the combine step
  row_weighting_impl | | kernel that weights rows
  gate_up_impl | | gate and up projections, separate or fused
  comm_backend | | communication library of the exchange
  comm_num_sm | | number of SMs for the exchange
  comm_qp_margin | | queue pairs for the exchange
  comm_max_tokens_per_rank | | maximum number of tokens per rank
  expert_w1 | | name of a weight
  expert_w2 | | name of a weight
  expert_w3 | | name of a weight
  num_experts_attr | | attribute name in the model's config
  top_k_attr | | attribute name in the model's config
  shared_experts_pattern | | name pattern of the shared experts
  shared_experts_gate_pattern | | name pattern of their gate
"""


@dataclass
class Known:
    """One known key: a leaf with a description, or a section with children.

    Attributes:
        neutral: values that request nothing, in addition to null.
        free: an object whose members are not listed.
    """

    words: str = ""
    fix: str | None = None
    status: Status = "later"
    neutral: tuple[Any, ...] = ()
    free: bool = True
    children: dict[str, Known] = field(default_factory=dict)

    def child(self, key: str) -> Known | None:
        return self.children.get(key) or self.children.get("*")

    @property
    def switch(self) -> str | None:
        """Return the member that turns a section on."""
        return next((name for name in ("enabled", "device") if name in self.children), None)


@cache
def known_keys() -> Known:
    """Return the keys of all tables in this file as one tree."""
    root = Known(free=False)
    tables: tuple[tuple[Status, str], ...] = (
        ("later", LATER),
        ("old", OLD),
        ("ignored", IGNORED),
        ("idle", IDLE),
    )
    for status, table in tables:
        _grow(root, status, table)
    return root


def _grow(root: Known, status: Status, table: str) -> None:
    stack = [root]
    for line in table.strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        del stack[depth + 1 :]
        name, *columns = (column.strip() for column in line.split("|"))
        parent = stack[depth]
        parent.free = False
        known = parent.children.setdefault(name, Known(status=status))
        if columns:
            neutral, words, *fix = columns
            known.neutral, known.words = tuple(json.loads(f"[{neutral}]")), words
            known.fix = fix[0] if fix else None
        stack.append(known)
