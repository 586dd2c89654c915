"""From a model to its stages: which model is cut how, and what runs it. A row of layers runs in stages, be it one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.comm import Axis, Mesh, broadcast
from launcher.config import ActivationCheckpointingConfig, Config
from launcher.config.pipeline import ASYNCHRONOUS
from launcher.engine.measuring import costs_of_blocks, costs_of_layers
from launcher.errors import ArgumentsError, ConfigError
from launcher.models.activation import Checkpointer, checkpoint_blocks
from launcher.pipeline.costs import balance, deal
from launcher.pipeline.crossing import StagedPart
from launcher.pipeline.layers import PipelineModule
from launcher.pipeline.runtime import Runtime
from launcher.pipeline.schedules import DRAINED, schedule
from launcher.pipeline.sequential import SequentialPipeline
from launcher.pipeline.staged import StagedModel
from launcher.tensor.apply import SplitModel
from launcher.zero import ZeroModel
from launcher.zero.versions import Versions

INTERVAL = "pipeline.activation_checkpoint_interval"


def row_in(model: nn.Module, config: Config) -> tuple[PipelineModule | None, Config]:
    """The model as a row of layers, if it is one, and the JSON with its number of stages.

    An nn.Sequential is one where the JSON asks for stages; else it is a module like any other.

    Raises:
        ArgumentsError: the JSON and the row contradict each other, or the JSON asks for what a row cannot do.
    """
    if isinstance(model, nn.Sequential) and config.pipeline.degree > 1:
        model = PipelineModule(model)
    if not isinstance(model, PipelineModule):
        return None, config
    if model.num_stages is not None:
        config = config.with_stages(model.num_stages)
    for key, wrong, fix in (
        ("managed_gradient_accumulation", not config.managed_gradient_accumulation, "set it to true"),
        ("compile", config.compile.on, "delete the section: layers can be compiled as they are made"),
    ):
        if wrong:
            raise ArgumentsError(
                f"what {key} says is not supported with pipeline parallelism of a row of layers",
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
    """This rank's layers of a row, built; says how even the stages are.

    Args:
        data, collate_fn: a data set, of which "profile" measures a microbatch.
        taken: a script has given parameters of the row to an optimizer.

    Raises:
        ConfigError: they are of other stages.
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
) -> StagedModel | None:
    """Cut a Hugging Face model into stages along pp, and say how even they are; None where there is one."""
    pp, section, splits = mesh.axes["pp"], config.pipeline, split_model.splits
    if pp.degree == 1:
        return None
    costs, measured = costs_of_blocks(model, mesh, config, seq_length)
    boundaries = deal(costs, pp.degree * section.chunks_of_rank)
    if mesh.rank == 0:
        whole = {p: splits[name].shape.numel() for name, p in model.named_parameters() if name in splits}
        lines = balance(model, costs, boundaries, whole, seconds=bool(measured)).lines()
        _tell([measured, *lines] if measured else lines)
    return StagedModel(model, boundaries, _rank_of(mesh, config), pp.rank, split_model.sequence)


def _check_cut(row: PipelineModule, staged: SequentialPipeline) -> None:
    if row.cut not in (None, staged.boundaries):
        raise ConfigError(
            f"the JSON cuts the row of layers at {staged.boundaries}, and PipelineModule() cut it at {row.cut}: the "
            "parameters that initialize() was given are those of other stages",
            where="initialize(optimizer=..., model_parameters=...)",
            fix="leave them out, or delete partition and schedule in the JSON's section pipeline and give "
            "PipelineModule(partition_method=...)",
        )


def _tell(lines: list[str]) -> None:
    print(*(f"{'' if i else 'stages':8}{line}" for i, line in enumerate(lines)), sep="\n", flush=True)


def holders_of(staged: StagedPart | None, mesh: Mesh) -> dict[str, Axis]:
    """The stages that hold a parameter, where there are several. Every rank must call it."""
    shared = staged.shared if staged is not None else {}
    axes = {ranks: mesh.part_of("pp", ranks) for ranks in sorted(set(shared.values()))}
    return {name: axes[ranks] for name, ranks in shared.items()}


@torch.no_grad()
def agree(model: nn.Module, holders: Mapping[str, Axis], device: torch.device) -> None:
    """Give parameters that several stages hold the values of the first of them."""
    named = dict(model.named_parameters())
    for name, axis in sorted(holders.items()):
        parameter = named.get(name)
        if parameter is not None and axis.degree > 1 and not parameter.is_meta:
            values = parameter.detach().to(device).contiguous()
            broadcast(values, axis, "root/shared").wait()
            parameter.copy_(values)


def runtime_of(staged: StagedPart | None, mesh: Mesh, config: Config) -> Runtime | None:
    """What runs the stages of this rank."""
    if staged is None:
        return None
    section = config.pipeline
    return Runtime(staged, mesh.axes["pp"], section.schedule, section.chunks_of_rank, mesh.device)


def versions_of(zero: ZeroModel, staged: StagedPart | None, config: Config) -> Versions | None:
    """What keeps older weights, where the schedule is asynchronous; says what that means.

    Raises:
        ConfigError: there are no stages; or a parameter is held by two, which "pipedream" updates one by one.
    """
    section = config.pipeline
    if not section.asynchronous:
        return None
    where = config.where("pipeline.schedule")
    if staged is None or zero.pp.degree == 1:
        raise ConfigError(
            f'"{section.schedule}" needs two stages or more, and one rank has all layers',
            where=where,
            fix='write "stages" in pipeline, or "schedule": "1f1b"',
        )
    if section.updates_inside and staged.shared:
        raise ConfigError(
            f'{", ".join(sorted(staged.shared))} is on several stages, and with "pipedream" each stage updates its '
            "weights by itself: they would drift apart",
            where=where,
            fix='untie it (tie_word_embeddings false), or write "2bw" or "1f1b"',
        )
    if dist.get_rank() == 0:
        print(
            f"async   {section.schedule}: NOT equal to training in one process: {ASYNCHRONOUS[section.schedule]}"
        )
    return Versions(zero)


def recompute(
    model: nn.Module, blocks: list[tuple[str, nn.Module]], staged: StagedPart | None, config: Config, tp: Axis
) -> Checkpointer | None:
    """Let blocks, or groups of layers of a row, keep only their inputs and be recomputed in backward.

    Raises:
        ConfigError: the JSON asks for groups of blocks of a Hugging Face model.
    """
    section, interval = config.activation_checkpointing, config.pipeline.activation_checkpoint_interval
    if isinstance(staged, SequentialPipeline):
        return _recompute_row(staged, section, tp) or checkpoint_blocks(model, blocks, section, tp)
    if interval > 1 and staged is not None:
        raise ConfigError(
            f"{INTERVAL} {interval} groups neighbouring blocks, and the blocks of {type(model).__name__} are called "
            "one by one by its own forward",
            where=config.where(INTERVAL),
            fix="write 1, or delete it and write the section activation_checkpointing; both recompute each block",
        )
    if interval == 1 and staged is not None:
        section = section or ActivationCheckpointingConfig()
    return checkpoint_blocks(model, blocks, section, tp)


def _recompute_row(
    staged: SequentialPipeline, section: ActivationCheckpointingConfig | None, tp: Axis
) -> Checkpointer | None:
    """Groups of layers, by the row's interval, keep their inputs as the section says."""
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
    name = DRAINED.get(section.schedule, section.schedule)
    return schedule(name, mesh.axes["pp"].degree, 1, section.chunks_of_rank).rank_of
