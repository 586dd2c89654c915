"""Partitioning of a model into pipeline stages. A sequence of layers always runs in stages, even if there is only one.

Only imported by runs with stages, like the modules of `pipeline/` that it imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from launcher.comm import Axis, Mesh
from launcher.config import ActivationCheckpointingConfig, Config
from launcher.engine.measuring import costs_of_blocks, costs_of_layers
from launcher.errors import ArgumentsError, ConfigError
from launcher.models.activation import Checkpointer, checkpoint_blocks
from launcher.pipeline.crossing import StagedPart
from launcher.pipeline.hf.costs import balance, deal
from launcher.pipeline.hf.staged import StagedModel
from launcher.pipeline.schedules import drained, schedule
from launcher.pipeline.sequential.layers import PipelineModule
from launcher.pipeline.sequential.staged import SequentialPipeline
from launcher.tensor.adapters import peft_configs
from launcher.tensor.split_model import SplitModel

INTERVAL = "pipeline.activation_checkpoint_interval"


def configured_row(model: nn.Module, config: Config) -> tuple[PipelineModule, Config]:
    """Return the model as a PipelineModule, and the config with its number of stages.

    Raises:
        ArgumentsError: config and model contradict each other, or the config requests an unsupported feature.
    """
    if isinstance(model, nn.Sequential):
        model = PipelineModule(model)
    assert isinstance(model, PipelineModule)
    if model.num_stages is not None:
        config = config.with_stages(model.num_stages)
    for key, wrong, fix in (
        ("managed_gradient_accumulation", not config.managed_gradient_accumulation, "set it to true"),
        ("compile", config.compile.on, "remove the section: compile the layers when you create them"),
    ):
        if wrong:
            raise ArgumentsError(
                f"{key} is not supported with PipelineModule",
                where=config.where(key),
                fix=fix,
            )
    model.configure(config.pipeline)
    return model, config


def cut_row(
    row: PipelineModule,
    mesh: Mesh,
    config: Config,
    data: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    *,
    taken: bool = False,
) -> SequentialPipeline:
    """Build and return this rank's layers of a PipelineModule; report the balance of the stages.

    Args:
        data, collate_fn: the data set from which "profile" measures a microbatch.
        taken: the script has already passed parameters of the model to an optimizer.

    Raises:
        ConfigError: those parameters belong to other stages.
    """
    axes, section = mesh.axes, config.pipeline
    row.check_degrees(pipe=axes["pp"].degree, data=mesh.dp.degree, model=axes["tp"].degree)
    stages = axes["pp"].degree * section.chunks_of_rank
    if stages == 1:
        boundaries = [0, len(row)]
    else:
        seconds = costs_of_layers(row, mesh, config, data, collate_fn)
        boundaries = row.boundaries(stages, seconds)
        if mesh.rank == 0:
            _tell(row.balance(boundaries, seconds).lines())
    staged = SequentialPipeline(row, boundaries, _rank_of(mesh, config), axes["pp"].rank)
    if taken:
        _check_cut(row, staged)
    if row.cut != boundaries:
        row.give_up_own()
    return staged


def cut_model(
    model: nn.Module, split_model: SplitModel, mesh: Mesh, config: Config, seq_length: int | None = None
) -> StagedModel:
    """Cut a Hugging Face model into stages along pp, and print their balance.

    Raises:
        ConfigError: the model cannot be cut, or PEFT wraps it in a way that needs all of it.
    """
    _check_adapters(model)
    pp, section, splits = mesh.axes["pp"], config.pipeline, split_model.splits
    costs, measured = costs_of_blocks(model, mesh, config, seq_length)
    boundaries = deal(costs, pp.degree * section.chunks_of_rank)
    if mesh.rank == 0:
        whole = {p: splits[name].shape.numel() for name, p in model.named_parameters() if name in splits}
        lines = balance(model, costs, boundaries, whole, seconds=bool(measured)).lines()
        _tell([measured, *lines] if measured else lines)
    return StagedModel(model, boundaries, _rank_of(mesh, config), pp.rank, split_model.sequence)


def _check_adapters(model: nn.Module) -> None:
    """Refuse the methods of PEFT that do more around the model than call it: a stage has only a part of it."""
    for config in peft_configs(model):
        adds = config.peft_type == "ADALORA"
        if adds or config.is_prompt_learning:
            does = "adds a loss term of all adapters" if adds else "trains inputs of the model"
            raise ConfigError(
                f"PEFT's {config.peft_type.value} {does}, which pipeline stages do not support",
                where="pipeline.stages",
                fix="use LoRA, or ZeRO instead of stages",
            )


def _check_cut(row: PipelineModule, staged: SequentialPipeline) -> None:
    if row.cut not in (None, staged.boundaries):
        raise ConfigError(
            f"the JSON splits the layers at {staged.boundaries}, but PipelineModule() split them at "
            f"{row.cut}: the parameters passed to initialize() belong to other stages",
            where="initialize(optimizer=..., model_parameters=...)",
            fix="omit them, or remove partition and schedule from the JSON's pipeline section and pass "
            "PipelineModule(partition_method=...)",
        )


def _tell(lines: list[str]) -> None:
    print(*(f"{'' if i else 'stages':8}{line}" for i, line in enumerate(lines)), sep="\n", flush=True)


def recompute_stages(model: nn.Module, staged: StagedPart, config: Config, tp: Axis) -> Checkpointer | None:
    """Apply activation checkpointing to blocks, or to groups of layers of a PipelineModule.

    Raises:
        ConfigError: the config requests groups of blocks of a Hugging Face model.
    """
    section, interval = config.activation_checkpointing, config.pipeline.activation_checkpoint_interval
    blocks = staged.blocks
    if isinstance(staged, SequentialPipeline):
        return _recompute_row(staged, section, tp) or checkpoint_blocks(model, blocks, section, tp)
    if interval > 1:
        raise ConfigError(
            f"{INTERVAL} {interval} groups consecutive blocks, but the forward of "
            f"{type(model).__name__} calls its blocks one by one",
            where=config.where(INTERVAL),
            fix="set it to 1, or remove it and add the section activation_checkpointing; both "
            "recompute each block",
        )
    if interval == 1:
        section = section or ActivationCheckpointingConfig()
    return checkpoint_blocks(model, blocks, section, tp)


def _recompute_row(
    staged: SequentialPipeline, section: ActivationCheckpointingConfig | None, tp: Axis
) -> Checkpointer | None:
    """Checkpoint groups of layers, by the PipelineModule's interval; return None if disabled."""
    stages = [stage for stage in staged.part.stages.values() if stage.interval]
    if section is None or not stages:
        return None
    checkpointer = Checkpointer.of(section, tp, sum(-(-len(s.calls) // s.interval) for s in stages))
    for stage in stages:
        stage.recompute_by(checkpointer.run)
    checkpointer.names = ["layers"]
    return checkpointer


def _rank_of(mesh: Mesh, config: Config) -> Any:
    section = config.pipeline
    return schedule(drained(section.schedule), mesh.axes["pp"].degree, 1, section.chunks_of_rank).rank_of
