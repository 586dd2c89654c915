"""The capability table: what can't stand together, decided before anything starts.

A rule of one section stands in that section's `conflicts`; here are those over several sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from launcher.config.elasticity import contradicts_batch, contradicts_degrees
from launcher.config.ranks import MICRO, TRAIN
from launcher.config.section import AUTO, Conflict

if TYPE_CHECKING:
    from launcher.config.root import Config


class Combination(NamedTuple):
    """One entry.

    Attributes:
        keys: dotted paths; the first is where it is reported.
        stands: whether the configuration has it.
        what: the mistake, naming the keys.
        fix: what to write instead.
    """

    keys: tuple[str, ...]
    stands: Callable[[Config], bool]
    what: str
    fix: str


ZERO, TENSOR, STAGES, SCHEDULE = (
    "zero_optimization",
    "tensor_parallel",
    "pipeline.stages",
    "pipeline.schedule",
)


def _device(config: Config, section: str) -> str:
    offload = getattr(config.zero_optimization, section)
    return "none" if offload is None or offload.device == "auto" else str(offload.device)


def _stage(config: Config) -> int:
    """0 where the stage is not known yet."""
    stage = config.zero_optimization.stage
    return stage if isinstance(stage, int) else 0


def _autocasts_beside(section: str, config: Config) -> bool:
    autocasts, dtype = config.torch_autocast.enabled is True, config.torch_autocast.dtype or "bf16"
    return autocasts and getattr(config, section).enabled is True and dtype != section


def _param_dtype_is_not(section: str, config: Config) -> bool:
    """Whether data_types.param_dtype contradicts the switch of `section`, both being known."""
    wanted, on = config.data_types.param_dtype, getattr(config, section).enabled
    return wanted not in (None, AUTO) and on != AUTO and bool((wanted == section) != on)


def _splits(config: Config) -> bool:
    """Whether layers are split over tensor-parallel ranks."""
    return config.tensor_parallel.degree > 1


def _splits_under(optimizer: str, config: Config) -> bool:
    return _splits(config) and config.optimizer is not None and config.optimizer.type == optimizer


def _tp_dtype_is_not(config: Config) -> bool:
    """Whether tensor_parallel.dtype contradicts fp16 and bf16, both being known."""
    wanted, open_ = config.tensor_parallel.dtype, AUTO in (config.fp16.enabled, config.bf16.enabled)
    return _splits(config) and wanted not in (None, AUTO) and not open_ and wanted != config.dtype


def _is_cut(config: Config) -> bool:
    """Whether layers are dealt out to pipeline stages."""
    return config.pipeline.degree > 1


def _few_microbatches(config: Config) -> bool:
    """Whether a step is over before the weights of the next one would be ready."""
    microbatches = config.gradient_accumulation_steps
    return (
        config.pipeline.schedule == "2bw"
        and isinstance(microbatches, int)
        and microbatches < config.pipeline.degree
    )


def _autocasts_to_fp16(config: Config) -> bool:
    return config.torch_autocast.enabled is True and config.torch_autocast.dtype == "fp16"


def _two_choices_of_blocks(config: Config) -> bool:
    section, interval = config.activation_checkpointing, config.pipeline.activation_checkpoint_interval
    return section is not None and section.number_checkpoints is not None and interval not in (0, AUTO)


def _no_norm(config: Config) -> bool:
    return config.zero_optimization.compute_grad_norm is False


NO_NORM = f"{ZERO}.compute_grad_norm is false, and"
PIPEDREAM = 'pipeline.schedule is "pipedream", whose stages update their weights one by one, and'

COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        ("fp16.enabled", "bf16.enabled"),
        lambda config: config.fp16.enabled is True and config.bf16.enabled is True,
        "fp16.enabled and bf16.enabled are both true, and parameters have one dtype",
        "set one of fp16.enabled and bf16.enabled to false",
    ),
    *(
        Combination(
            ("torch_autocast.enabled", f"{section}.enabled"),
            partial(_autocasts_beside, section),
            f"torch_autocast.enabled and {section}.enabled are both true, with two dtypes",
            f'set {section}.enabled to false to keep float32 weights, or write "dtype": "{section}" in torch_autocast',
        )
        for section in ("fp16", "bf16")
    ),
    *(
        Combination(
            ("data_types.param_dtype", f"{section}.enabled"),
            partial(_param_dtype_is_not, section),
            f"data_types.param_dtype contradicts {section}.enabled, which says what parameters are",
            f"leave param_dtype out, or let {section}.enabled say the same",
        )
        for section in ("fp16", "bf16")
    ),
    Combination(
        (f"{TENSOR}.dtype", "bf16.enabled", "fp16.enabled"),
        _tp_dtype_is_not,
        f"{TENSOR}.dtype contradicts fp16.enabled and bf16.enabled, which say what parameters are",
        "leave dtype out, or let them say the same",
    ),
    Combination(
        (f"{TENSOR}.sequence_parallel", "activation_checkpointing.partition_activations"),
        lambda config: (
            _splits(config)
            and config.tensor_parallel.sequence_parallel is True
            and config.activation_checkpointing is not None
            and config.activation_checkpointing.partition_activations is True
        ),
        f"{TENSOR}.sequence_parallel gives each rank a slice of a block's inputs, and partition_activations is for "
        "inputs that all ranks have",
        "delete activation_checkpointing.partition_activations: the saved inputs are split already",
    ),
    Combination(
        ("managed_gradient_accumulation", STAGES),
        lambda config: _is_cut(config) and config.managed_gradient_accumulation is False,
        f"managed_gradient_accumulation is false, and {STAGES} above 1 needs all microbatches of a step at once",
        "set managed_gradient_accumulation to true, or pipeline.stages to 1",
    ),
    Combination(
        ("pipeline.activation_checkpoint_interval", "activation_checkpointing.number_checkpoints"),
        _two_choices_of_blocks,
        "pipeline.activation_checkpoint_interval and activation_checkpointing.number_checkpoints both say which blocks "
        "are recomputed",
        "delete one of them",
    ),
    Combination(
        (f"{ZERO}.compute_grad_norm", "gradient_clipping"),
        lambda config: _no_norm(config) and config.gradient_clipping != 0,
        f"{NO_NORM} gradient_clipping needs the norm",
        "set gradient_clipping to 0, or compute_grad_norm to true",
    ),
    Combination(
        (f"{ZERO}.compute_grad_norm", "fp16.enabled"),
        lambda config: _no_norm(config) and config.fp16.enabled is True,
        f"{NO_NORM} fp16.enabled needs the norm",
        "set fp16.enabled to false, or compute_grad_norm to true",
    ),
    Combination(
        (f"{ZERO}.compute_grad_norm", "bf16.check_grad_overflow"),
        lambda config: (
            _no_norm(config) and config.bf16.enabled is True and config.bf16.check_grad_overflow is True
        ),
        f"{NO_NORM} bf16.check_grad_overflow needs the norm",
        "set bf16.check_grad_overflow to false, or compute_grad_norm to true",
    ),
    Combination(
        ("gradient_clipping", SCHEDULE),
        lambda config: config.pipeline.updates_inside and config.gradient_clipping != 0,
        f"{PIPEDREAM} gradient_clipping (1.0 where it is left out) needs the norm of all stages",
        'write "gradient_clipping": 0, or "schedule": "2bw"',
    ),
    *(
        Combination(
            (key, SCHEDULE),
            partial(lambda stands, config: config.pipeline.updates_inside and stands(config), stands),
            f"{PIPEDREAM} with {key} an overflow on one lets all of them leave an update out",
            f'{fix}, or "schedule": "2bw"',
        )
        for key, stands, fix in (
            ("fp16.enabled", lambda config: config.fp16.enabled is True, 'write "bf16": {"enabled": true}'),
            ("torch_autocast.dtype", _autocasts_to_fp16, 'write "dtype": "bf16"'),
            (
                "bf16.check_grad_overflow",
                lambda config: config.bf16.enabled is True and config.bf16.check_grad_overflow is True,
                'write "check_grad_overflow": false',
            ),
        )
    ),
    Combination(
        ("gradient_accumulation_steps", SCHEDULE, STAGES),
        _few_microbatches,
        'pipeline.schedule "2bw" needs as many microbatches in a step as pipeline.stages, or more',
        "raise gradient_accumulation_steps, or lower pipeline.stages",
    ),
    *(
        Combination(
            (key, "elasticity.enabled"),
            partial(contradicts_batch, key),
            f"elasticity.enabled says the batch, and {key} says another",
            f'delete {key}, or write "ignore_non_elastic_batch_info": true in elasticity',
        )
        for key in (TRAIN, MICRO)
    ),
    Combination(
        ("elasticity.model_parallel_size", STAGES, f"{TENSOR}.autotp_size"),
        contradicts_degrees,
        f"elasticity.model_parallel_size (1 where it is left out) is not {STAGES} x {TENSOR}.autotp_size",
        "write their product",
    ),
    Combination(
        (f"{ZERO}.offload_optimizer.device", f"{ZERO}.stage"),
        lambda config: _device(config, "offload_optimizer") != "none" and _stage(config) < 1,
        f"{ZERO}.offload_optimizer asks for optimizer state elsewhere, but {ZERO}.stage 0 does not shard it",
        f'write "stage": 1, 2 or 3, or delete {ZERO}.offload_optimizer',
    ),
)
"""Each as written here, in docs/config.md too."""

NOT_TOGETHER_YET: tuple[Combination, ...] = (
    *(
        Combination(
            ("optimizer.type", f"{TENSOR}.autotp_size"),
            partial(_splits_under, kind),
            f"{kind} is not implemented over tensor-parallel ranks yet: it needs whole matrices",
            'write another optimizer, for example "AdamW", or "autotp_size": 1',
        )
        for kind in ("Lamb", "Muon")
    ),
    Combination(
        (SCHEDULE, f"{ZERO}.stage"),
        lambda config: config.pipeline.asynchronous and _stage(config) == 3,
        f"pipeline.schedule keeps older weights, and that is not implemented for {ZERO}.stage 3",
        'write "stage": 2 or less, or "schedule": "1f1b"',
    ),
    Combination(
        ("compile", f"{TENSOR}.autotp_size"),
        lambda config: _splits(config) and config.compile.on,
        "compile is not implemented over tensor-parallel ranks yet",
        'delete compile, or write "autotp_size": 1',
    ),
    Combination(
        (f"{ZERO}.offload_optimizer.device", "optimizer.type"),
        lambda config: (
            _device(config, "offload_optimizer") == "nvme"
            and config.optimizer is not None
            and config.optimizer.type in ("Lamb", "Muon")
        ),
        "the optimizer needs whole parameters at a time, and brings in a part of them",
        'write "device": "cpu", or another optimizer',
    ),
)
"""Each works alone."""


def conflicts(config: Config) -> Iterator[Conflict]:
    """The entries that `config` has; what stands in a contradiction needs no second complaint."""
    wrong: set[str] = set()
    for entry in (*COMBINATIONS, *NOT_TOGETHER_YET):
        if entry.keys[0] not in wrong and entry.stands(config):
            wrong.add(entry.keys[0])
            yield Conflict(entry.keys, entry.what, entry.fix)
