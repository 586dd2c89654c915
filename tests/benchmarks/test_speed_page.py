"""The speed page: each of our rows next to the fastest and the smallest row of each peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import speed_page
from tests.benchmarks.test_report import record, write


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "zero-small-1.jsonl"
    runs = [
        record("ours 1", 0, 150.0, 900), record("fast", 0, 100.0, 800), record("plain", 0, 50.0, 1000),
        record("ours 1", 1, 120.0, 920), record("fast", 1, 100.0, 820), record("plain", 1, 60.0, 1000),
    ]  # fmt: skip
    write(path, runs)
    return path


def test_a_row_for_each_peer(file: Path) -> None:
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in speed_page.table([file])[2:]]
    assert rows == [
        ["g", "8 ms, 910 MB", "DDP: 10 ms, 810 MB", "**1.35** (1.20-1.50)", "", "1.12"],
        ["g", "8 ms, 910 MB", "plain PyTorch: 18 ms, 1000 MB", "**2.50** (2.00-3.00)", "", "**0.91**"],
    ]


def test_a_group_comes_from_the_newest_file_that_has_it(file: Path, tmp_path: Path) -> None:
    newer = tmp_path / "zero-small-2.jsonl"
    write(newer, [record("ours 1", 0, 400.0, 900), record("fast", 0, 100.0, 800)])
    older = tmp_path / "zero-small-0.jsonl"
    older.write_text(file.read_text().replace('["g"]', '["of before"]'))
    text = "\n".join(speed_page.table([newer, file, older]))
    assert "| g | 2 ms" in text and "| g | 8 ms" not in text and "| of before | 8 ms" in text


def test_only_the_block_of_the_readme_changes(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme, page = tmp_path / "README.md", tmp_path / "speed.md"
    file.write_text(file.read_text().replace('["g"]', '["stage 0"]'))
    readme.write_text(f"before\n{speed_page.BEGIN}\nold\n{speed_page.END}\nafter\n")
    for name, value in {"RESULTS": tmp_path, "README": readme, "PAGE": page}.items():
        monkeypatch.setattr(speed_page, name, value)
    for _ in range(2):
        speed_page.write()
        text = readme.read_text()
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
        assert text.count("| stage 0, 26 M | 8 ms | DDP: 10 ms |") == 1
        assert "commit abc" in page.read_text()
