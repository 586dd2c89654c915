"""`metrics.jsonl`: one JSON object per optimizer step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

METRICS = "metrics.jsonl"
"""File name in the directory of a run."""


class MetricsWriter:
    """Appends one line per optimizer step, which is on the disk when `write` returns.

    Args:
        path: the file; its directory is created.
        resume_step: the last step to keep. Lines of later steps, which will run again, and an incomplete last
            line are removed. 0, for a new run, starts with an empty file.
    """

    def __init__(self, path: str | Path, *, resume_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_until(resume_step)
        self._file = self.path.open("a", encoding="utf-8")

    def write(
        self,
        step: int,
        loss: float,
        *,
        grad_norm: float | None,
        lr: float,
        tokens: int,
        tokens_per_s: float,
        step_time_s: float,
        **extra: Any,
    ) -> dict[str, Any]:
        """Write the line of one optimizer step and return it.

        Args:
            step: optimizer steps done, from 1.
            loss: token-weighted mean over the global batch, without loss scaling.
            grad_norm: global norm before clipping; None if it was not computed.
            lr: learning rate of this step's update.
            tokens: tokens seen since the start of training, over all ranks.
            tokens_per_s: throughput over all ranks.
            step_time_s: seconds of the step.
            extra: other JSON values: `eval_loss`, `loss_scale`, ...

        JSON has no NaN or infinity: such numbers are written as null, and `nonfinite` lists their keys.
        """
        record = valid(
            {
                "step": step,
                "loss": loss,
                "grad_norm": grad_norm,
                "lr": lr,
                "tokens": tokens,
                "tokens_per_s": tokens_per_s,
                "step_time_s": step_time_s,
                **extra,
            }
        )
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        return record

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep_until(self, step: int) -> None:
        old = read_metrics(self.path) if step and self.path.exists() else []
        kept = [record for record in old if record["step"] <= step]
        temporary = self.path.with_name(self.path.name + ".tmp")
        text = "".join(json.dumps(valid(record), allow_nan=False) + "\n" for record in kept)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of `metrics.jsonl` in order, without an incomplete last line of a killed run.

    Raises:
        json.JSONDecodeError: another line is not valid JSON.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise
    return records


def valid(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with None for non-finite numbers and their keys under `nonfinite`."""
    lost = [key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
    return {**record, **dict.fromkeys(lost), "nonfinite": lost} if lost else dict(record)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
