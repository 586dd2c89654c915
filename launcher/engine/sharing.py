"""Sequence parallelism (cp): its settings from config and script, and its application to the model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.comm import Mesh
from launcher.config import Config
from launcher.config.ranks import with_shared_sequences
from launcher.engine.dtypes import autocast_dtype
from launcher.engine.same_inputs import CutBy

if TYPE_CHECKING:
    from launcher.engine.engine import Engine
    from launcher.sequence.apply import SharedModel

logger = logging.getLogger("launcher")

_GETTER = "get_sequence_parallel_world_size"


def sequences_of(
    config: Config, mpu: Any, mesh_param: tuple[int, int] | None, model: nn.Module
) -> tuple[Config, CutBy]:
    """Return the config with the sequence-parallel degree, and the component that splits the sequences.

    Args:
        config: the config as written.
        mpu: model parallelism set up by the script; see `initialize`.
        mesh_param: (data-parallel ranks, sequence-parallel ranks); None: as configured.

    Raises:
        ConfigError: the config and the script contradict each other.
    """
    getter = getattr(mpu, _GETTER, None)
    given = int(getter()) if callable(getter) else 1
    if mesh_param is not None:
        config = with_shared_sequences(config, int(mesh_param[1]), "mesh_param")
        by = CutBy.SCRIPT
    elif given > 1:
        config = with_shared_sequences(config, given, "mpu")
        by = CutBy.LOADER if hasattr(mpu, "shares_in_eval") else CutBy.SCRIPT
    else:
        by = CutBy.HOOKS if config.cp_degree == 1 or _is_transformers(model) else CutBy.SCRIPT
    if by is CutBy.SCRIPT and config.cp_degree > 1 and dist.get_rank() == 0:
        logger.warning(
            "%s: its attention must exchange tokens itself "
            "(deepspeed.sequence.layer.DistributedAttention), and the script must pass each of the %d "
            "ranks its slice of a sequence",
            type(model).__name__,
            config.cp_degree,
        )
    return config, by


def tile(model: nn.Module, config: Config, by: CutBy) -> list[Any]:
    """Compute the loss and the MLPs of the model in tiles, as configured; return the handles that undo it."""
    # scripts that split sequences need the logits of their slice
    shared = config.cp_degree > 1 and by is CutBy.HOOKS
    if not (config.tiled_loss or config.tiled_mlp or (config.tiled_loss is None and shared)):
        return []
    from launcher.sequence.tiled_loss import tile_loss
    from launcher.sequence.tiled_mlp import tile_mlps

    sliced = config.tensor_parallel.sequence_parallel and config.tensor_parallel.degree > 1
    wanted = False if sliced and config.tiled_loss is None else config.tiled_loss
    found: list[Any] = [tile_loss(model, wanted, shared=shared)]
    if config.tiled_mlp:
        found.append(tile_mlps(model))
    return [one for one in found if one is not None]


def share_sequences(
    model: nn.Module, mesh: Mesh, config: Config, by: CutBy, mpu: Any = None
) -> SharedModel | None:
    """Split the sequences of the model along cp; return None without cp, or if the script splits them."""
    degree, section = mesh.axes["cp"].degree, config.context_parallel
    if degree == 1 or by is CutBy.SCRIPT:
        return None
    from launcher.sequence.apply import apply, causal_lm_in
    from launcher.sequence.layout import planned

    layout = planned(causal_lm_in(model), degree, section, tp=mesh.axes["tp"].degree)
    shared = apply(model, mesh, layout)
    if by is CutBy.LOADER:
        shared.takes_slices(in_eval=mpu.shares_in_eval)
    return shared


def verify_shared(engine: Engine, shared: SharedModel) -> None:
    """Check that the loss equals the loss of unsplit sequences. Every rank must call it."""
    from launcher.sequence.verify import verify

    def loss_of(batch: dict[str, torch.Tensor]) -> float:
        return engine.eval_microbatches([batch], [1.0])

    dtypes = [dtype for dtype in (engine.zero.policy.param_dtype, autocast_dtype(engine.resolved)) if dtype]
    training = engine.training
    engine.eval()
    rows = engine.train_micro_batch_size_per_gpu()
    verify(shared, loss_of, rows, min(dtypes, key=lambda dtype: dtype.itemsize))
    engine.train(training)


def _is_transformers(model: nn.Module) -> bool:
    """Return whether it is or contains a transformers model (PEFT), without importing transformers."""
    return any(
        base.__module__ == "transformers.modeling_utils" and base.__name__ == "PreTrainedModel"
        for module in model.modules()
        for base in type(module).__mro__
    )
