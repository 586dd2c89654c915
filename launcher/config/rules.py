"""Rules over several keys: their form, and the remarks, which report noteworthy settings that are not errors.

Errors are defined in `conflicts.py`, in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from launcher.config.elasticity import few
from launcher.config.monitor import PACKAGES, is_installed
from launcher.config.optimizer import TYPES
from launcher.config.parallelism import ASYNCHRONOUS
from launcher.config.problems import Note, NoteKind, Path
from launcher.config.ranks import BATCH_KEYS
from launcher.config.scheduler import WarmupParams
from launcher.config.section import AUTO

if TYPE_CHECKING:
    from launcher.config.root import Config


class Rule(NamedTuple):
    """A condition on the values of several keys.

    Attributes:
        keys: dotted paths; the finding is reported at the first one.
        stands: takes the values of the keys and returns whether the rule applies. It is only called if all of
            them are known: none is "auto", and their enclosing sections are present.
        what: the message, without the first key's name; {0} is the value of the first key.
        fix: what to write instead; "" for a remark.
        kind: kind of a remark.
    """

    keys: tuple[str, ...]
    stands: Callable[..., object]
    what: str
    fix: str = ""
    kind: NoteKind = "differs"


class Found(NamedTuple):
    """A rule that applies: its keys, the first of which it is reported at, and its message."""

    keys: tuple[str, ...]
    what: str
    fix: str = ""
    kind: NoteKind = "differs"

    def below(self, section: str) -> Found:
        """Return a copy with `section` prepended to its keys."""
        return self._replace(keys=tuple(f"{section}.{key}" for key in self.keys))


RuleFunction: TypeAlias = Callable[["Config"], Iterator[Found]]


def standing(config: Config, table: tuple[Rule | RuleFunction, ...]) -> Iterator[Found]:
    """Yield the rules of a table that apply, with the values filled into their messages."""
    for entry in table:
        if not isinstance(entry, Rule):
            yield from entry(config)
            continue
        values = [value_at(config, key) for key in entry.keys]
        if not any(isinstance(value, str) and value == AUTO for value in values) and entry.stands(*values):
            shown = [str(value).lower() if isinstance(value, bool) else value for value in values]
            yield Found(entry.keys, entry.what.format(*shown), entry.fix.format(*shown), entry.kind)


def value_at(config: Config, key: str) -> Any:
    """Return the value of a dotted key; "auto" if an enclosing section is missing or has no such key."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part, AUTO)
    return found


def path_of(key: str) -> Path:
    """Return the path of a dotted key; a number is an index into a list."""
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def remarks(config: Config) -> list[Note]:
    """Return the remarks on a configuration: noteworthy settings that are not errors."""
    return [Note(path_of(found.keys[0]), found.kind, found.what) for found in standing(config, REMARKS)]


MUCH = 0.2
"""Share of a step that a rank may be idle before a remark reports it."""
PARAMS, LEARNING = "scheduler.params", "data_efficiency.data_sampling.curriculum_learning"
DEGREE, STAGE = "tensor_parallel.autotp_size", "zero_optimization.stage"
BLOCKS = "activation_checkpointing"
DIFFICULTY_STEP = f"{LEARNING}.curriculum_metrics.seqlen.schedule_config.difficulty_step"


def _left_open(config: Config) -> Iterator[Found]:
    """Yield defaults that may surprise, and a ZeRO stage that is not set yet."""
    params = value_at(config, PARAMS)
    if isinstance(params, WarmupParams) and "warmup_type" not in params.model_fields_set:
        what = 'is not set: the warm-up is logarithmic, as in DeepSpeed; write "linear" for a straight line'
        yield Found((f"{PARAMS}.warmup_type",), what)
    if "gradient_clipping" not in config.model_fields_set:
        what = "is not set: the norm is clipped at 1.0, as in DeepSpeed since June 2026"
        yield Found(("gradient_clipping",), what)
    if config.zero_optimization.stage == AUTO:
        what = '"auto" is filled in by a trainer that sets the stage; the recipes of `launch` reject it'
        yield Found((STAGE,), what)


def _idle_experts(config: Config) -> Iterator[Found]:
    """Yield keys of `expert_parallel` that have no effect."""
    section = config.expert_parallel
    if section.enabled is not True and section.autoep_size not in (1, AUTO):
        what = "has no effect: expert_parallel.enabled is not true"
        yield Found(("expert_parallel.autoep_size",), what, kind="no effect")
    if section.enabled is True and section.degree == 1:
        what = "has no effect: set autoep_size to the number of ranks that share the experts"
        yield Found(("expert_parallel.enabled",), what, kind="no effect")


def _growing_momentum(config: Config) -> Iterator[Found]:
    """Yield a remark if the momentum of OneCycle's decay reaches 1, and at which optimizer step."""
    keys = ("cycle_momentum", "cycle_max_mom", "decay_mom_rate", "decay_step_size", "cycle_first_step_size")
    values = [value_at(config, f"{PARAMS}.{key}") for key in (*keys, "cycle_second_step_size")]
    if AUTO in values:
        return
    cycles, most, rate, size, up, down = values
    most = max(most) if isinstance(most, tuple) else most
    if cycles and most and rate > 0 and size and (steps := (1 / most - 1) / rate * size) < float("inf"):
        at = up + (up if down is None else down) + int(steps)
        what = f"momentum grows and reaches 1 at optimizer step {at}: end the run before that"
        yield Found((f"{PARAMS}.decay_mom_rate",), what)


def _elastic(config: Config) -> Iterator[Found]:
    """Yield the batch size that elasticity chooses."""
    batch = config.elasticity.batch if config.elasticity.on else None
    if batch is not None:
        ranks = few(config.elasticity.world_sizes or ())
        yield Found(
            ("elasticity.enabled",), f"sets the batch: {batch.train} sequences per step on {ranks} ranks"
        )


def idle_share(schedule: str, stages: int, microbatches: int, chunks: int) -> float | None:
    """Return the bubble as a share of a step, for stages of equal cost; for "1f1b" (P - 1) / (m + P - 1).

    Return None if no formula is known, and for "zbv", which has almost no bubble. For "zb-h1", forward, input
    gradient and weight gradient are assumed to take the same time.
    """
    waits, works = stages - 1, microbatches * chunks
    if schedule == "interleaved":
        waits += max(0, stages - microbatches) * (chunks - 1)
    elif schedule == "zb-h1" and microbatches >= stages:
        works *= 3
    elif schedule not in ("1f1b", "gpipe", *ASYNCHRONOUS):  # these drain after each step, too
        return None
    return waits / (works + waits)


def _idle_ranks(config: Config) -> Iterator[Found]:
    """Yield the bubble of a pipeline if it is large, and how many microbatches would make it small."""
    section, microbatches = config.pipeline, config.gradient_accumulation_steps
    if section.degree == 1 or not isinstance(microbatches, int):
        return
    shares = (
        (number, idle_share(section.schedule, section.degree, number, section.chunks_of_rank))
        for number in range(microbatches, microbatches + 4 * section.degree)
    )
    now = next(shares)[1]
    if now is None or now <= MUCH:
        return
    enough, then = next((number, share) for number, share in shares if share is not None and share <= MUCH)
    noun = "microbatch" if microbatches == 1 else "microbatches"
    what = f"with {microbatches} {noun}, each of {section.degree} pipeline stages is idle for {now:.0%} of a step"
    yield Found(("gradient_accumulation_steps",), f"{what}; with {enough}, for {then:.0%}")


REMARKS: tuple[Rule | RuleFunction, ...] = (
    Rule(("optimizer.type", "optimizer.params.adam_w_mode", "optimizer.params.weight_decay"),
         lambda kind, decoupled, decay: kind == "Adam" and decoupled and decay,
         '"Adam" decays weights as AdamW does, because params.adam_w_mode is true'),
    Rule(("optimizer.type",), lambda kind: kind == "Lion",
         "Lion does not change a weight whose gradient and momentum are 0; DeepSpeed's moves it by lr"),
    Rule(("optimizer.type",), lambda kind: TYPES[kind].package == "bitsandbytes",
         "8-bit moments cannot be saved independently of the topology: save_checkpoint refuses them"),
    Rule((f"{PARAMS}.warmup_num_steps",), lambda steps: steps in (0, 1),
         "is treated as 2, as in DeepSpeed: the first two steps have the initial rate"),
    Rule((f"{PARAMS}.warmup_num_steps", f"{PARAMS}.total_num_steps"), lambda steps, total: total <= steps,
         "the warm-up of {0} steps does not end before total_num_steps {1}"),
    *(
        Rule((f"{PARAMS}.{key}", f"{PARAMS}.decay_step_size"), lambda rate, size: rate and size == 0,
             "there is no decay while decay_step_size is 0, as in DeepSpeed")
        for key in ("decay_lr_rate", "decay_mom_rate")
    ),
    _growing_momentum,
    _idle_experts,
    Rule((f"{PARAMS}.cycle_momentum", "optimizer.type", "scheduler.type"),
         lambda on, kind, name: on and name == "OneCycle" and "betas" not in TYPES[kind].keywords,
         "{1} has no betas: its momentum stays constant, as in DeepSpeed"),
    Rule((f"{PARAMS}.cycle_momentum", "optimizer.type", "scheduler.type"),
         lambda on, kind, name: on and name == "OneCycle" and "betas" in TYPES[kind].keywords,
         "betas become [the cycle's momentum, 0.99], as in DeepSpeed; set it to false to keep the optimizer's"),
    Rule(("torch_autocast.dtype", "torch_autocast.enabled"), lambda dtype, on: on and dtype is None,
         "is not set: bfloat16 is used; DeepSpeed uses torch's default, on GPUs float16 without loss scaling"),
    Rule(("fp8.recipe", "fp8.enabled", "bf16.enabled", "torch_autocast.enabled"),
         lambda recipe, on, bf16, casts: on and recipe != "tensorwise" and not (bf16 or casts),
         "has products only in bfloat16 on GPUs: this run works only where float8 is emulated"),
    Rule(("zero_optimization.offload_param", "zero_optimization.offload_param.device", STAGE),
         lambda _, device, stage: device != "none" and stage < 3,
         "has no effect at stage {2}: only stage 3 shards parameters", kind="no effect"),
    Rule(("tensor_parallel.sequence_parallel", DEGREE), lambda on, degree: on and degree <= 1,
         "has no effect unless autotp_size is above 1"),
    Rule(("pipeline.schedule", "pipeline.stages"), lambda name, stages: name != "1f1b" and stages == 1,
         "has no effect unless pipeline.stages is above 1"),
    Rule(("pipeline.schedule",), lambda name: name in ASYNCHRONOUS,
         "is asynchronous: NOT equal to training in one process"),
    _idle_ranks,
    *(
        Rule((f"{section}.enabled",), lambda on, module=module: on and not is_installed(module),
             f"needs the package {package}, which is not installed: pip install {package}")
        for section, (module, package) in PACKAGES.items()
    ),
    *(
        Rule((f"pipeline.{key}", STAGE), lambda on, stage, least=least: on and stage < least,
             f"has no effect below {STAGE} {least}")
        for key, least in (("reduce_per_microbatch", 2), ("gather_per_microbatch", 3))
    ),
    Rule((BLOCKS, f"{BLOCKS}.number_checkpoints"), lambda _, number: number is None,
         "is present: all transformer blocks are recomputed in backward"),
    Rule((BLOCKS, f"{BLOCKS}.number_checkpoints"), lambda _, number: number is not None,
         "is present: at most {1} transformer blocks are recomputed in backward"),
    Rule((f"{BLOCKS}.partition_activations", DEGREE), lambda on, degree: on and degree <= 1,
         "has an effect only with tensor parallelism: without it, a rank keeps the whole inputs"),
    Rule(("compile", "compile.backend"), lambda section, backend: section.on and backend is None,
         "is present: torch.compile (inductor) compiles each transformer block"),
    Rule(("compile", "compile.backend"), lambda section, backend: section.on and backend is not None,
         "is present: torch.compile ({1}) compiles each transformer block"),
    Rule(("checkpoint.keep_every", "checkpoint.keep_last"), lambda every, last: every is not None and last is None,
         "has no effect: all checkpoints are kept unless keep_last is set", kind="no effect"),
    Rule(("gradient_predivide_factor", "prescale_gradients"), lambda factor, prescales: prescales and factor != 1,
         "is not used: prescale_gradients divides by the number of ranks"),
    Rule(("comet.api_key",), lambda key: key is not None,
         "is visible to everyone who reads this file; use the environment variable COMET_API_KEY instead"),
    Rule(("wall_clock_breakdown", "flops_profiler.enabled"), lambda times, profiles: profiles and not times,
         "is enabled, because flops_profiler.enabled needs its times"),
    Rule((f"{LEARNING}.enabled", "data_efficiency.enabled"), lambda learns, on: learns and not on,
         "is disabled, because data_efficiency.enabled is false"),
    Rule((f"{LEARNING}.enabled", "data_efficiency.data_sampling.enabled", "data_efficiency.enabled"),
         lambda learns, samples, on: learns and on and not samples,
         "is disabled, because data_efficiency.data_sampling.enabled is false"),
    Rule((DIFFICULTY_STEP, "data_efficiency"), lambda step, section: section.curriculum and step and step % 8,
         "{0} is not a multiple of 8: the tensor cores of GPUs are less efficient"),
    _elastic,
    *(
        Rule((key, "elasticity"),
             lambda value, section: value not in (None, AUTO) and section.on
             and section.value_of("ignore_non_elastic_batch_info"),
             "has no effect: elasticity sets the batch, and ignore_non_elastic_batch_info is true", kind="no effect")
        for key in BATCH_KEYS
    ),
    Rule(("elasticity.num_gpus_per_node", "elasticity.version", "elasticity.enabled"),
         lambda number, version, on: on and version == 0.1 and number > 1,
         "is not used: version 0.1 counts GPUs, not nodes"),
    _left_open,
)  # fmt: skip
