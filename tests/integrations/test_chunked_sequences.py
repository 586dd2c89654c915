"""Chunked sequences give the values and gradients of the full sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from launcher.errors import ArgumentsError
from launcher.integrations.chunked_sequences import (
    FPDT_FFN,
    FPDT_Attention,
    FPDT_InputConstruct,
    FPDT_LogitsLoss,
)
from tests.pool import RankContext, WorkerPool

LENGTH, BATCH, HIDDEN, VOCABULARY = 8, 2, 4, 7


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(*shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("add_bias", [True, False])
def test_two_layers(add_bias: bool) -> None:
    given = weights((LENGTH, BATCH, HIDDEN), (6, HIDDEN), (6,), (HIDDEN, 6), (HIDDEN,))
    x, w1, b1, w2, b2 = given
    out, bias = FPDT_FFN.apply(x, w1, b1, w2, b2, add_bias, 2)
    assert (bias is None) == add_bias
    total = out if bias is None else out + bias
    want = functional.gelu(x @ w1.T + b1, approximate="tanh") @ w2.T + b2
    torch.testing.assert_close(total, want)
    found = torch.autograd.grad(total.square().sum(), given)
    torch.testing.assert_close(found, torch.autograd.grad(want.square().sum(), given))


def test_chunks_are_whole() -> None:
    x, w1, b1 = weights((LENGTH, BATCH, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,))
    with pytest.raises(ArgumentsError, match="8 tokens cannot be split evenly into chunks of 3"):
        FPDT_FFN.apply(x, w1, b1, w1, b1, True, 3)
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=4)
    with pytest.raises(ArgumentsError, match="8 tokens in chunks of 4 cannot be split evenly over 3 ranks"):
        FPDT_InputConstruct(torch.zeros(1, 8), None, None, None, None, args, 3, 0)


def test_many_chunks_round_no_more_than_one() -> None:
    """With bf16, weight gradients of the chunks are summed in fp32."""
    given = [
        one.detach().bfloat16().requires_grad_()
        for one in weights((1024, 1, 16), (16, 16), (16,), (16, 16), (16,))
    ]
    x, w1, b1, w2, b2 = given
    found = []
    for size in 1024, 4:
        out, _ = FPDT_FFN.apply(x, w1, b1, w2, b2, True, size)
        found.append(torch.autograd.grad(out.float().square().sum(), given[1:]))
    losses = [
        FPDT_LogitsLoss.apply(x, (x[..., 0].t() > 0).long(), w1, 0, 1, None, count) for count in (1, 256)
    ]
    found[0] += torch.autograd.grad(losses[0].sum(), w1)
    found[1] += torch.autograd.grad(losses[1].sum(), w1)
    for one, many in zip(*found, strict=True):
        assert (one.float() - many.float()).norm() <= 0.01 * one.float().norm()
    with pytest.raises(ArgumentsError, match="1024 tokens cannot be split into 3 equal chunks"):
        FPDT_LogitsLoss.apply(x, (x[..., 0].t() > 0).long(), w1, 0, 1, None, 3)


def check_losses(ctx: RankContext) -> None:
    """Rank r has every second piece of two tokens."""
    ranks, rank = ctx.world, ctx.rank
    x, head = weights((LENGTH, BATCH, HIDDEN), (VOCABULARY, HIDDEN))
    labels = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCABULARY
    logits = (x @ head.T).float()
    want = functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
    scale = torch.arange(1.0, LENGTH + 1)[:, None]
    of_x, of_head = torch.autograd.grad((want.view(LENGTH, BATCH) * scale).sum(), [x, head])

    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=LENGTH // 2)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    dealt = FPDT_InputConstruct(positions, labels, positions, "mask", positions, args, ranks, rank).generate()
    tokens, own_labels, order, mask, own_positions = dealt
    assert mask == "mask" and order is not None and own_labels is not None
    assert torch.equal(tokens, own_positions) and torch.equal(
        order[:, rank * len(tokens[0]) :][:, : len(tokens[0])], tokens
    )
    mine = x.detach()[tokens[0]].requires_grad_()
    losses = FPDT_LogitsLoss.apply(mine, own_labels, head, rank, ranks, dist.group.WORLD, 2)
    torch.testing.assert_close(losses, want.view(LENGTH, BATCH)[order[0]])
    of_mine, of_own_head = torch.autograd.grad((losses * scale[order[0]]).sum(), [mine, head])
    torch.testing.assert_close(of_mine, of_x[tokens[0]])
    dist.all_reduce(of_own_head)
    torch.testing.assert_close(of_own_head, of_head)


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses(pool: WorkerPool, ranks: int) -> None:
    pool.run(check_losses, ranks)


def check_attention(ctx: RankContext) -> None:
    """Four query heads, two key heads; half of each head is rotated."""
    ranks, rank, width = ctx.world, ctx.rank, 4
    shapes = ((LENGTH, BATCH, HIDDEN), (8 * width, HIDDEN), (8 * width,), (HIDDEN, 4 * width))
    x, qkv, bias, dense = (one.detach().double().requires_grad_() for one in weights(*shapes))
    angles = torch.arange(LENGTH, dtype=x.dtype).view(-1, 1, 1, 1) / torch.tensor([2.0, 2.0])
    rotary = (angles.cos(), angles.sin())
    split = (x.transpose(0, 1) @ qkv.T + bias).unflatten(-1, (8, width)).transpose(1, 2)
    query, key, value = split[:, :4], split[:, 4:6], split[:, 6:]

    def turned(one: Tensor) -> Tensor:
        cos, sin = (part[:, 0, 0] for part in rotary)
        first, second = one[..., :1], one[..., 1:2]
        return torch.cat((one[..., :2] * cos + torch.cat((-second, first), -1) * sin, one[..., 2:]), -1)

    query, key = turned(query), turned(key).repeat_interleave(2, 1)
    scores = query @ key.transpose(2, 3) / width**0.5
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    mixed = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    want = mixed.transpose(1, 2).flatten(2).transpose(0, 1) @ dense.T
    given = [x, qkv, bias, dense]
    slopes = torch.autograd.grad(want.square().sum(), given)

    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=LENGTH // 2)
    order = torch.arange(LENGTH)[None]
    own = FPDT_InputConstruct(order, None, None, None, None, args, ranks, rank).generate()[0][0]
    config = SimpleNamespace(
        kv_channels=width, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.0
    )
    layer = FPDT_Attention(
        config, qkv, bias, dense, torch.ones(HIDDEN), dist.group.WORLD, chunk_size=LENGTH // 2
    )
    mine = x.detach()[own].requires_grad_()
    out, second = layer(mine, None, None, rotary)
    torch.testing.assert_close(out, want[own])
    assert second is not None
    found = torch.autograd.grad(out.square().sum(), [mine, qkv, bias, dense])
    torch.testing.assert_close(found[0], slopes[0][own])
    for one, whole in zip(found[1:], slopes[1:], strict=True):
        dist.all_reduce(one)
        torch.testing.assert_close(one, whole)
    with pytest.raises(ArgumentsError, match="in chunks of 3"):
        FPDT_Attention(config, qkv, bias, dense, None, dist.group.WORLD, chunk_size=3)(mine, None, None, None)
    if ranks == 2:
        config.num_key_value_heads = 1
        with pytest.raises(ArgumentsError, match="1 key heads cannot be split evenly over 2 ranks"):
            FPDT_Attention(config, qkv, bias, dense, None, dist.group.WORLD)


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention(pool: WorkerPool, ranks: int) -> None:
    pool.run(check_attention, ranks)
