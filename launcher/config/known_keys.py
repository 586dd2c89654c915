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
    per_head_muon | false | Muon: each attention head is orthogonalised by itself
scheduler
  params
    scale_fn | | CyclicLR: a function, which JSON cannot hold | use `mode`, or pass initialize(lr_scheduler=...)
tensor_parallel
  tp
    mpu | | an object of Python, which JSON cannot hold | delete it; neighbouring ranks share a layer
    tp_group | | a process group of Python, which JSON cannot hold | delete it; neighbouring ranks share a layer
data_parallel_size | | data-parallel degree beside sequence parallelism
use_data_before_expert_parallelism | false | order of ranks in expert groups
expert_parallel
  expert_tensor_parallel_size | 1 | tensor parallelism inside an expert | delete it; an expert is whole on its rank
  load_balance_coeff | | factor of the balance loss; DeepSpeed refuses it | write the model's router_aux_loss_coef
  route_norm |  | routing weights are normalised | delete it; the config of the model says it
  route_scale | 1.0 | factor of routing weights | delete it; the config of the model says it
  score_apply | "auto" | where the score multiplies | delete it; the config of the model says it
  expert_activation |  | activation function of experts | delete it; the config of the model says it
  num_expert_groups |  | groups of experts | delete it; the config of the model says it
  num_limited_groups |  | groups that a token may use | delete it; the config of the model says it
  score_func | "auto" | function of the router | delete it; the config of the model says it
  top_k | "auto" | experts of a token | delete it; the config of the model says it
  routed_scaling_factor | "auto" | factor of the output | delete it; the config of the model says it
  has_shared_experts |  | there are shared experts | delete it; the config of the model says it
datastates_ckpt | | a package that saves in the background | write "checkpoint": {"writer": {"decoupled": true}}
  host_cache_size | | host memory of that engine | write "checkpoint": {"writer": {"decoupled": true}}
compile
  offload_activation | false | DeepCompile: activations on the host | write activation_checkpointing.cpu_checkpointing
  offload_opt_states | false | DeepCompile: moves optimizer state | shard it: zero_optimization.stage 1, 2 or 3
  offload_parameters | false | DeepCompile: moves parameters | shard them: zero_optimization.stage 3
hybrid_engine
  enabled | false | one engine that trains and generates | call engine.module.generate(), on all ranks alike
  max_out_tokens | | tokens to generate
  inference_tp_size | | tensor parallelism in generation
  release_inference_cache | | frees the cache
  pin_parameters | | page-locked parameters
  tp_gather_partition_size | | group that gathers
  enable_cuda_graph | | CUDA graphs
weight_quantization
  enabled | | weights are stored quantised | delete it; bf16 halves them, and zero_optimization.stage 3 shards them
  num_bits | | bits
  q_type | | symmetric or not
  q_groups | | groups
  quantized_initialization | | options while the model is built
  post_init_quant | | options by module name
data_efficiency
  data_sampling
    curriculum_learning
      curriculum_metrics
        * | | other metrics than seqlen need DeepSpeed's index files of the data | use the metric `seqlen`
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
      enabled | false | batches of equal tokens, by DeepSpeed's file of lengths, which is made before the run
      metrics_path | | file of lengths
      lr_scaling_method | | rule for the learning rate
      min_batch_size | | fewest
      max_batch_size | | most
      max_tokens | | tokens of a batch
      sequence_picking_order | | order
      verbose | | prints
  data_routing
    enabled | false | random-LTD: layers that leave tokens out, which needs another forward of every block
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
  enabled | false | search for fast settings | compare tokens_per_s in metrics.jsonl of short runs with each value
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
amp
  enabled | false | NVIDIA Apex | use "bf16": {"enabled": true} or "fp16": {"enabled": true}
  opt_level | | level of Apex
zero_optimization
  zeropp_loco_param
    err_beta | | error feedback of quantised gradients, which DeepSpeed took back
    reset_T | | error feedback of quantised gradients, which DeepSpeed took back
nebula
  enabled | false | the checkpoint service of Azure | write "checkpoint": {"writer": {"decoupled": true}}
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
  enabled | false | layers are dropped at random | delete it; every layer runs in every step, as in DeepSpeed today
  theta | | least share of layers
  gamma | | pace
quantize_training | false | fewer bits while training | delete it; quantise what save_16bit_model() exports
eigenvalue | false | eigenvalues of blocks, which only paced quantize_training | delete it
graph_harvesting | false | CUDA graph of the bf16 step | write "compile": {"enabled": true}: fewer kernels to launch
sparse_attention | | attention on blocks | take a model whose own attention is local (sliding_window of Mistral)
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
compression_training | | the compression library | delete it; prune or quantise what save_16bit_model() exports
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
tensor_parallel
  injection_policy_tuple | | names of layers of a Python caller, found anew in training | write `partition_config`
monitor_config | | from examples of old documentation | write `tensorboard`, `wandb` or `csv_monitor`
"""


IDLE = """
compile
  deepcompile | | engine.compile(), or "enabled": true, compiles each block; ZeRO's gathers overlap with or without it
  passes | | zero_optimization, sequence_parallel_size and tensor_parallel say what is sharded and split
  autoep_non_moe | | each block is compiled
  free_activation | | activations are freed as the backward goes on
  free_activation_threshold | | activations are freed as the backward goes on
  offload_activation_pin_memory | | it acts with offload_activation only
  double_buffer | | buffers of gathered parameters are reused by themselves
  symmetric_memory | | collectives are those of the backend
  debug_log | | TORCH_LOGS=graph_code in the environment shows the graphs
  sync_before_reduce | | reductions wait for what they need
  sync_after_reduce | | reductions wait for what they need
  sync_before_allgather | | gathers wait for what they need
  sync_after_allgather | | gathers wait for what they need
  keep_int_input_tensors | | no inputs are kept
  keep_all_input_tensors | | no inputs are kept
expert_parallel
  validate_folding_routing | | checks the routing
  async_split_plan | | plans the exchange meanwhile
  preset_model | | rules of a known model
  moe_layer_pattern | | names of expert blocks
  expert_pattern | | name of the experts
  router_pattern | | name of the router
  use_grouped_mm | | grouped matrix products
  disable_triton_grouped_mm | | without the triton kernel
  combine_impl | | kernel that combines
  row_weighting_impl | | kernel that weighs rows
  gate_up_impl | | gate and up projection, apart or fused
  comm_backend | | library of the exchange
  comm_num_sm | | multiprocessors of the exchange
  comm_qp_margin | | queue pairs of the exchange
  comm_max_tokens_per_rank | | most tokens of a rank
  expert_w1 | | name of a weight
  expert_w2 | | name of a weight
  expert_w3 | | name of a weight
  num_experts_attr | | name in the model's config
  top_k_attr | | name in the model's config
  shared_experts_pattern | | name of the shared experts
  shared_experts_gate_pattern | | name of their gate
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
