"""Conflict rules that need computation: tensor and expert parallelism, curriculum learning, elasticity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.config.rules import Found
from launcher.config.section import AUTO

if TYPE_CHECKING:
    from launcher.config.elasticity import ElasticityConfig
    from launcher.config.parallelism import LayerPattern
    from launcher.config.root import Config
    from launcher.config.small_sections import SeqlenConfig

EP_SIZE = "expert_parallel.autoep_size"
LEARNING = "data_efficiency.data_sampling.curriculum_learning"


def split_rules(config: Config) -> Iterator[Found]:
    """Check the user's own rules for splitting layers."""
    section = config.tensor_parallel.partition_config
    for i, rule in enumerate(section.layer_specs if section is not None else ()):
        at = f"tensor_parallel.partition_config.layer_specs.{i}"
        yield from (found.below(at) for found in _of_split_rule(rule))


def _of_split_rule(rule: LayerPattern) -> Iterator[Found]:
    autos = [key for key, value in rule if value == AUTO]
    for key in autos:
        yield Found((key,), '"auto" is not supported in a rule', "write the value, or delete the key")
    for key, kind in (("gather_output", "column"), ("grad_allreduce", "skip")):
        if getattr(rule, key) and rule.partition_type != kind and not autos:
            what = f'{key} requires partition_type "{kind}", but this rule has "{rule.partition_type}"'
            yield Found((key, "partition_type"), what, f'delete {key}, or set partition_type to "{kind}"')
    if autos or rule.shape is None:
        return
    nested = [i for i, size in enumerate(rule.shape) if isinstance(size, tuple)]
    if rule.dim >= len(rule.shape):
        what = f"dim {rule.dim} is split, but shape has dims 0 to {len(rule.shape) - 1}"
        yield Found(("shape", "partition_dim"), what, "write another partition_dim, or a longer shape")
    elif nested not in ([], [rule.dim]):
        what = f"dim {rule.dim} is split, but the list of sizes is at dim {nested[-1]}"
        yield Found(("shape", "partition_dim"), what, "put the list of sizes at partition_dim")


def spread_experts(config: Config) -> Iterator[Found]:
    """Check the keys that expert parallelism conflicts with."""
    section, zero = config.expert_parallel, config.zero_optimization
    for key in ("global_balance_loss", "router_z_loss_coef"):
        if getattr(section, key) and config.cp_degree > 1:
            what = "the router loss needs whole sequences, but context parallelism splits them"
            yield Found((f"expert_parallel.{key}", "sequence_parallel_size"), what, "remove one of them")
        if getattr(section, key) and config.pipeline.degree > 1:
            what = (
                "the router loss needs the routers of all layers, but they are on different pipeline stages"
            )
            yield Found((f"expert_parallel.{key}", "pipeline.stages"), what, "remove one of them")
    if section.degree == 1:
        return
    size = "expert_parallel.size" if isinstance(section.size, int) and section.size else EP_SIZE
    if section.enabled is True and section.size not in (0, section.autoep_size):
        what = f"size {section.size} contradicts autoep_size {section.autoep_size}"
        yield Found(("expert_parallel.size", EP_SIZE), what, "set only one of the two")
    if config.tensor_parallel.degree > 1 and config.tensor_parallel.sequence_parallel:
        what = "expert parallelism needs whole sequences, but sequence_parallel gives each rank only a slice"
        yield Found((size, "tensor_parallel.sequence_parallel"), what, "remove one of them")
    for key, most in (("mics_shard_size", 0), ("zero_hpz_partition_size", 1)):
        if getattr(zero, key) > most:
            what = (
                f"{key} forms groups of ranks with identical parameters, but expert-parallel ranks hold "
                "different experts"
            )
            yield Found((f"zero_optimization.{key}", size), what, f"remove {key}")


def curriculum(config: Config) -> Iterator[Found]:
    """Check enabled curriculum learning: required keys and unsupported options."""
    sampling, metric = config.data_efficiency.sampling, config.data_efficiency.curriculum
    needed = "is required if curriculum_learning.enabled is true"
    metrics = f"{LEARNING}.curriculum_metrics"
    if metric is not None:
        for key, what, fix in _of_curriculum(metric):
            yield Found((f"{metrics}.seqlen.{key}",), what or needed, fix)
    elif sampling is not None and sampling.curriculum_learning.enabled is True:
        yield Found((metrics,), needed, 'write {"seqlen": {"min_difficulty": 64, ...}}')


def _of_curriculum(metric: SeqlenConfig) -> Iterator[tuple[str, str, str]]:
    yield from ((key, "", "add it") for key in metric.missing())
    chooses = (
        "needs DeepSpeed's index files: here sequences are truncated to a length, not selected by length"
    )
    for key in ("index_to_sample_path", "index_to_metric_path"):
        if getattr(metric, key) is not None:
            yield key, chooses, "delete it to truncate every sequence to the current length"
    if metric.difficulty_type == "percentile":
        yield "difficulty_type", f'"percentile" {chooses}', 'write "value", and difficulties in tokens'
    if metric.clustering_type == "schedule_based":
        yield "clustering_type", f'"schedule_based" {chooses}', 'write "single_cluster"'
    if metric.schedule_type == "custom":
        others = 'use "fixed_linear", "fixed_root" or "fixed_discrete"'
        yield "schedule_type", '"custom" needs a Python function, which JSON cannot hold', others
    low, high, pace = metric.min_difficulty, metric.max_difficulty, metric.schedule_config
    if isinstance(low, int) and isinstance(high, int) and high < low:
        yield "max_difficulty", f"{high} is below min_difficulty {low}", "swap the two"
    lengths, ends = pace.difficulty, pace.max_step
    if metric.schedule_type == "fixed_discrete" and isinstance(lengths, tuple) and isinstance(ends, tuple):
        key = "schedule_config.max_step"
        if len(lengths) != len(ends) + 1:
            what = f"has {len(ends)} entries, but difficulty has {len(lengths)}"
            yield key, what, "write one entry fewer than in difficulty: the last difficulty has no end"
        elif list(ends) != sorted(set(ends)):
            yield key, "must be strictly increasing", "write the last step of each difficulty, in order"


def elastic(config: Config) -> Iterator[Found]:
    """Check enabled elasticity: required keys and contradictory numbers."""
    section = config.elasticity
    if not section.on:
        return
    examples = {"max_train_batch_size": "2000", "micro_batch_sizes": "[2, 4, 6]"}
    missing = [key for key in examples if section.value_of(key) is None]
    for key in missing:
        what = "is required if elasticity.enabled is true"
        yield Found((key,), what, f'write "{key}": {examples[key]}').below("elasticity")
    wrong = list(_elastic_numbers(section))
    yield from (found.below("elasticity") for found in wrong)
    if not missing and not wrong and section.batch is None:
        what = (
            f"allows no batch size that divides into whole microbatches on {section.value_of('min_gpus')} to "
        )
        what += f"{section.value_of('max_gpus')} GPUs"
        yield Found(("elasticity.max_train_batch_size",), what, "raise it, or change min_gpus and max_gpus")


def _elastic_numbers(section: ElasticityConfig) -> Iterator[Found]:
    keys = ("min_gpus", "max_gpus", "num_gpus_per_node", "model_parallel_size", "max_train_batch_size")
    least, most, per_node, per_model, largest = map(section.value_of, keys)
    if most < least:
        yield Found(("max_gpus", "min_gpus"), f"{most} is below min_gpus {least}", "swap the two")
    nodes, sizes = section.value_of("version") == 0.2, section.value_of("micro_batch_sizes")
    if not nodes and per_model > 1:
        what = f"{per_model} requires version 0.2: version 0.1 does not support model parallelism"
        yield Found(("model_parallel_size", "version"), what, 'write "version": 0.2')
    elif nodes and per_node % per_model:
        what = f"{per_model} does not divide num_gpus_per_node {per_node}"
        yield Found(("model_parallel_size", "num_gpus_per_node"), what, "write the number of GPUs per node")
    elif largest and sizes and max(sizes) > (bound := largest // (per_node // per_model if nodes else 1)):
        rest = "" if bound == largest else f" ({bound} per rank of a node)"
        what = f"contains {max(sizes)}, which exceeds max_train_batch_size {largest}{rest}"
        yield Found(("micro_batch_sizes", "max_train_batch_size"), what, "remove it from the list")
