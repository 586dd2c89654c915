"""Token dispatch and combine: values, gradients and bytes, for any distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import launcher
from launcher.comm import Mesh
from launcher.comm.record import record_collectives
from launcher.errors import LauncherError
from launcher.experts.dispatch import COMBINE, DISPATCH, WEIGHTS, combine, dispatch
from launcher.experts.routing import CHOICES, COUNTS, Routing, RowsBy
from tests.experts.families import VOCAB, model_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE

K, WIDTH, EXPERTS = 2, 3, 5


def inputs(rank: int, index: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (hidden [T, WIDTH], index [T, K], weights [T, K]) of a rank."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(len(index), WIDTH, generator=generator).requires_grad_()
    weights = torch.rand(len(index), K, generator=generator).requires_grad_()
    return hidden, torch.tensor(index, dtype=torch.int64).view(-1, K), weights


def mixed(hidden: Tensor, index: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Return the result of one process: expert e multiplies by scales[e]; an invalid index gives 0."""
    known = (index >= 0) & (index < EXPERTS)
    factor = (scales[index.clamp(0, EXPERTS - 1)] * weights * known).sum(1, keepdim=True)
    return hidden * factor


def exchanged(
    ctx: RankContext, indices: list[list[list[int]]], by: RowsBy
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (output, gradients of hidden, weights and this rank's scales)."""
    ep = Mesh.build(DEVICE).split_for_experts(2)[1]
    hidden, index, weights = inputs(ep.rank, indices[ep.rank])
    scales = torch.arange(1.0, EXPERTS + 1)[slice(0, 3) if ep.rank == 0 else slice(3, 5)].requires_grad_()
    routing = Routing.of(ep, [3, 2], index, by=by)
    received, carried = dispatch(hidden, weights, routing)
    results = received * scales[routing.local_experts][:, None]
    if not len(received):
        results = torch.zeros_like(received)  # as experts do that loop over those with tokens
    out = combine(results, carried, received, routing, trains=True)
    out.square().sum().backward()
    assert hidden.grad is not None and weights.grad is not None
    found = torch.zeros_like(scales) if scales.grad is None else scales.grad
    return out.detach(), hidden.grad, weights.grad, found


ROUTINGS = {
    "to all": [[[0, 4], [3, 1], [2, 0], [4, 3], [1, 2]], [[4, 0], [4, 1], [2, 3]]],
    "to one expert": [[[4, 4]] * 3, [[4, 4]] * 2],
    "none from one rank": [[[0, 3], [1, 4]], []],
    "some to no expert": [[[0, EXPERTS], [-1, 4]], [[EXPERTS, EXPERTS], [9, 2]]],
}


@pytest.mark.parametrize("by", ["pairs", "tokens"])
@pytest.mark.parametrize("indices", ROUTINGS.values(), ids=ROUTINGS)
def test_results_and_gradients_are_those_of_one_process(
    pool: WorkerPool, indices: list[list[list[int]]], by: RowsBy
) -> None:
    scales = torch.arange(1.0, EXPERTS + 1).requires_grad_()
    wanted = []
    for rank, index in enumerate(indices):
        hidden, picked, weights = inputs(rank, index)
        out = mixed(hidden, picked, weights, scales)
        out.square().sum().backward()
        wanted.append((out.detach(), hidden.grad, weights.grad))
    found = pool.run(exchanged, 2, indices, by)
    for mine, (out, d_hidden, d_weights) in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine[0], out)
        torch.testing.assert_close(mine[1], d_hidden)
        torch.testing.assert_close(mine[2], d_weights)
    assert scales.grad is not None
    torch.testing.assert_close(torch.cat([found[0][3], found[1][3]]), scales.grad)


def in_16_bits(ctx: RankContext, wide: torch.dtype, by: RowsBy) -> tuple[Tensor, Tensor]:
    """Return (output, gradient of the weights) for bf16 hidden states and weights of another dtype, with identity
    experts.
    """
    ep = Mesh.build(DEVICE).split_for_experts(2)[1]
    hidden, index, weights = inputs(ep.rank, [[0, 4], [3, 1], [2, 0]])
    weights = weights.detach().to(wide).requires_grad_()
    routing = Routing.of(ep, [3, 2], index, by=by)
    received, carried = dispatch(hidden.to(torch.bfloat16), weights, routing)
    out = combine(received, carried, received, routing, trains=True)
    out.float().sum().backward()
    assert weights.grad is not None and out.dtype == torch.bfloat16 and weights.grad.dtype == wide
    return out.detach(), weights.grad


@pytest.mark.parametrize(
    ("wide", "by", "roundings"),
    [
        (torch.float32, "pairs", 1),
        (torch.bfloat16, "pairs", 1),
        (torch.float32, "tokens", 2),
        (torch.bfloat16, "tokens", 2),
    ],
)
def test_how_often_sums_of_16_bits_are_rounded(
    pool: WorkerPool, wide: torch.dtype, by: RowsBy, roundings: int
) -> None:
    """Once, or also in the sums that the experts' ranks return."""
    for rank, (out, d_weights) in enumerate(pool.run(in_16_bits, 2, wide, by)):
        hidden, _, weights = inputs(rank, [[0, 4], [3, 1], [2, 0]])
        rows = hidden.detach().to(torch.bfloat16)
        want = rows.double() * weights.detach().to(wide).double().sum(1, keepdim=True)
        half_of_the_last_bit = 2**-8
        torch.testing.assert_close(out.double(), want, rtol=roundings * half_of_the_last_bit, atol=0)
        torch.testing.assert_close(d_weights, rows.float().sum(1, keepdim=True).expand(-1, K).to(wide))


def sent(ctx: RankContext, by: RowsBy) -> dict[str, tuple[int, int, int]]:
    """Return tag -> (bytes in the forward, bytes sent in the forward, bytes sent in the backward)."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "expert_parallel": {"size": 2, "dispatch": by},
    }
    engine: Any = launcher.initialize(model=model_of("all"), config=config, device=DEVICE)[0]
    ids = torch.randint(0, VOCAB, (1, 16))
    with record_collectives() as forward:
        loss = engine(input_ids=ids, labels=ids).loss
    with record_collectives() as backward:
        engine.backward(loss)
    engine.destroy()
    return {
        tag: (
            sum(r.nbytes for r in forward if r.tag == tag),
            sum(r.sent for r in forward if r.tag == tag),
            sum(r.sent for r in backward if r.tag == tag),
        )
        for tag in (COUNTS, CHOICES, DISPATCH, WEIGHTS, COMBINE)
    }


def test_bytes_are_tokens_times_experts_times_width(pool: WorkerPool) -> None:
    """Each token uses all 4 experts, half of which are on the other rank; both directions, forward and backward."""
    layers, tokens, k, width, experts = 2, 16, 4, 32, 4
    rows = layers * tokens * k * width * 4
    counts = (
        layers * (experts + 2 * 2) * 8
    )  # for each rank its experts, its rows, and what kind of call it is
    for found in pool.run(sent, 2, "pairs"):
        assert found[DISPATCH] == found[COMBINE] == (rows, rows // 2, rows // 2)
        assert found[COUNTS] == (counts, counts // 2, 0)
        assert found[CHOICES] == found[WEIGHTS] == (0, 0, 0)


def test_by_tokens_each_rank_gets_a_token_once(pool: WorkerPool) -> None:
    """The same call: each token goes to both ranks, with its 4 experts and their weights."""
    layers, tokens, ranks, k, width = 2, 16, 2, 4, 32
    rows, beside = layers * tokens * ranks * width * 4, layers * tokens * ranks * k * 4
    for found in pool.run(sent, 2, "tokens"):
        assert found[DISPATCH] == found[COMBINE] == (rows, rows // 2, rows // 2)
        assert found[WEIGHTS] == (beside, beside // 2, beside // 2)
        assert found[CHOICES] == (2 * beside, beside, 0)  # the numbers of experts are of 8 bytes


def alone(ctx: RankContext) -> str:
    config = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"size": 2}}
    engine: Any = launcher.initialize(model=model_of("plain"), config=config, device=DEVICE)[0]
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(LauncherError) as error:
        if ctx.rank == 0:
            with torch.no_grad():
                engine(input_ids=ids)
        else:
            engine(input_ids=ids, labels=ids)
    engine.destroy()
    return str(error.value)


def test_a_rank_that_evaluates_alone_is_told(pool: WorkerPool) -> None:
    for said in pool.run(alone, 2):
        assert "ep rank 0 without gradients, ep rank 1 with gradients" in said
