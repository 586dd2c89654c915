"""The reference is repeatable, independent of how a batch is split, and learns something."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from tests.pool.reference import batch, share, tiny_gpt2, tiny_llama, train_plain

adam = partial(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_a_run_learns_and_repeats_exactly(build: Callable[[], PreTrainedModel]) -> None:
    first, second = (train_plain(build(), batch, adam, steps=10) for _ in range(2))
    assert first.losses == second.losses
    assert first.grad_norms == second.grad_norms
    assert first.losses[-1] < 0.8 * first.losses[0]
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_splitting_the_batch_changes_nothing_but_rounding() -> None:
    whole = train_plain(tiny_llama(), batch, adam, steps=5)
    split = train_plain(tiny_llama(), batch, adam, steps=5, accumulation=4)
    assert split.losses == pytest.approx(whole.losses, rel=1e-5)
    assert split.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)


def test_clipping_bounds_the_step_but_not_the_reported_norm() -> None:
    sgd = partial(torch.optim.SGD, lr=1.0)
    start = dict(tiny_llama().named_parameters())
    free = train_plain(tiny_llama(), batch, sgd, steps=1)
    held = train_plain(tiny_llama(), batch, sgd, steps=1, clip=0.01)
    assert held.grad_norms == free.grad_norms
    moved = torch.cat([(held.weights[name] - p).flatten() for name, p in start.items()])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_bf16_keeps_fp32_masters_near_the_fp32_run() -> None:
    exact = train_plain(tiny_llama(), batch, adam, steps=5)
    rounded = train_plain(tiny_llama(), batch, adam, steps=5, accumulation=2, dtype=torch.bfloat16)
    assert rounded.losses == pytest.approx(exact.losses, rel=2e-2)
    assert rounded.losses != exact.losses
    assert all(w.dtype == torch.float32 for w in rounded.weights.values())
    assert any(not torch.equal(w, w.bfloat16().float()) for w in rounded.weights.values())


def test_tied_models_have_each_weight_once() -> None:
    tied, untied = (train_plain(tiny_llama(tied=t), batch, adam, steps=1).weights for t in (True, False))
    assert "lm_head.weight" not in tied
    assert set(untied) == set(tied) | {"lm_head.weight"}


def test_the_schedule_is_followed() -> None:
    frozen = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.0)
    run = train_plain(tiny_llama(), batch, adam, steps=2, schedule=frozen)
    for name, p in tiny_llama().named_parameters():
        assert torch.equal(run.weights[name], p.detach())


def test_a_batch_is_dealt_out_once_over_all_topologies() -> None:
    ids = batch(3, sequences=12)
    assert torch.equal(ids, batch(3, sequences=12))
    assert not torch.equal(ids, batch(4, sequences=12))
    for world, accumulation in [(1, 1), (2, 3), (4, 3), (3, 1)]:
        parts = [share(ids, rank, world, accumulation) for rank in range(world)]
        assert all(len(part) == accumulation for part in parts)
        rows = [parts[rank][micro] for micro in range(accumulation) for rank in range(world)]
        assert torch.equal(torch.cat(rows), ids)
    with pytest.raises(ValueError, match="12 sequences do not divide"):
        share(ids, 0, 5)
