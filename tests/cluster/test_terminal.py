"""Live terminal output as it should appear in a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cluster.terminal import LineLog


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_redrawn_lines_are_logged_in_their_last_state(tmp_path: Path, piece: int) -> None:
    shown = b"start\n\x1b[?25l\r\x1b[2Kstep 1\r\x1b[2K\x1b[32mstep 2\x1b[0m\r\nwindows\r\nend without newline"
    log = LineLog(tmp_path / "log")
    for position in range(0, len(shown), piece):
        log.write(shown[position : position + piece])
    log.close()
    assert (tmp_path / "log").read_text() == "start\nstep 2\nwindows\nend without newline\n"


def test_a_line_redrawn_for_hours_is_not_kept_in_memory(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "log")
    for step in range(10_000):
        log.write(b"\rstep %d" % step)
        assert len(log._line) < 100
    log.close()
    assert (tmp_path / "log").read_text() == "step 9999\n"
