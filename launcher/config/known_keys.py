"""DeepSpeed keys that exist but that this launcher does not implement (data).

One key a line: `name | value that asks for nothing | what it is for | what to do instead`, the last two
columns optional, two blanks of indentation for each section around it. `*` stands for any name, `[]` for
the items of a list. A section whose `enabled` (or `device`) is off asks for nothing, whatever else it says.
To implement a key, give it a field in its section and delete its line here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Status = Literal["later", "old", "ignored"]

LATER = """
managed_gradient_accumulation | true | the caller decides when an optimizer step is due
memory_breakdown | false | prints memory at each phase
dump_state | false | prints the state of the engine once
log_level | | level of the logger
disable_python_gc | false | Python's cyclic garbage collector off while training
optimizer
  params
    set_grad_none | true | fused Adam: how gradients are cleared
    fp32_optimizer_states | true | CPU Adam: moments in another dtype than float32
    muon_lr | | Muon: learning rate of matrices
    adam_lr | | Muon: learning rate of everything else
    ns_method | | Muon: variant of the orthogonalisation
    max_coeff | | Lamb: upper bound of the trust ratio
    min_coeff | | Lamb: lower bound of the trust ratio
    eps_inside_sqrt | | Lamb: where eps is added
scheduler
  params
    lr_range_test_min_lr | | LRRangeTest: first rate
    lr_range_test_step_size | | LRRangeTest: steps between two rates
    lr_range_test_step_rate | | LRRangeTest: growth of the rate
    lr_range_test_staircase | | LRRangeTest: in stairs
    cycle_min_lr | | OneCycle: lowest rate
    cycle_max_lr | | OneCycle: highest rate
    decay_lr_rate | | OneCycle: decay after the cycle
    cycle_first_step_size | | OneCycle: steps up
    cycle_second_step_size | | OneCycle: steps down
    cycle_first_stair_count | | OneCycle: stairs on the way up
    cycle_second_stair_count | | OneCycle: stairs on the way down
    decay_step_size | | OneCycle: steps between two decays
    cycle_momentum | | OneCycle: momentum moves as well
    cycle_min_mom | | OneCycle: lowest momentum
    cycle_max_mom | | OneCycle: highest momentum
    decay_mom_rate | | OneCycle: decay of momentum
seq_parallel_communication_data_type | "fp32" | dtype of the reduction over a sequence-parallel group
prescale_gradients | false | divides gradients before they are reduced
gradient_predivide_factor | 1.0 | which part of the division comes before the reduction
data_types
  param_dtype | | dtype of the parameters, beside fp16 and bf16
  buffer_dtype | | dtype that buffers of the model are cast to
  keep_in_fp32_modules | "auto" | modules that stay in float32
fp16
  fp16_master_weights_and_grads | false | master weights in float16
bf16
  immediate_grad_update | false | gradients are added to the float32 buffer as they come
  bf16_master_weights_and_grads | false | master weights in bfloat16
  bf16_optimizer_states | false | moments in bfloat16
torch_autocast
  enabled | false | torch's autocast instead of a cast model
  dtype | | dtype of autocast
  lower_precision_safe_modules | | module classes that autocast covers
zero_optimization
  offload_param
    device | "none" | parameters rest in host memory or on NVMe
    nvme_path | | directory on the NVMe
    buffer_count | | buffers that swap
    buffer_size | | elements of one buffer
    max_in_cpu | | elements kept in host memory
    pin_memory | | page-locked host memory
  offload_optimizer
    device | "none" | optimizer state rests in host memory or on NVMe
    nvme_path | | directory on the NVMe
    buffer_count | | buffers that swap
    pin_memory | | page-locked host memory
    pipeline_read | | the next tile is read meanwhile
    pipeline_write | | the last tile is written meanwhile
    fast_init | | quicker start with NVMe
    ratio | | share of the update that runs on the CPU
    super_offload | | the engine for CPU and GPU on one chip
    cpuadam_cores_perc | | CPU cores for that engine
  cpu_offload | false | old name of offload_optimizer
  cpu_offload_param | false | old name of offload_param
  zenflow | | offload without stalls
    topk_ratio | | share of gradient columns updated at once
    select_strategy | | when these are chosen again
    select_interval | | how often these are chosen again
    update_interval | | how often the others are updated
    overlap_step | | the CPU step runs meanwhile
    offload | | offloads the chosen states
    auto_ratio | | threshold of the automatic choice
    full_warm_up_rounds | | rounds with whole updates at first
    pt_reserved_cores_perc | | CPU cores left to torch
    steps_per_epoch | | written by the run itself
tensor_parallel
  autotp_size | 0, 1 | degree of tensor parallelism
  dtype | | dtype of the sharded layers
  tp_overlap_comm | false | row-parallel reductions overlap
  tensor_parallel
    tp_size | 1 | degree of tensor parallelism, other place
    tp_grain_size | 1 | shards are multiples of this
    mpu | | model-parallel unit of a Python caller
    tp_group | | process group of a Python caller
  tp
    tp_size | 1 | degree of tensor parallelism, other place
    tp_grain_size | 1 | shards are multiples of this
    mpu | | model-parallel unit of a Python caller
    tp_group | | process group of a Python caller
  partition_config
    use_default_specs | | own rules are added to the preset
    strict_mode | | parameters without a rule are errors
    tp_size | | follows autotp_size
    embedding_partition_dim | | dim along which embeddings are split
    lm_head_patterns | | names of output heads
    layer_specs
      []
        patterns | | names of parameters
        partition_type | | column, row or skip
        shape | | view of packed weights
        partition_dim | | dim that is split
        model_types | | models that the rule is for
        gather_output | | the output is whole on each rank
        grad_allreduce | | gradients are summed over the ranks
  preset_model | | rules of a known model
  vocab_parallel_lm_head | | the output head is split over the vocabulary
  vocab_parallel_ce_backend | "torch" | kernel of the loss on split logits
  injection_policy_tuple | | for Python callers
  keep_module_on_host | false | loaded weights stay in host memory
  replace_with_kernel_inject | false | kernels for inference
  kernel_inject | false | kernels for inference
sequence_parallel_size | 1 | degree of sequence parallelism
data_parallel_size | | data-parallel degree beside sequence parallelism
pipeline
  stages | "auto" | number of pipeline stages
  partition | "best" | how layers are dealt out
  seed_layers | false | each layer is seeded
  activation_checkpoint_interval | 0 | layers between two checkpoints
  pipe_partitioned | true | activations between stages are split
  grad_partitioned | true | gradients between stages are split
  use_reentrant | true | flavour of checkpointing
use_data_before_expert_parallelism | false | order of ranks in expert groups
expert_parallel
  enabled | false | experts are spread over ranks
  autoep_size | | degree of expert parallelism
  expert_tensor_parallel_size | | tensor parallelism inside an expert
  validate_folding_routing | | checks the routing
  async_split_plan | | plans the exchange meanwhile
  preset_model | | rules of a known model
  moe_layer_pattern | | names of expert blocks
  expert_pattern | | name of the experts
  router_pattern | | name of the router
  use_grouped_mm | | grouped matrix products
  disable_triton_grouped_mm | | without the triton kernel
  route_norm | | routing weights are normalised
  route_scale | | factor of routing weights
  score_apply | | where the score multiplies
  combine_impl | | kernel that combines
  row_weighting_impl | | kernel that weighs rows
  gate_up_impl | | gate and up projection, apart or fused
  comm_backend | | library of the exchange
  comm_num_sm | | multiprocessors of the exchange
  comm_qp_margin | | queue pairs of the exchange
  comm_max_tokens_per_rank | | most tokens of a rank
  expert_activation | | activation function of experts
  num_expert_groups | | groups of experts
  num_limited_groups | | groups that a token may use
  score_func | | function of the router
  top_k | | experts of a token
  load_balance_coeff | | factor of the balance loss
  routed_scaling_factor | | factor of the output
  expert_w1 | | name of a weight
  expert_w2 | | name of a weight
  expert_w3 | | name of a weight
  num_experts_attr | | name in the model's config
  top_k_attr | | name in the model's config
  has_shared_experts | | there are shared experts
  shared_experts_pattern | | name of the shared experts
  shared_experts_gate_pattern | | name of their gate
activation_checkpointing
  partition_activations | false | saved activations are split over tensor-parallel ranks
  contiguous_memory_optimization | false | saved activations share one buffer
  synchronize_checkpoint_boundary | false | the device is waited for at each checkpoint
  profile | false | times each checkpoint
checkpoint
  tag_validation | "Warn" | what happens when ranks name different tags
  load_universal | false | DeepSpeed's universal layout; every checkpoint here loads on any topology
  use_node_local_storage | false | each node has its own directory
  parallel_write
    pipeline_stage | false | layers of a pipeline stage are written by several ranks
  checkpoint_serialization | true | torch's zip format
  writer
    type | | kind of writer
    io_buffer_size | | bytes of its buffer
    io_buffer_double | | two buffers
    io_multiplier | | files of a writer
    show_statistics | | prints figures
    data_parallel | | ranks that write
    decoupled | | writes in another process
datastates_ckpt
  host_cache_size | | host memory of that engine
tensorboard
  enabled | false | TensorBoard files
  output_path | | directory
  job_name | | subdirectory
wandb
  enabled | false | Weights & Biases
  group | | group of the run
  team | | team of the run
  project | | project of the run
csv_monitor
  enabled | false | one CSV file a metric
  output_path | | directory
  job_name | | subdirectory
comet
  enabled | false | Comet
  samples_log_interval | | samples between two entries
  project | | project of the run
  workspace | | workspace
  api_key | | key of the account
  experiment_name | | name of the run
  experiment_key | | key of the run
  online | | online or not
  mode | | new or existing run
flops_profiler
  enabled | false | report of floating-point operations
  recompute_fwd_factor | | share of recomputed forward
  profile_step | | step that is measured
  module_depth | | depth of the report
  top_modules | | modules a depth
  detailed | | every module
  output_file | | file of the report
comms_logger
  enabled | false | log of collectives
  verbose | | prints each
  prof_all | | all operations
  debug | | names the caller
  prof_ops | | chosen operations
timers
  throughput
    enabled | true | samples per second
    synchronized | true | waits for the device
aio | | file requests of NVMe offload
  block_size | | bytes of a request
  queue_depth | | requests at a time
  intra_op_parallelism | | threads of a request
  single_submit | | requests are handed over one by one
  overlap_events | | does not wait for earlier requests
  use_gds | | straight from the GPU to storage
compile
  deepcompile | false | DeepSpeed's compiler passes
  autoep_non_moe | false | compiles what is not experts
  free_activation | false | large activations are freed early
  free_activation_threshold | | bytes of a large activation
  offload_activation | false | saved activations wait in host memory
  offload_activation_pin_memory | true | page-locked
  offload_opt_states | false | moves optimizer state during forward and backward
  offload_parameters | false | moves parameters
  double_buffer | true | two buffers
  symmetric_memory | false | symmetric memory
  debug_log | false | writes the graphs
  sync_before_reduce | false | waits
  sync_after_reduce | false | waits
  sync_before_allgather | false | waits
  sync_after_allgather | false | waits
  keep_int_input_tensors | true | keeps whole-number inputs
  keep_all_input_tensors | false | keeps all inputs
  passes | | list of passes
hybrid_engine
  enabled | false | one engine that trains and generates
  max_out_tokens | | tokens to generate
  inference_tp_size | | tensor parallelism in generation
  release_inference_cache | | frees the cache
  pin_parameters | | page-locked parameters
  tp_gather_partition_size | | group that gathers
  enable_cuda_graph | | CUDA graphs
weight_quantization
  enabled | | weights are stored quantised from the start
  num_bits | | bits
  q_type | | symmetric or not
  q_groups | | groups
  quantized_initialization | | options while the model is built
  post_init_quant | | options by module name
data_efficiency
  enabled | false | data sampling and routing
  seed | | seed
  data_sampling
    enabled | false | the sampler
    num_epochs | | passes over the data
    num_workers | | workers of the loader
    pin_memory | | page-locked batches
    curriculum_learning
      enabled | false | easy samples first
      data_cluster_path | | working directory
      curriculum_metrics
        *
          index_to_sample_path | | index file
          index_to_metric_path | | index file
          difficulty_type | | scale
          clustering_type | | grouping
          min_difficulty | | start
          max_difficulty | | end
          schedule_type | | pace
          schedule_config
            total_curriculum_step | | length
            difficulty_step | | grain
            root_degree | | power
            difficulty | | levels
            max_step | | steps of the levels
    dynamic_batching
      enabled | false | batches of equal tokens
      metrics_path | | file of lengths
      lr_scaling_method | | rule for the learning rate
      min_batch_size | | fewest
      max_batch_size | | most
      max_tokens | | tokens of a batch
      sequence_picking_order | | order
      verbose | | prints
  data_routing
    enabled | false | routing of tokens
    random_ltd
      enabled | false | layers drop tokens at random
      total_layer_num | | layers
      random_ltd_layer_num | | layers that drop
      random_ltd_layer_id | | which layers
      model_mask_name | | name of the mask
      model_type | | encoder or decoder
      hidden_state_order | | layout
      micro_batch_size | | written by the run itself
      global_batch_size | | written by the run itself
      random_ltd_schedule
        min_value | | tokens at first
        max_value | | tokens at last
        schedule_type | | pace
        schedule_config
          require_steps | | length
          seq_per_step | | grain
      layer_token_lr_schedule
        enabled | false | learning rate by tokens and layers
        total_layer_tokens | | length
        warmup_type | | warm-up
        warmup_layer_tokens | | length of the warm-up
autotuning
  enabled | false | search for fast settings
  fast | | only micro batch sizes
  results_dir | | directory of results
  exps_dir | | directory of experiments
  overwrite | | repeats what exists
  start_profile_step | | first step that is timed
  end_profile_step | | last step that is timed
  metric | | what is best
  metric_path | | file of the measure
  tuner_type | | kind of search
  tuner_early_stopping | | trials without gain
  tuner_num_trials | | most trials
  arg_mappings | | keys -> flags of the script
  max_train_batch_size | | largest batch
  min_train_batch_size | | smallest batch
  max_train_micro_batch_size_per_gpu | | largest micro batch
  min_train_micro_batch_size_per_gpu | | smallest micro batch
  num_tuning_micro_batch_sizes | | sizes to try
  mp_size | | model-parallel degree
  model_info
    profile | | measures the model
    num_params | | parameters
    hidden_size | | width
    num_layers | | depth
  model_info_path | | file of the model's facts
"""

OLD = """
vocabulary_size | | only warned about odd sizes
optimizer
  legacy_fusion | false | an old wrapper of float16
  params
    max_grad_norm | | no keyword of an optimizer | write `gradient_clipping` at the top
    freeze_step | | 1-bit optimizers
    cuda_aware | | 1-bit optimizers
    comm_backend_name | | 1-bit optimizers
    var_freeze_step | | 0/1 Adam
    var_update_scaler | | 0/1 Adam
    local_step_scaler | | 0/1 Adam
    local_step_clipper | | 0/1 Adam
    coeff_beta | | 1-bit Lamb
    factor_max | | 1-bit Lamb
    factor_min | | 1-bit Lamb
    factor_threshold | | 1-bit Lamb
disable_allgather | false | had no effect
sparse_gradients | false | sparse reduction of embeddings
fp32_allreduce | false | gradients are reduced in float32 | write "communication_data_type": "fp32"
allgather_size | | elements of one all-gather | write zero_optimization.allgather_bucket_size
fp16
  opt_level | | an option of Apex
  fp16_backend | | an option of an old trainer
bf16
  loss_scale | | bfloat16 needs no loss scale, only fp16 has one
  initial_scale_power | | bfloat16 needs no loss scale, only fp16 has one
  loss_scale_window | | bfloat16 needs no loss scale, only fp16 has one
  hysteresis | | bfloat16 needs no loss scale, only fp16 has one
  min_loss_scale | | bfloat16 needs no loss scale, only fp16 has one
amp
  enabled | false | NVIDIA Apex | use "bf16": {"enabled": true} or "fp16": {"enabled": true}
  opt_level | | level of Apex
zero_optimization
  offload_optimizer
    buffer_size | | belongs to offload_param
  cpu_offload_params | false | offload of parameters | write "offload_param": {"device": "cpu"}
  cpu_offload_use_pin_memory | false | page-locked memory | write `pin_memory` in offload_optimizer
  legacy_stage1 | false | the first code of stage 1, which DeepSpeed itself refuses
  zeropp_loco_param
    err_beta | | error feedback of quantised gradients, which DeepSpeed took back
    reset_T | | error feedback of quantised gradients, which DeepSpeed took back
  grad_hooks | true | never was a key of the code
nebula
  enabled | false | the checkpoint service of Azure
  persistent_storage_path | | path
  persistent_time_interval | | seconds between two checkpoints
  num_of_version_in_retention | | versions kept
  enable_nebula_load | | loads through it
  nebula_load_path | | path
curriculum_learning
  enabled | false | old form of data_efficiency.data_sampling.curriculum_learning
  curriculum_type | | kind
  min_difficulty | | start
  max_difficulty | | end
  schedule_type | | pace
  schedule_config | | options of the pace
progressive_layer_drop
  enabled | false | layers are dropped at random
  theta | | least share of layers
  gamma | | pace
elasticity
  enabled | false | batch sizes for many world sizes
  max_train_batch_size | | largest batch
  micro_batch_sizes | | allowed micro batches
  min_gpus | | fewest GPUs
  max_gpus | | most GPUs
  min_time | | minutes between changes
  prefer_larger_batch | | near the largest
  ignore_non_elastic_batch_info | | other batch keys may stand
  version | | version of the rule
  num_gpus_per_node | | GPUs of a node
  model_parallel_size | | model-parallel degree
quantize_training | | weights get fewer bits while training
eigenvalue | | eigenvalues of blocks
graph_harvesting | false | CUDA graph of the bf16 step
sparse_attention | | attention on blocks
  mode | | family of layouts
  block | | size of a block
  different_layout_per_head | | a layout for each head
  num_local_blocks | | local blocks
  num_global_blocks | | global blocks
  attention | | direction
  horizontal_global_attention | | global rows
  num_different_global_patterns | | patterns
  num_random_blocks | | random blocks
  local_window_blocks | | windows
  global_block_indices | | global blocks
  global_block_end_indices | | ends of global blocks
  num_sliding_window_blocks | | sliding window
compression_training | | the compression library
  layer_reduction | | fewer layers
  weight_quantization
    shared_parameters | | options of quantised weights
    different_groups
      * | | a group of modules
  activation_quantization
    shared_parameters | | options of quantised activations
    different_groups
      * | | a group of modules
  sparse_pruning
    shared_parameters | | options of sparse pruning
    different_groups
      * | | a group of modules
  row_pruning
    shared_parameters | | options of pruned rows
    different_groups
      * | | a group of modules
  head_pruning
    shared_parameters | | options of pruned heads
    different_groups
      * | | a group of modules
  channel_pruning
    shared_parameters | | options of pruned channels
    different_groups
      * | | a group of modules
"""

IGNORED = """
seed | | not a key of the config | use the flag --seed
monitor_config | | from examples of old documentation | write `tensorboard`, `wandb` or `csv_monitor`
aio | | file requests of NVMe offload
  thread_count | | the old name | write `intra_op_parallelism`
autotuning
  start_step | | the old name | write `start_profile_step`
  end_step | | the old name | write `end_profile_step`
"""


@dataclass
class Known:
    """One known key: a leaf with words, or a section with children.

    Attributes:
        neutral: values that ask for nothing, null besides.
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
        """The member that turns a section on."""
        return next((name for name in ("enabled", "device") if name in self.children), None)


@cache
def known_keys() -> Known:
    """All lines of this file as a tree."""
    root = Known(free=False)
    tables: tuple[tuple[Status, str], ...] = (("later", LATER), ("old", OLD), ("ignored", IGNORED))
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
