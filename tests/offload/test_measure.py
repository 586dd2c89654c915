"""`launch bench io`: every setting is measured, the best is printed as a JSON section, and no files remain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.config import load
from launcher.errors import OffloadError
from launcher.offload import measure
from launcher.offload.measure import IoMeasurement, bench, best, sweep

MIB = 1 << 20


def row(block_size: int, in_flight: int, *rates: float) -> IoMeasurement:
    return IoMeasurement(block_size, in_flight, list(rates), list(rates))


def test_the_smallest_of_the_fast_ones_is_taken() -> None:
    slow, fast, near, once = (
        row(MIB, 2, 1e9, 1e9),
        row(8 * MIB, 8, 5e9, 5e9),
        row(4 * MIB, 8, 4.9e9, 4.9e9),
        row(MIB, 4, 9e9),
    )
    assert best([slow, fast, near, once]) is near


def test_every_setting_is_measured(tmp_path: Path) -> None:
    with bench(tmp_path, 32 * MIB) as made:
        rows = sweep(made, 0.1)
        assert made.file.length == 32 * MIB
    assert {(row.block_size, row.in_flight) for row in rows[1:]} == {
        (block, number) for block in measure.BLOCKS for number in measure.IN_FLIGHT
    }
    assert all(row.write and row.read and min(row.write + row.read) > 0 for row in rows)
    assert not list(tmp_path.glob("launcher*"))


def test_a_directory_that_cannot_have_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(OffloadError, match=r"1,125,899,906,842,624 bytes.*") as told,
        bench(tmp_path, 1 << 50),
    ):
        pass
    assert str(tmp_path) in str(told.value)
    assert not list(tmp_path.glob("launcher*"))


def test_the_command_writes_a_section_that_the_launcher_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "aio.json"
    argv = ["bench", "io", str(tmp_path), "--size", "32M", "--seconds", "1", "--out", str(out)]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "write MB/s" in shown and "256 KiB" in shown and '"block_size"' in shown
    section = json.loads(out.read_text())
    config = load({"train_batch_size": 1, **section})
    assert config.aio.block_size in measure.BLOCKS and config.aio.queue_depth in measure.IN_FLIGHT
    assert main(argv) == 2 and "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["io", "/no/such/place"], "no such directory"),
        (["io", ".", "--size", "many"], "512M"),
        (["io", ".", "--size", "1M"], "too few"),
        (["disk", "."], "io"),
    ],
)
def test_mistakes_are_answered(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    assert words in capsys.readouterr().err
