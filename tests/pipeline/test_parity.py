"""Pipeline-parallel models train like one process: a sample here, the whole table in `make stages`."""

from __future__ import annotations

import pytest

from tests.pipeline.parity_table import DEPTHS, MICROBATCHES, SCHEDULES, TOLERANCE, Case, compare, differences
from tests.pool import WorkerPool

SAMPLE = [
    *[
        (2, Case(schedule, 4, stage, tied))
        for schedule in SCHEDULES
        for stage, tied in ((0, True), (2, False))
    ],
    *[(2, Case("1f1b", 4, stage, tied)) for stage in (1, 3) for tied in (True, False)],
    *[(2, Case("zb-h1", microbatches, 3, True)) for microbatches in (1, 2, 8)],
    *[(4, Case(schedule, 8, 3, True)) for schedule in ("1f1b", "zbv")],
    (4, Case("interleaved", 2, 1, True)),
]


def test_the_table_has_what_is_promised() -> None:
    assert (DEPTHS, MICROBATCHES) == ((2, 4), (1, 2, 4, 8))
    assert SCHEDULES == ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


@pytest.mark.pairwise
@pytest.mark.parametrize(("world", "case"), SAMPLE, ids=str)
def test_as_one_process(pool: WorkerPool, world: int, case: Case) -> None:
    for rank in pool.run(differences, world, [case], 5):
        for found in rank:
            assert found.largest <= TOLERANCE, found
            assert found.held <= found.promised_held
            assert found.deferred <= found.promised_deferred


def test_a_wrong_gradient_is_seen(pool: WorkerPool) -> None:
    """Checks the comparison itself: a run with other microbatches gives other results."""
    found = pool.run(compare, 2, Case("1f1b", 4, 0, False), 3, 1)[0]
    assert found.largest > TOLERANCE
