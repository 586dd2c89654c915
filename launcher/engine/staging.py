"""The pipeline stages of a rank, and their runtime. An uncut model is one stage; `cutting.py` cuts others."""

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
    """Return the model as a PipelineModule (None if it is not one), and the config with its stages.

    An nn.Sequential is treated as a PipelineModule only if the config requests stages.

    Raises:
        ArgumentsError: config and model contradict each other, or the config requests an unsupported feature.
    """
    sequential = isinstance(model, nn.Sequential) and config.pipeline.degree > 1
    if not (sequential or getattr(model, "is_row_of_layers", False)):
        return None, config
    from launcher.engine.cutting import configured_row

    return configured_row(model, config)


def stages_of(
    model: nn.Module, split_model: SplitModel, mesh: Mesh, config: Config, seq_length: int | None = None
) -> StagedPart:
    """Cut a Hugging Face model into stages along pp, and print their balance; without pp, one stage."""
    if mesh.axes["pp"].degree == 1:
        return WholeModel(model)
    from launcher.engine.cutting import cut_model

    return cut_model(model, split_model, mesh, config, seq_length)


def recompute(model: nn.Module, staged: StagedPart, config: Config, tp: Axis) -> Checkpointer | None:
    """Apply activation checkpointing to blocks, or to groups of layers of a PipelineModule.

    Raises:
        ConfigError: the config requests groups of blocks of a Hugging Face model.
    """
    if staged.is_whole:
        if config.activation_checkpointing is None:
            return None
        from launcher.models.activation import checkpoint_blocks

        return checkpoint_blocks(model, staged.blocks, config.activation_checkpointing, tp)
    from launcher.engine.cutting import recompute_stages

    return recompute_stages(model, staged, config, tp)


def holders_of(staged: StagedPart, mesh: Mesh) -> dict[str, Axis]:
    """Return parameter -> its stages, for parameters on several stages. Every rank must call it."""
    shared = staged.shared
    axes = {ranks: mesh.part_of("pp", ranks) for ranks in sorted(set(shared.values()))}
    return {name: axes[ranks] for name, ranks in shared.items()}


@torch.no_grad()
def agree(model: nn.Module, holders: Mapping[str, Axis], device: torch.device) -> None:
    """Broadcast parameters that several stages hold from the first of these stages."""
    named = dict(model.named_parameters())
    for name, axis in sorted(holders.items()):
        parameter = named.get(name)
        if parameter is not None and axis.degree > 1 and not parameter.is_meta:
            values = parameter.detach().to(device).contiguous()
            broadcast(values, axis, "root/shared").wait()
            parameter.copy_(values)


def runtime_of(staged: StagedPart, mesh: Mesh, config: Config) -> Runtime:
    """Return the runtime of this rank's stages; an uncut model has one stage, regardless of the schedule."""
    section = config.pipeline
    schedule, chunks = (ONE_STAGE, 1) if staged.is_whole else (section.schedule, section.chunks_of_rank)
    return Runtime(staged, mesh.axes["pp"], schedule, chunks, mesh.device)


def versions_of(zero: ZeroModel, staged: StagedPart, config: Config) -> Versions | None:
    """Return the store of older weights if the schedule is asynchronous, and print what that implies.

    Raises:
        ConfigError: there is only one stage; or several stages hold a parameter, and "pipedream" updates them
            separately.
    """
    section = config.pipeline
    if not section.asynchronous:
        return None
    where = config.where("pipeline.schedule")
    if zero.pp.degree == 1:
        raise ConfigError(
            f'"{section.schedule}" needs at least two pipeline stages, but one rank has all layers',
            where=where,
            fix='set pipeline.stages, or use "schedule": "1f1b"',
        )
    if section.updates_inside and staged.shared:
        raise ConfigError(
            f'{", ".join(sorted(staged.shared))} is on several stages, but with "pipedream" each stage '
            "updates its weights separately: the copies would diverge",
            where=where,
            fix='untie it (tie_word_embeddings false), or use "2bw" or "1f1b"',
        )
    if dist.get_rank() == 0:
        print(
            f"async   {section.schedule}: NOT equal to training in one process: {ASYNCHRONOUS[section.schedule]}"
        )
    from launcher.zero.features.versions import Versions

    return Versions(zero)
