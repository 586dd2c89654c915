"""Attention sends the bytes of the formulas, and nothing that the mask hides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import launcher
from launcher.comm.record import record_collectives
from launcher.sequence import ring, ulysses
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.sequence.families import model_of

ROWS, LENGTH, LAYERS, HEADS, GROUPS, WIDTH, BYTES = 2, 32, 2, 4, 2, 8, 4


def sent(ctx: RankContext, family: str, section: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the bytes that this rank sends (in the forward, in the backward) for each kind of exchange."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "context_parallel": section,
    }
    engine: Any = launcher.initialize(model=model_of(family), config=config, device=DEVICE)[0]
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    with record_collectives() as forward:
        loss = engine(input_ids=ids, labels=ids).loss
    with record_collectives() as backward:
        engine.backward(loss)
    engine.destroy()
    return {
        tag: (
            sum(record.sent for record in forward if record.tag == tag),
            sum(record.sent for record in backward if record.tag == tag),
        )
        for tag in (ulysses.TAG, ring.TAG)
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ulysses(pool: WorkerPool, ranks: int) -> None:
    """Queries and outputs of all heads, keys and values of theirs; a head that several ranks read is sent to each.

    Gradients of the outputs come with those of their log-sum-exps.
    """
    tokens = ROWS * LENGTH // ranks
    keys = max(1, GROUPS // ranks) * (ranks - 1)  # heads that go to the others
    queries = HEADS * (ranks - 1) // ranks
    each = LAYERS * tokens * WIDTH * (2 * queries + 2 * keys) * BYTES
    sums = LAYERS * tokens * queries * BYTES
    for found in pool.run(sent, ranks, "grouped", {"ulysses": ranks}):
        assert found == {ulysses.TAG: (each, each + sums), ring.TAG: (0, 0)}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_zigzag_ring(pool: WorkerPool, ranks: int) -> None:
    """Keys and values are sent to all ranks, and again in the backward, in which their gradients return in fp32."""
    part = LAYERS * ROWS * (LENGTH // ranks) * GROUPS * 2 * WIDTH * BYTES
    for found in pool.run(sent, ranks, "grouped", {"ring": ranks}):
        assert found == {ulysses.TAG: (0, 0), ring.TAG: ((ranks - 1) * part, 2 * (ranks - 1) * part)}


@pytest.mark.parametrize(
    ("family", "seen_by"),
    [("grouped", (3, 2, 1, 0)), pytest.param("window", (1, 1, 1, 0), marks=pytest.mark.full)],
)
def test_what_nobody_may_see_is_not_sent(pool: WorkerPool, family: str, seen_by: tuple[int, ...]) -> None:
    """In contiguous chunks a causal query attends to earlier ones.

    With a window of 5 and chunks of 8, only to the last one.
    """
    part = LAYERS * ROWS * (LENGTH // 4) * GROUPS * 2 * WIDTH * BYTES
    found = pool.run(sent, 4, family, {"ring": 4, "layout": "contiguous"})
    for rank, (mine, number) in enumerate(zip(found, seen_by, strict=True)):
        sees = sum(1 for other in range(rank) if seen_by[other] >= rank - other)
        assert mine[ring.TAG] == (number * part, (number + sees) * part)


def norm_of_a_padded_batch(ctx: RankContext, section: dict[str, Any]) -> float | None:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "context_parallel": section,
    }
    engine: Any = launcher.initialize(model=model_of("window"), config=config, device=DEVICE)[0]
    ids = torch.arange(LENGTH).expand(ROWS, -1) % 13
    mask = (torch.arange(LENGTH) < 20).long().expand(ROWS, -1)
    engine.backward(engine(input_ids=ids, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask).loss)
    engine.step()
    norm: float | None = engine.get_global_grad_norm()
    engine.destroy()
    return norm


def test_what_each_rule_allows_and_all_together_do_not_is_waited_for_by_nobody(pool: WorkerPool) -> None:
    """The last queries of rank 0 have, in their window of 5, keys of rank 1 that are padding."""
    ring, ulysses = (
        pool.run(norm_of_a_padded_batch, 2, {kind: 2}, timeout=60) for kind in ("ring", "ulysses")
    )
    assert ring == pytest.approx(ulysses, rel=1e-6)
