"""The table of collectives: a row per caller and size, and one for a caller whose messages vary."""

from __future__ import annotations

import pytest

from launcher.monitor.comms import MOST_SIZES, CommsLog


def test_messages_of_varying_sizes_share_a_row() -> None:
    log = CommsLog()
    for size in range(1, MOST_SIZES + 2):
        log.add("all_to_all", "experts/dispatch", 1024 * size, 512 * size, 0.001, 0.0005)
    for size in range(1, MOST_SIZES + 1):
        log.add("all_reduce", "layers.0/norm", size, size, 0.001, 0.0)
    head, *lines = log.table().splitlines()
    assert head.startswith("operation   caller")
    rows = [line for line in lines if line.startswith("all_to_all")]
    assert len(lines) == MOST_SIZES + 1 and len(rows) == 1
    assert rows[0].split() == ["all_to_all", "dispatch", "1.00", "KiB", "-", "9.00", "KiB", "9", "9.00", "1.000",
                               "4.50", "0.04", "0.02"]  # fmt: skip


def test_waiting_for_stragglers_is_added_up() -> None:
    log = CommsLog()
    for size in range(MOST_SIZES + 1):
        log.add("all_to_all", "experts/dispatch", size, size, 0.003, 0.0)
    fastest = {key: 0.001 for key in list(log.rows)[1:]}  # another rank had no message of the first size
    cell = log.table(fastest).splitlines()[1].split()[-1]
    assert float(cell) == pytest.approx(2.0 * MOST_SIZES)
