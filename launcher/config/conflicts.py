"""Conflicts between several keys that can be detected before anything starts.

Most rules are rows of two tables, `WITHIN` (one section) and `ACROSS` (several sections); a rule that needs
computation is a function in the same table. A key that is "auto" has no value yet: its rules are checked
again once it is resolved (`resolve.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from launcher.config.optimizer import TYPES
from launcher.config.parallelism import ASYNCHRONOUS, CHUNKS
from launcher.config.problems import Path, Problem
from launcher.config.ranks import MICRO, TRAIN, batch_without_ranks
from launcher.config.rules import Found, Rule, RuleFunction, path_of, standing, value_at
from launcher.config.scheduler import TORCH
from launcher.config.section import AUTO

if TYPE_CHECKING:
    from launcher.config.root import Config


def contradictions(config: Config, problems: list[Problem], known: Callable[[Path], bool]) -> list[Problem]:
    """Return the conflicts between several keys. Keys that already have a problem are not reported again.

    Args:
        problems: problems of single keys.
        known: returns whether a key is written.
    """
    found = list(problems)
    for table in (WITHIN, ACROSS):
        wrong = {problem.path for problem in found}
        meant = {tuple(problem.suggestion.split(".")) for problem in found if problem.suggestion}
        wrong |= {path for path in meant if not known(path)}
        told: set[Path] = set()
        for conflict in standing(config, table):
            paths = [path_of(key) for key in conflict.keys]
            if paths[0] not in told and not any(path[: len(key)] == key for path in wrong for key in paths):
                told.add(paths[0])
                found.append(Problem(paths[0], conflict.what, conflict.fix))
    return found[len(problems) :]


ZERO, TENSOR, PARAMS = "zero_optimization", "tensor_parallel", "scheduler.params"
DEGREE, STAGE = f"{TENSOR}.autotp_size", f"{ZERO}.stage"
STAGES, SCHEDULE = "pipeline.stages", "pipeline.schedule"
NORM = f"{ZERO}.compute_grad_norm"
REPLICAS = "fault_tolerance.replicas"
NO_NORM = f"{NORM} is false, but"
PIPEDREAM = f'{SCHEDULE} is "pipedream", whose stages update their weights separately, but'


def _keywords(config: Config) -> Iterator[Found]:
    """Yield keywords that the type of the optimizer does not accept."""
    name, params = value_at(config, "optimizer.type"), value_at(config, "optimizer.params")
    if name == AUTO:
        return
    keywords = TYPES[name].keywords
    for key in params.given():
        if key not in keywords and getattr(params, key) is not None:
            takers = [other for other, kind in TYPES.items() if key in kind.keywords]
            what = f"{name} does not have this keyword; it belongs to {', '.join(takers)}"
            fix = f"delete it; {name} accepts {', '.join(sorted(keywords))}"
            yield Found((f"optimizer.params.{key}",), what, fix)


CYCLES = {
    **{"cycle_min_lr": "cycle_max_lr", "cycle_min_mom": "cycle_max_mom"},
    **{"base_lr": "max_lr", "base_momentum": "max_momentum"},
}
"""Lower bound of a schedule's cycle -> its upper bound."""


def _each(value: Any) -> tuple[Any, ...]:
    """Return the values of a key that is one number, or a list with one for each param group."""
    return value if isinstance(value, tuple) else (value,)


def _param_groups(config: Config) -> Iterator[Found]:
    """Check the values per param group: all lists have the same length, and cycles go up."""
    params = value_at(config, PARAMS)
    if params == AUTO:
        return
    used = {
        key: _each(value)
        for key, value in params
        if isinstance(_each(value)[0], float) and ("mom" not in key or params.cycle_momentum is True)
    }
    lists = {key: values for key, values in used.items() if isinstance(getattr(params, key), tuple)}
    for key, values in lists.items():
        if len(values) != len(lists[first := next(iter(lists))]):
            what = (
                f"has {len(values)} values, but {first} has {len(lists[first])}: each param group needs one"
            )
            yield Found((key, first), what, "write as many values in both, or a single number").below(PARAMS)
            return
    for low, high in CYCLES.items():
        lows, highs = used.get(low, ()), used.get(high, ())
        for a, b in zip(lows * len(highs), highs * len(lows), strict=True):
            if b < a:
                what = f"{b:g} is below {low} {a:g}, but a cycle goes from {low} up to {high}"
                yield Found((high, low), what, f"swap the two, or raise {high}").below(PARAMS)


def _batch(config: Config) -> Iterator[Found]:
    if (unfit := batch_without_ranks(config)) is not None:
        keys, unit = unfit
        what = f"{config.train_batch_size} is not a multiple of {' x '.join(keys)} = {unit}: "
        what += "no number of ranks satisfies the batch equation"
        yield Found((TRAIN, *keys), what, f"write a multiple of {unit}, or remove one of these keys")


def _computed(section: str, name: str) -> RuleFunction:
    """Return a rule of `section_conflicts.py`, which is imported only if the section is written."""

    def rule(config: Config) -> Iterator[Found]:
        if section in config.model_fields_set:
            from launcher.config import section_conflicts

            yield from getattr(section_conflicts, name)(config)

    return rule


WITHIN: tuple[Rule | RuleFunction, ...] = (
    *(
        Rule((f"{ZERO}.{section}.device", f"{ZERO}.{section}.nvme_path"),
             lambda device, path: device == "nvme" and not path,
             'is "nvme", but nvme_path is missing', 'write "nvme_path": "/a/directory/on/the/nvme"')
        for section in ("offload_param", "offload_optimizer")
    ),
    Rule((f"{ZERO}.offload_optimizer.device", STAGE),
         lambda device, stage: device != "none" and stage == 0,
         f"{ZERO}.offload_optimizer moves optimizer state off the device, but {STAGE} 0 does not shard it",
         f'write "stage": 1, 2 or 3, or delete {ZERO}.offload_optimizer'),
    *(
        Rule((f"{ZERO}.{key}", STAGE), lambda value, stage, off=off: value > off and stage != 3,
             f"{key} needs sharded parameters, but stage {{1}} does not shard them",
             'write "stage": 3, or delete the key')
        for key, off in (("zero_hpz_partition_size", 1), ("zero_quantized_weights", False),
                         ("zero_quantized_nontrainable_weights", False))
    ),
    *(
        Rule((f"{ZERO}.{key}", STAGE), lambda value, stage: value > 0 and stage == 0,
             f"{key} applies to shards, but stage 0 shards nothing", "delete it")
        for key in ("mics_shard_size", "zero_quantized_gradients")
    ),
    Rule((f"{ZERO}.zero_quantized_gradients", f"{ZERO}.reduce_scatter"),
         lambda quantized, scatters: quantized and not scatters,
         "zero_quantized_gradients quantizes a reduce-scatter, but reduce_scatter is false", "delete one of them"),
    Rule((f"{ZERO}.mics_shard_size", f"{ZERO}.zero_hpz_partition_size"),
         lambda mics, hpz: mics > 0 and hpz > 1,
         "mics_shard_size and zero_hpz_partition_size both set the groups in which parameters are gathered",
         "keep one: MiCS if a group can hold all state, hpZ if it can hold only the parameters"),
    Rule((f"{ZERO}.mics_hierarchical_params_gather", f"{ZERO}.mics_shard_size"),
         lambda hierarchical, mics: hierarchical and mics < 0,
         "mics_hierarchical_params_gather applies to the groups of mics_shard_size, which is not set",
         "delete it, or write mics_shard_size"),
    Rule(("fp16.min_loss_scale", "fp16.loss_scale", "fp16.enabled"),
         lambda least, scale, on: on and least == 0 and scale == 0,
         "fp16.min_loss_scale is 0 and fp16.loss_scale is 0 (dynamic): the scale could fall to zero",
         "write a min_loss_scale of at least 1, or a fixed loss_scale"),
    Rule(("bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"),
         lambda states, weights: states and not weights,
         "bf16.bf16_optimizer_states is true, but bf16.bf16_master_weights_and_grads is false: moments have the dtype "
         "of the weights that the optimizer updates",
         "set bf16_master_weights_and_grads to true, or bf16_optimizer_states to false"),
    Rule(("comms_logger.prof_all", "comms_logger.prof_ops", "comms_logger.enabled"),
         lambda every, named, on: on and not every and not named,
         "comms_logger is enabled, but prof_all is false and prof_ops names no operation",
         'set prof_all to true, or name operations: "prof_ops": ["all_reduce"]'),
    Rule(("compile.enabled", "compile.disable"), lambda on, off: on is not None and on == off,
         "enabled and disable are both {0}, but they are opposites",
         "keep one of compile.enabled and compile.disable"),
    Rule(("compile.kwargs", "compile.backend"), lambda keywords, _: "backend" in keywords,
         "kwargs contains a backend, which has its own key", "set compile.backend instead"),
    *(
        rule
        for key in ("tp.tp_size", "partition_config.tp_size")
        for rule in (
            Rule((f"{TENSOR}.{key}", DEGREE), lambda size, degree: size not in (1, degree) and degree > 0,
                 f"{key} {{0}} contradicts autotp_size {{1}}", f"write the same number, or delete {key}"),
            Rule((f"{TENSOR}.{key}", DEGREE), lambda size, degree: size != 1 and degree == 0,
                 f"{key} {{0}} alone has no effect, neither here nor in DeepSpeed",
                 'write "autotp_size": {0} in tensor_parallel'),
        )
    ),
    _computed("tensor_parallel", "split_rules"),
    Rule(("context_parallel.ulysses", "context_parallel.ring", "sequence_parallel_size"),
         lambda u, r, size: size > 1 and u and r and u * r != size,
         "ulysses {0} x ring {1} is not sequence_parallel_size {2}", "make them agree, or remove one of them"),
    Rule(("context_parallel.ulysses", "context_parallel.ring", "sequence_parallel_size"),
         lambda u, r, size: size > 1 and not (u and r) and size % (u or r or 1),
         "sequence_parallel_size {2} is not a multiple of ulysses {0} or ring {1} (0: not given)",
         "write numbers whose product is the size, or remove them"),
    _computed("expert_parallel", "spread_experts"),
    Rule((SCHEDULE, STAGES), lambda schedule, stages: schedule in ASYNCHRONOUS and stages == 1,
         'schedule "{0}" needs at least two stages', 'set more stages, or "schedule": "1f1b"'),
    Rule(("pipeline.chunks", SCHEDULE), lambda chunks, schedule: schedule == "interleaved" and chunks == 1,
         'schedule "interleaved" with chunks 1 is the same as "1f1b"', 'write "chunks": 2, or "schedule": "1f1b"'),
    Rule(("pipeline.chunks", SCHEDULE), lambda chunks, schedule: schedule == "zbv" and chunks not in (None, 2),
         'schedule "zbv" has 2 chunks per rank, not {0}', 'write "chunks": 2, or remove it'),
    Rule(("pipeline.chunks", SCHEDULE), lambda chunks, schedule: schedule not in CHUNKS and chunks not in (None, 1),
         'schedule "{1}" has one chunk per rank, not {0}',
         'write "schedule": "interleaved", or remove chunks'),
    Rule(("optimizer.params.min_coeff", "optimizer.params.max_coeff"),
         lambda low, high: None not in (low, high) and low > high,
         "{0:g} is more than max_coeff, {1:g}", "write a smaller number"),
    _keywords,
    _param_groups,
    *(
        Rule((f"{PARAMS}.{key}", f"{PARAMS}.cycle_momentum"),
             lambda value, on: on and not all(0 <= each < 1 for each in _each(value)),
             "momentum must be in [0, 1)", "write a value such as 0.9")
        for key in ("cycle_min_mom", "cycle_max_mom")
    ),
    Rule((f"{PARAMS}.total_steps", f"{PARAMS}.epochs", f"{PARAMS}.steps_per_epoch"),
         lambda total, epochs, steps: total is None and None in (epochs, steps),
         "is required unless both epochs and steps_per_epoch are set",
         "write the number of optimizer steps of the run"),
    _computed("data_efficiency", "curriculum"),
    _computed("elasticity", "elastic"),
)  # fmt: skip
"""Conflicts between keys of one section."""

ACROSS: tuple[Rule | RuleFunction, ...] = (
    _batch,
    Rule(("fp16.enabled", "bf16.enabled"), lambda fp16, bf16: fp16 and bf16,
         "fp16.enabled and bf16.enabled are both true, but parameters can have only one dtype",
         "set one of fp16.enabled and bf16.enabled to false"),
    *(
        Rule(("torch_autocast.enabled", f"{section}.enabled", "torch_autocast.dtype"),
             lambda casts, on, dtype, section=section: casts and on and (dtype or "bf16") != section,
             f"torch_autocast.enabled and {section}.enabled are both true, with different dtypes",
             f'set {section}.enabled to false to keep float32 weights, or write "dtype": "{section}" in torch_autocast')
        for section in ("fp16", "bf16")
    ),
    Rule(("fp8.enabled", "fp16.enabled"), lambda fp8, fp16: fp8 and fp16,
         "fp8.enabled is not implemented with fp16.enabled: its products are cast from bfloat16 or float32",
         "set bf16.enabled to true instead of fp16.enabled"),
    Rule(("fp8.enabled", "torch_autocast.dtype", "torch_autocast.enabled"),
         lambda fp8, dtype, casts: fp8 and casts and dtype == "fp16",
         "fp8.enabled is not implemented with float16: its products are cast from bfloat16 or float32",
         "set torch_autocast.dtype to bf16"),
    *(
        Rule(("data_types.param_dtype", f"{section}.enabled"),
             lambda dtype, on, section=section: dtype is not None and (dtype == section) != on,
             f"data_types.param_dtype contradicts {section}.enabled, which sets the dtype of parameters",
             f"remove param_dtype, or make it agree with {section}.enabled")
        for section in ("fp16", "bf16")
    ),
    Rule((f"{TENSOR}.dtype", "bf16.enabled", "fp16.enabled", DEGREE),
         lambda dtype, bf16, fp16, tp: tp > 1 and dtype not in (None, "fp16" if fp16 else "bf16" if bf16 else "fp32"),
         f"{TENSOR}.dtype contradicts fp16.enabled and bf16.enabled, which set the dtype of parameters",
         "remove dtype, or make them agree"),
    Rule((f"{TENSOR}.sequence_parallel", "activation_checkpointing.partition_activations", DEGREE),
         lambda sliced, partitioned, degree: sliced and partitioned and degree > 1,
         f"{TENSOR}.sequence_parallel gives each rank a slice of a block's inputs, but "
         "partition_activations needs inputs that all ranks hold",
         "delete activation_checkpointing.partition_activations: the saved inputs are split already"),
    Rule((f"{TENSOR}.sequence_parallel", "tiled_loss", DEGREE),
         lambda sliced, tiled, degree: sliced and tiled and degree > 1,
         f"{TENSOR}.sequence_parallel gives each rank a slice of the LM head's input, which tiled_loss cannot split",
         f"set {TENSOR}.sequence_parallel to false, or remove tiled_loss"),
    Rule(("managed_gradient_accumulation", STAGES), lambda managed, stages: not managed and (stages or 1) > 1,
         f"managed_gradient_accumulation is false, but {STAGES} above 1 needs all microbatches of a step at once",
         f"set managed_gradient_accumulation to true, or {STAGES} to 1"),
    Rule(("pipeline.activation_checkpoint_interval", "activation_checkpointing.number_checkpoints"),
         lambda interval, number: interval and number is not None,
         "pipeline.activation_checkpoint_interval and activation_checkpointing.number_checkpoints both set "
         "which blocks are recomputed", "delete one of them"),
    Rule((REPLICAS, "checkpoint.peer_memory.every"), lambda replicas, every: replicas > 1 and every,
         "replicas already hold each other's state: in-memory copies are not needed",
         "delete checkpoint.peer_memory, or fault_tolerance"),
    Rule((REPLICAS, "elasticity.enabled"), lambda replicas, on: replicas > 1 and on,
         "replicas leave and join without a restart, but elasticity changes the batch only at a restart",
         "delete elasticity, or fault_tolerance"),
    Rule((REPLICAS, SCHEDULE), lambda replicas, schedule: replicas > 1 and schedule == "pipedream",
         f"{PIPEDREAM} replicas average gradients before a joint step", 'write another schedule, such as "1f1b"'),
    Rule(("replica_check.replay_every", SCHEDULE),
         lambda every, schedule: every and schedule in ASYNCHRONOUS,
         "replica_check.replay_every computes the microbatches of a step twice with the same weights, but an "
         "asynchronous schedule changes weights between them", 'write another schedule, such as "1f1b"'),
    Rule(("replica_check.resting", SCHEDULE), lambda resting, schedule: resting and schedule in ASYNCHRONOUS,
         "replica_check.resting compares weights before a step with those after the previous step, but an asynchronous "
         "schedule changes them in between", 'write another schedule, such as "1f1b", or remove resting'),
    Rule((NORM, "gradient_clipping"), lambda norm, clipping: not norm and clipping != 0,
         f"{NO_NORM} gradient_clipping needs the norm", "set gradient_clipping to 0, or compute_grad_norm to true"),
    Rule((NORM, "fp16.enabled"), lambda norm, fp16: not norm and fp16,
         f"{NO_NORM} fp16.enabled needs the norm", "set fp16.enabled to false, or compute_grad_norm to true"),
    Rule((NORM, "bf16.check_grad_overflow", "bf16.enabled"), lambda norm, checks, bf16: not norm and checks and bf16,
         f"{NO_NORM} bf16.check_grad_overflow needs the norm",
         "set bf16.check_grad_overflow to false, or compute_grad_norm to true"),
    Rule(("gradient_clipping", SCHEDULE), lambda clipping, schedule: clipping != 0 and schedule == "pipedream",
         f"{PIPEDREAM} gradient_clipping (1.0 if not set) needs the norm of all stages",
         'write "gradient_clipping": 0, or "schedule": "2bw"'),
    *(
        Rule((key, SCHEDULE, f"{key.partition('.')[0]}.enabled"),
             lambda value, schedule, on: value in (True, "fp16") and schedule == "pipedream" and on,
             f"{PIPEDREAM} with {key} an overflow on one stage makes all of them skip an update",
             f'{fix}, or "schedule": "2bw"')
        for key, fix in (
            ("fp16.enabled", 'write "bf16": {{"enabled": true}}'),
            ("torch_autocast.dtype", 'write "dtype": "bf16"'),
            ("bf16.check_grad_overflow", 'write "check_grad_overflow": false'),
        )
    ),
    Rule(("gradient_accumulation_steps", SCHEDULE, STAGES),
         lambda steps, schedule, stages: schedule == "2bw" and steps is not None and steps < (stages or 1),
         f'{SCHEDULE} "2bw" needs at least as many microbatches per step as {STAGES}',
         f"raise gradient_accumulation_steps, or lower {STAGES}"),
    *(
        Rule((key, "elasticity"), other,
             f"elasticity.enabled sets the batch size, but {key} sets a different one",
             f'delete {key}, or write "ignore_non_elastic_batch_info": true in elasticity')
        for key, other in (
            (TRAIN, lambda train, section: section.only_batch and train not in (None, section.only_batch.train)),
            (MICRO, lambda micro, section: section.only_batch and micro not in (None, *section.micro_batch_sizes)),
        )
    ),
    Rule(("elasticity.model_parallel_size", STAGES, DEGREE, "elasticity.enabled"),
         lambda size, stages, degree, on: on and (size != stages * (degree or 1) if stages else size % (degree or 1)),
         f"elasticity.model_parallel_size (1 if not set) is not {STAGES} x {DEGREE}", "write their product"),
    Rule((f"{PARAMS}.cycle_momentum", "optimizer.type", "scheduler.type"),
         lambda on, kind, schedule: on and schedule in TORCH and not {"betas", "momentum"} & {*TYPES[kind].keywords},
         "is true by default, but the optimizer {1} has no momentum",
         'write "cycle_momentum": false, or use an optimizer with momentum'),
    *(
        Rule(("optimizer.type", DEGREE), lambda kind, degree, wanted=wanted: kind == wanted and degree > 1,
             f"{wanted} is not implemented with tensor parallelism yet: it needs whole matrices",
             'write another optimizer, for example "AdamW", or "autotp_size": 1')
        for wanted in ("Lamb", "Muon")
    ),
    Rule(("optimizer.type", "expert_parallel"), lambda kind, section: kind == "Lamb" and section.degree > 1,
         "Lamb needs the norms of whole parameters, but experts are distributed over ranks",
         'write another optimizer, for example "AdamW", or remove expert_parallel'),
    Rule(("compile", "expert_parallel"), lambda section, experts: section.on and experts.degree > 1,
         "compile is not implemented with expert parallelism yet",
         "delete compile, or expert_parallel"),
    Rule((SCHEDULE, STAGE), lambda schedule, stage: schedule in ASYNCHRONOUS and stage == 3,
         f"an asynchronous {SCHEDULE} keeps older weights, which is not implemented for {STAGE} 3",
         'write "stage": 2 or less, or "schedule": "1f1b"'),
    Rule(("compile", DEGREE), lambda section, degree: section.on and degree > 1,
         "compile is not implemented with tensor parallelism yet", 'delete compile, or write "autotp_size": 1'),
    Rule((f"{ZERO}.offload_optimizer.device", "optimizer.type"),
         lambda device, kind: device == "nvme" and kind in ("Lamb", "Muon"),
         "the optimizer needs whole parameters, but offload to NVMe gives it only parts of them",
         'write "device": "cpu", or another optimizer'),
)  # fmt: skip
"""Conflicts between keys of several sections."""
