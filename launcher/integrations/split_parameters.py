"""`deepspeed.module_inject.layers`: type checks of tensor-parallel layers, and access to full parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from launcher.engine.fragments import ENGINES
from launcher.errors import LauncherError
from launcher.integrations.kinds import Kind, kind
from launcher.tensor.layers import ColumnParallel, RowParallel, SplitModule
from launcher.tensor.split import whole
from launcher.zero import ShardedParameter
from launcher.zero.slot import ParamSlot

WHERE = "GatherReplacedLayerParams"


def _split_layer(name: str, split: type[SplitModule]) -> Kind:
    return kind(
        name,
        lambda one: isinstance(one, split),
        "a tensor-parallel layer",
        "set tensor_parallel in the JSON; its partition_config specifies custom layers",
    )


LinearLayer = _split_layer("LinearLayer", ColumnParallel)
LinearAllreduce = _split_layer("LinearAllreduce", RowParallel)


class GatherReplacedLayerParams:
    """Gathers tensor-parallel parameters: `with GatherReplacedLayerParams(parameters, model): ...`.

    Inside, the parameters are unsharded and read-only: changing one is an error. Every rank of the
    tensor-parallel group must enter.

    Args:
        params: one parameter or several; parameters that are not split are left unchanged.
        module: the model that they belong to; unused.
        enabled: false makes this do nothing.

    Raises:
        LauncherError: a parameter is sharded by ZeRO (stage 3), or was changed inside.
    """

    def __init__(self, params: Tensor | Iterable[Tensor], module: nn.Module, enabled: bool = True) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self._params = given if enabled else []
        self._kept: list[tuple[Tensor, ParamSlot, Tensor]] = []

    def __enter__(self) -> None:
        for param in self._params:
            for engine in ENGINES:
                slot = engine.zero.find_slot(param)
                if slot is not None and not slot.split.is_whole:
                    self._assemble(param, slot, slot.split_axis)

    def _assemble(self, param: Tensor, slot: ParamSlot, axis: Any) -> None:
        if isinstance(param, ShardedParameter):
            raise LauncherError(
                "a parameter is sharded by both ZeRO stage 3 and tensor parallelism",
                where=WHERE,
                fix="use stage 0, 1 or 2, or engine.save_16bit_model(), which writes full parameters at every stage",
            )
        local = param.data
        param.data = whole(local, slot.split, axis)
        self._kept.append((param, slot, local))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        changed = False
        for param, slot, local in self._kept:
            changed |= not torch.equal(slot.split.take(param.data), local)
            param.data = local
        self._kept = []
        if changed and kind is None:
            raise LauncherError(
                "a parameter was changed while it was gathered, and the change is discarded",
                where=WHERE,
                fix="change this rank's part outside the context, or load the values with engine.load_checkpoint()",
            )
