"""Blockwise quantization: bounded error, expected bytes, and non-finite values are preserved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from launcher.comm import Mesh, all_to_all, record_collectives
from launcher.comm.quantized import (
    BLOCK,
    dequantize,
    packed_bytes,
    quantize,
    quantized_all_gather,
    quantized_reduce_scatter,
)
from tests.pool import RankContext, WorkerPool

BITS = pytest.mark.parametrize("bits", [8, 4])


def there_and_back(values: Tensor, bits: int) -> Tensor:
    return dequantize(quantize(values, bits), torch.empty_like(values), bits)


def scales(values: Tensor, bits: int) -> Tensor:
    """Return the scale of each value: its block's largest magnitude divided by the largest code."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    most = blocks.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return most.expand_as(blocks).reshape(-1)[: values.numel()]


@BITS
@settings(max_examples=60, deadline=None)
@given(numel=st.integers(1, 1100), seed=st.integers(0, 1000), power=st.integers(-30, 30))
def test_no_value_is_off_by_more_than_half_a_scale(bits: int, numel: int, seed: int, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) * 2.0**power
    off = (there_and_back(values, bits) - values).abs()
    assert (off <= scales(values, bits) * (0.5 + 1e-4)).all()


@BITS
def test_what_was_unpacked_packs_again_to_the_same(bits: int) -> None:
    values = torch.randn(5000)
    once = there_and_back(values, bits)
    assert torch.equal(quantize(once, bits), quantize(values, bits))
    assert torch.equal(there_and_back(torch.zeros(300), bits), torch.zeros(300))


@BITS
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_overflow_is_still_seen(bits: int, bad: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    got = there_and_back(values, bits)
    assert not got[:BLOCK].isfinite().any() and got[BLOCK:].eq(1).all()


@BITS
@pytest.mark.parametrize("numel", [1, 3, 16, 255, 256, 257, 1000, 4096])
def test_bytes(bits: int, numel: int) -> None:
    codes = -(-numel * bits // 8)
    assert quantize(torch.randn(numel), bits).numel() == packed_bytes(numel, bits)
    assert 0 <= packed_bytes(numel, bits) - codes - 4 * -(-numel // BLOCK) < 4


def values_of(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def collect(ctx: RankContext, size: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    axis = Mesh.build(torch.device("cpu")).dp
    full, out = torch.empty(ctx.world * size), torch.ones(size)
    with record_collectives() as records:
        quantized_all_gather(full, quantize(values_of(ctx.rank, size), 8), axis, "u/forward").wait()
        terms = values_of(ctx.rank, ctx.world * size)
        halves = [slice(0, size // 3), slice(size // 3, size)]
        for part in halves:
            quantized_reduce_scatter(terms, out, axis, "u/backward", within=part, accumulate=True).wait()
    mine = [torch.full((size,), 10.0 * ctx.rank + peer) for peer in range(ctx.world)]
    got = [
        part if rank == ctx.rank else torch.empty(size) for rank, part in enumerate(mine)
    ]  # one's own stays
    all_to_all(mine, got, axis, "u/there").wait()
    return full, out, torch.stack(got)[:, 0], [r.sent for r in records]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [999, 8 << 15])
def test_collectives(pool: WorkerPool, world: int, size: int) -> None:
    """All ranks get the same result over every transport.

    A sum is off by at most half a scale per term except its own.
    """
    ranks = pool.run(collect, world, size)
    for rank, (full, out, got, sent) in enumerate(ranks):
        assert torch.equal(full, torch.cat([there_and_back(values_of(r, size), 8) for r in range(world)]))
        terms = [values_of(r, world * size).chunk(world)[rank] for r in range(world)]
        parts = [
            [t if r == rank else there_and_back(t, 4) for t in (terms[r][: size // 3], terms[r][size // 3 :])]
            for r in range(world)
        ]
        torch.testing.assert_close(out, 1 + sum(torch.cat(p) for p in parts))
        assert got.tolist() == [10.0 * r + rank for r in range(world)]
        others = world - 1
        halves = [packed_bytes(size // 3, 4), packed_bytes(size - size // 3, 4)]
        want = [packed_bytes(size, 8) * others, *[half * others for half in halves]]
        assert sent == (want if others else [])
