"""Dropout under tensor parallelism: whose masks agree, and what is recomputed is what was computed."""

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
from launcher.tensor.apply import Options, apply
from tests.pool import RankContext, WorkerPool
from tests.tensor.transparency import CPU, sum_partial
from tests.tensor.zoo import batch_of, tiny_model

DROPOUT: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.3},  # where activations are split
    "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3},  # there, and where they are whole
}


def split_copy(model: nn.Module, axis: Axis, options: Options, *, recompute: bool = False) -> tuple[Any, Any]:
    model = copy.deepcopy(model)
    made = apply(model, axis, options, device=CPU)
    if recompute:
        checkpoint_blocks(model, unit_modules(model), ActivationCheckpointingConfig(), axis)
    return model, made


def gradients_of(model: nn.Module, made: Any, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Of two steps, from the same random state."""
    torch.manual_seed(11)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(**batch).loss.backward()
        sum_partial(model, made)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


def recomputed(ctx: RankContext, kind: str, sequence: bool) -> list[str]:
    """The parameters whose gradients are others with recomputation."""
    axis = Mesh.build(CPU, tp=ctx.world).axes["tp"]
    model, batch = tiny_model(kind, seed=0, **DROPOUT[kind]), batch_of(kind, seed=1, length=16)
    plain, again = (
        gradients_of(*split_copy(model, axis, Options(sequence=sequence), recompute=recompute), batch)
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


def masks(ctx: RankContext, sequence: bool) -> list[tuple[str, Tensor]]:
    """What GPT-2's dropouts dropped in one step: name of the module -> its mask, in order."""
    axis = Mesh.build(CPU, tp=ctx.world).axes["tp"]
    model, _ = split_copy(tiny_model("gpt2", seed=0, **DROPOUT["gpt2"]), axis, Options(sequence=sequence))
    found: list[tuple[str, Tensor]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda m, args, out, name=name: found.append((name, (out == 0) & (args[0] != 0)))
            )
    torch.manual_seed(11)
    model(**batch_of("gpt2", seed=1, length=16))
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_agree_where_activations_are_whole(pool: WorkerPool, sequence: bool) -> None:
    """With sliced sequences only those of the embeddings are."""
    first, second = pool.run(masks, 2, sequence)
    assert {name for name, _ in first} >= {"transformer.drop", "transformer.h.0.attn.resid_dropout"}
    for (name, mine), (other, theirs) in zip(first, second, strict=True):
        assert name == other and mine.any() and theirs.any()
        whole = name == "transformer.drop" or (not sequence)
        assert torch.equal(mine, theirs) == whole, name
