"""Dropout with tensor parallelism: which masks agree, and that recomputation uses the same masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.comm import Axis, Mesh
from launcher.config import ActivationCheckpointingConfig
from launcher.models.activation import checkpoint_blocks
from launcher.models.units import unit_modules
from launcher.tensor.apply import apply
from launcher.tensor.split_model import TensorParallelOptions
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.tensor.transparency import sum_partial
from tests.tensor.zoo import batch_of, tiny_model

DROPOUT: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.3},  # where activations are split
    "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3},  # there, and where they are whole
}


def split_copy(
    model: nn.Module, axis: Axis, options: TensorParallelOptions, *, recompute: bool = False
) -> tuple[Any, Any]:
    model = copy.deepcopy(model)
    made = apply(model, axis, options, device=DEVICE)
    if recompute:
        checkpoint_blocks(model, unit_modules(model), ActivationCheckpointingConfig(), axis)
    return model, made


def gradients_of(model: nn.Module, made: Any, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the gradients of two steps from the same random state."""
    torch.manual_seed(11)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(**batch).loss.backward()
        sum_partial(model, made)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


def recomputed(ctx: RankContext, kind: str, sequence: bool) -> list[str]:
    """Return the parameters whose gradients differ with recomputation."""
    axis = Mesh.build(DEVICE, tp=ctx.world).axes["tp"]
    model, batch = tiny_model(kind, seed=0, **DROPOUT[kind]), batch_of(kind, seed=1, length=16)
    plain, again = (
        gradients_of(
            *split_copy(model, axis, TensorParallelOptions(sequence=sequence), recompute=recompute), batch
        )
        for recompute in (False, True)
    )
    assert any(not torch.equal(plain[0][name], plain[1][name]) for name in plain[0])  # it does drop out
    return [
        name for a, b in zip(plain, again, strict=True) for name in a if not torch.equal(a[name], b[name])
    ]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", DROPOUT)
def test_recomputation_drops_out_the_same(pool: WorkerPool, kind: str, sequence: bool) -> None:
    for names in pool.run(recomputed, 2, kind, sequence):
        assert names == []


def masks(ctx: RankContext, sequence: bool) -> list[Tensor]:
    """Return GPT-2's dropout masks of one step, in order: [batch, sequence, hidden] or [batch, heads, sequence,
    sequence].
    """
    axis = Mesh.build(DEVICE, tp=ctx.world).axes["tp"]
    model, _ = split_copy(
        tiny_model("gpt2", seed=0, **DROPOUT["gpt2"]), axis, TensorParallelOptions(sequence=sequence)
    )
    found: list[Tensor] = []
    dropout = nn.functional.dropout

    def watched(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = dropout(x, *args, **kwargs)
        found.append((y == 0) & (x != 0))
        return y

    torch.manual_seed(11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "dropout", watched)
        model(**batch_of("gpt2", seed=1, length=16))
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_agree_where_activations_are_whole(pool: WorkerPool, sequence: bool) -> None:
    """Never in attention; otherwise always, or, with sequence parallelism, only those of the embeddings."""
    first, second = pool.run(masks, 2, sequence)
    assert [mask.dim() for mask in first] == [3, 4, 3, 3, 4, 3, 3]
    for place, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert mine.any() and theirs.any()
        assert torch.equal(mine, theirs) == (mine.dim() == 3 and (place == 0 or not sequence)), place
