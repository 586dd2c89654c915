"""Costs for `"partition": "profile"`: measured by rank 0 and ranks that share its layers, then broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import default_collate

from launcher.comm import Mesh
from launcher.comm.plain import broadcast_from_first
from launcher.config import Config
from launcher.engine.batches import cast, to_device
from launcher.engine.dtypes import DTYPES, autocast_dtype, special_dtypes
from launcher.errors import ConfigError
from launcher.pipeline.hf.costs import LayerCosts, model_costs
from launcher.pipeline.hf.measure import measure_model
from launcher.pipeline.partition.costs import WHERE
from launcher.pipeline.partition.measure import MeasureOptions
from launcher.pipeline.seeding import drawn_from
from launcher.pipeline.sequential.layers import PipelineModule
from launcher.pipeline.sequential.measure import measure_row

METHOD = "profile"
LONG = 2048
"""Sequence length if none is specified."""

T = TypeVar("T")


def costs_of_blocks(
    model: nn.Module, mesh: Mesh, config: Config, seq_length: int | None
) -> tuple[LayerCosts, str]:
    """Return the costs of a causal LM by `pipeline.partition`, and a description of the measurement ("" if
    none). Every rank must call it.

    Args:
        seq_length: tokens per sequence; None uses `LONG`, or the model's maximum if that is less.
    """
    config_of: Any = getattr(model, "config", None)
    text: Any = config_of.get_text_config() if config_of is not None else None
    most = getattr(text, "max_position_embeddings", None)
    length = seq_length or (min(LONG, most) if isinstance(most, int) and most > 0 else LONG)
    method, tp = config.pipeline.partition, mesh.axes["tp"].degree
    if method != METHOD:
        return model_costs(model, method, sequence=length, tp=tp), ""
    vocabulary, section = getattr(text, "vocab_size", None), config.pipeline
    if vocabulary is None:
        raise ConfigError(
            f'"{METHOD}" needs the sequence length, but {type(model).__name__} has no config that '
            "specifies it",
            where=config.where(WHERE),
            fix='use "best"',
        )
    recomputed = config.activation_checkpointing is not None or section.activation_checkpoint_interval == 1
    size = int(str(config.train_micro_batch_size_per_gpu))
    way = _way(model, mesh, config, recomputed=recomputed)

    def measured() -> LayerCosts:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (size, length), generator=generator).to(mesh.device)
        return measure_model(model, {"input_ids": tokens, "labels": tokens}, way)

    costs = LayerCosts(*_told_by_rank_0(measured, mesh))
    each = sorted(block * 1e3 for block in costs.blocks)
    guessed = "" if seq_length else ", a length that initialize(seq_length=...) can change"
    return costs, (
        f"measured with {size} x {length} tokens{guessed}: {costs.before * 1e3:.1f} ms before the "
        f"blocks, {each[0]:.1f} to {each[-1]:.1f} ms per block, {costs.after * 1e3:.1f} ms after them"
    )


def costs_of_layers(
    row: PipelineModule, mesh: Mesh, config: Config, data: Any, collate_fn: Callable[..., Any] | None
) -> list[float] | None:
    """Return the seconds of each layer of a PipelineModule if it uses "profile", else None. Every rank must
    call it.

    Args:
        data: the data set; its first rows are used, because the inputs of the layers are not known otherwise.

    Raises:
        ConfigError: there is no data set, or its batches are not pairs.
    """
    if row.partition_method != METHOD:
        return None
    if data is None:
        raise ConfigError(
            f'"{METHOD}" measures a microbatch, but the inputs of these layers are not known before the first one',
            where=config.where(WHERE),
            fix="pass training_data to launcher.initialize(): its first rows are measured; or use "
            '"parameters"',
        )
    size = min(len(data), int(str(config.train_micro_batch_size_per_gpu)))
    way = _way(row.whole(), mesh, config, recomputed=config.activation_checkpointing is not None)

    def measured() -> list[float]:
        with drawn_from(0):
            batch = (collate_fn or default_collate)([data[i] for i in range(size)])
        if not isinstance(batch, list | tuple) or not 1 <= len(batch) <= 2:
            raise ConfigError(
                f'"{METHOD}" needs pairs (inputs, labels) from training_data, not {type(batch).__name__}',
                where=config.where(WHERE),
                fix='pass a collate_fn that returns pairs, or use "parameters"',
            )
        batch = to_device(batch, mesh.device)
        if config.fp16.enabled and config.fp16.auto_cast:
            batch = cast(batch, torch.float16)
        return measure_row(row, batch[0], tuple(batch[1:]), way)

    return _told_by_rank_0(measured, mesh)


def _way(model: nn.Module, mesh: Mesh, config: Config, *, recomputed: bool) -> MeasureOptions:
    return MeasureOptions(
        mesh.device,
        DTYPES[config.dtype],
        special_dtypes(config, model),
        autocast_dtype(config),
        recomputed=recomputed,
    )


def _told_by_rank_0(measured: Callable[[], T], mesh: Mesh) -> T:
    """Return the measurement of rank 0 and the ranks that share its layers, while the other ranks wait."""
    with_rank_0 = mesh.axes["pp"].rank == 0 and mesh.dp.rank == 0
    told: Any = None
    if with_rank_0:
        try:
            told = measured()
        except Exception as error:
            error.add_note(
                f'measuring the layers for "{WHERE}": "{METHOD}"; "best" and "parameters" need no measurement'
            )
            raise
    found: T = broadcast_from_first(told) if mesh.world_size > 1 else told
    return found
