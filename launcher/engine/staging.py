"""The stages of a rank, and what runs them. A model that is not cut is one; `cutting.py` cuts others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from launcher.comm import Axis, Mesh, broadcast
from launcher.config import Config
from launcher.config.parallelism import ASYNCHRONOUS
from launcher.errors import ConfigError
from launcher.pipeline.crossing import StagedPart
from launcher.pipeline.executor.runtime import Runtime
from launcher.pipeline.schedules import ONE_STAGE
from launcher.pipeline.whole import WholeModel
from launcher.tensor.split_model import SplitModel
from launcher.zero import ZeroModel

if TYPE_CHECKING:
    from launcher.models.activation import Checkpointer
    from launcher.pipeline.sequential.layers import PipelineModule
    from launcher.zero.features.versions import Versions


def row_in(model: nn.Module, config: Config) -> tuple[PipelineModule | None, Config]:
    """Return the model as a row of layers, if it is one, and the JSON with its number of stages.

    An nn.Sequential is one where the JSON asks for stages; else it is a module like any other.

    Raises:
        ArgumentsError: the JSON and the row contradict each other, or the JSON asks for what a row cannot do.
    """
    sequential = isinstance(model, nn.Sequential) and config.pipeline.degree > 1
    if not (sequential or getattr(model, "is_row_of_layers", False)):
        return None, config
    from launcher.engine.cutting import configured_row

    return configured_row(model, config)


def stages_of(
    model: nn.Module, split_model: SplitModel, mesh: Mesh, config: Config, seq_length: int | None = None
) -> StagedPart:
    """Cut a Hugging Face model into stages along pp, and say how even they are; any model is one stage as it is."""
    if mesh.axes["pp"].degree == 1:
        return WholeModel(model)
    from launcher.engine.cutting import cut_model

    return cut_model(model, split_model, mesh, config, seq_length)


def recompute(model: nn.Module, staged: StagedPart, config: Config, tp: Axis) -> Checkpointer | None:
    """Let blocks, or groups of layers of a row, keep only their inputs and be recomputed in backward.

    Raises:
        ConfigError: the JSON asks for groups of blocks of a Hugging Face model.
    """
    if staged.is_whole:
        if config.activation_checkpointing is None:
            return None
        from launcher.models.activation import checkpoint_blocks

        return checkpoint_blocks(model, staged.blocks, config.activation_checkpointing, tp)
    from launcher.engine.cutting import recompute_stages

    return recompute_stages(model, staged, config, tp)


def holders_of(staged: StagedPart, mesh: Mesh) -> dict[str, Axis]:
    """Return the stages that hold a parameter, where there are several. Every rank must call it."""
    shared = staged.shared
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


def runtime_of(staged: StagedPart, mesh: Mesh, config: Config) -> Runtime:
    """Return what runs the stages of this rank; a model that is not cut has one, whatever the JSON's schedule."""
    section = config.pipeline
    schedule, chunks = (ONE_STAGE, 1) if staged.is_whole else (section.schedule, section.chunks_of_rank)
    return Runtime(staged, mesh.axes["pp"], schedule, chunks, mesh.device)


def versions_of(zero: ZeroModel, staged: StagedPart, config: Config) -> Versions | None:
    """Return what keeps older weights, where the schedule is asynchronous; says what that means.

    Raises:
        ConfigError: there are no stages; or a parameter is held by two, which "pipedream" updates one by one.
    """
    section = config.pipeline
    if not section.asynchronous:
        return None
    where = config.where("pipeline.schedule")
    if zero.pp.degree == 1:
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
    from launcher.zero.features.versions import Versions

    return Versions(zero)
