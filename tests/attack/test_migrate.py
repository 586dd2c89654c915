"""`launch check --migrate` loses nothing: if a value cannot be read, or would be corrected, nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.config import load

LOST = [
    ('{"train_batch_size": 8, "bf16": {"enabled": True}}', "bf16.enabled"),
    ('{"train_batch_size": 8, "zero_optimization": {"stage": {{STAGE}}}}', "not valid JSON"),
    ('{"train_batch_size": 8, "zero_optimization": {"stage": $STAGE}}', "zero_optimization.stage"),
    ('{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"betas": [None, 0.9]}}}', "betas[0]"),
    ('{"train_batch_size": 8, "train_batch_size": 16}', "train_batch_size"),
    ('{"train_batch_size": 8, "gradient_clipping": Infinity}', "gradient_clipping"),
    ('{"train_batch_size": 8, "gradient_clipping": NaN}', "gradient_clipping"),
    ('{"train_batch_size": 8, "disable_allgather": yes}', "disable_allgather"),
]
"""A text, and what is told of it."""

KEPT = [
    '{"train_batch_size": 8, "steps_per_print": Infinity, "zero_optimization": {"stage": 2, "cpu_offload": true}}',
    '{"train_batch_size": 8, /* why */ "zero_allow_untested_optimizer": true,}',
    '{"train_batch_size": 8.0, "unknown_key": {"a": [1, null, "x"]}, "zero_optimization": {"stage": "3"}}',
    '{"train_batch_size": 8, "autotuning": {"enabled": true}}',
]
"""Read whole; some have mistakes, which are still there afterwards."""


def test_nothing_is_written_where_something_would_be_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for text, says in LOST:
        with subtests.test(text):
            old.write_text(text)
            assert main(["check", str(old), "--migrate", str(new)]) == 1
            said = capsys.readouterr().out
            assert says in said.partition("not written")[2] or "not valid JSON" in said
            assert not new.exists()


def test_what_is_written_is_right_or_wrong_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for number, text in enumerate(KEPT):
        with subtests.test(text):
            old, new = tmp_path / f"old{number}.json", tmp_path / f"new{number}.json"
            old.write_text(text)
            code = main(["check", str(old), "--migrate", str(new)])
            assert "written:" in capsys.readouterr().out and json.loads(new.read_text())
            assert main(["check", str(new)]) == code
            if code == 0:
                assert load(new) == load(old)
