"""The styles of a plan: which mixin a module gets, and along which dim its parameters are split.

The names are those of transformers' plans (transformers/distributed/tensor_parallel.py); the rest are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from launcher.tensor.layers import (
    ColumnParallel,
    HiddenParallelEmbedding,
    IdentityExpert,
    LatentAndRope,
    PartialExperts,
    RowParallel,
    SlicedHeads,
    SplitModule,
    SummedOutput,
    VocabularyHead,
    VocabularyParallelEmbedding,
    WholeNorm,
)

Side = Literal["out", "in", "rows", "columns", "first", "last"]


@dataclass(frozen=True)
class Style:
    """One way to split a module or parameter.

    Args:
        mixin: mixin for a module that a pattern matches; None: its forward is unchanged.
        side: "out" or "in" features of a linear layer; "rows" or "columns" of an embedding; the "first"
            or "last" dim of any parameter; None: nothing is split.
        packed: proportions of packed matrices, if the rule has none.
        gathers: the output is gathered.
        slices: the input is whole, and each rank takes its slice.
        takes: each rank takes its slice of the output.
        partial: gradients of the module's parameters, which all ranks hold, are summed over the ranks.
        uneven: the ranks' shards may differ in size.
    """

    mixin: type[SplitModule] | None = None
    side: Side | None = None
    packed: tuple[int, ...] = (1,)
    gathers: bool = False
    slices: bool = False
    takes: bool = False
    partial: bool = False
    uneven: bool = False


_COLUMN = Style(ColumnParallel, "out")
_GATHERED = Style(ColumnParallel, "out", gathers=True)
_ROW = Style(RowParallel, "in")
_SLICING = Style(RowParallel, "in", slices=True)

STYLES: dict[str, Style] = {
    "colwise": _COLUMN,
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "packed_colwise": Style(ColumnParallel, "out", packed=(1, 1)),
    "rowwise": _ROW,
    "rowwise_split_input": _SLICING,
    "rowwise_rep": _SLICING,
    "rowwise_slice_output": Style(RowParallel, "in", takes=True),
    "packed_rowwise": Style(RowParallel, "in", packed=(1, 1)),
    "embedding_rowwise": Style(VocabularyParallelEmbedding, "rows", uneven=True),
    "embedding_colwise": Style(HiddenParallelEmbedding, "columns"),
    "vocabulary_head": Style(VocabularyHead, "out", uneven=True),
    "replicated_with_grad_allreduce": Style(partial=True),
    "mla_kv_a_proj": Style(LatentAndRope),
    "moe_tp_experts": Style(PartialExperts),
    "moe_identity_expert": Style(IdentityExpert),
    "all_reduce": Style(SummedOutput),
    "heads": Style(SlicedHeads),
    "whole_norm": Style(WholeNorm, partial=True),
    "channels": Style(side="first"),
    "last": Style(side="last"),
    "local_params": Style(),
    "replicate": Style(),
}


def split_dim(style: Style, module: nn.Module | None, tensor: Tensor, *, bias: bool = False) -> int | None:
    """Return the dim of `tensor` that a style splits; None: it stays whole.

    Args:
        module: the owner of `tensor`, if the pattern matched the module; None: the pattern matched the
            parameter.
    """
    if style.side is None:
        return None
    dims = tensor.dim()
    if style.side in ("first", "last"):
        return 0 if style.side == "first" else dims - 1
    if bias or dims == 1:
        return dims - 1 if style.side == "out" else None
    if style.side in ("rows", "columns"):
        return dims - 2 if style.side == "rows" else dims - 1
    last = (style.side == "in") != isinstance(module, Conv1D)  # Conv1D stores [in, out]
    return dims - 1 if last else dims - 2
