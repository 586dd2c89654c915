"""Published runs beside what is predicted of them; `literature.json` has the runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from launcher.monitor.devices import Device, device
from launcher.plan.layout import Layout, layouts
from launcher.plan.speed import flops_per_rank, step_time
from launcher.plan.work import ModelWork, work_of

TABLE = Path(__file__).with_name("literature.json")
PER_NODE = 8
SCHEDULES = ("1f1b", "interleaved")
"""What published runs had."""


@dataclass(frozen=True)
class Published:
    """A run that somebody has measured.

    Args:
        source: where it was published.
        recompute: whether blocks were recomputed, and these operations counted.
        micro, chunks: of the published layout; None: nothing is said of them.
        flops: FLOP/s of a device.
    """

    name: str
    source: str
    device: Device
    model: PretrainedConfig
    sequence: int
    tp: int
    pp: int
    ranks: int
    batch: int
    recompute: bool
    stage: int
    micro: int | None
    chunks: int | None
    flops: float

    @property
    def mesh(self) -> tuple[int, int, int, int, int]:
        return self.tp, self.pp, self.ranks // self.tp // self.pp, 1, 1

    def work(self) -> ModelWork:
        return _work(self.name, self.sequence)

    def ways(self) -> list[Layout]:
        """Return all layouts with the choices that the run had: its recomputation, its stage, and its schedules."""
        found = layouts(
            self.work(),
            self.ranks,
            self.batch,
            stages=(self.stage,),
            recompute=(self.recompute,),
            offloads=("none",),
        )
        return [way for way in found if way.schedule in SCHEDULES]

    def predicted(self) -> tuple[float, Layout]:
        """Return FLOP/s of a device in the published mesh, with the microbatch and the schedule that were published, or
        else those that are fastest."""
        work = self.work()
        mine = [self._as_published(way) for way in self.ways() if way.mesh == self.mesh]
        mine = [way for way in mine if way.micro <= (4 if self.recompute else 1) or way.micro == self.micro]
        best = min(mine, key=lambda way: step_time(work, way, self.device, PER_NODE).total)
        seconds = step_time(work, best, self.device, PER_NODE, exact=True).total
        return flops_per_rank(work, best, seconds, recomputed=self.recompute), best

    def _as_published(self, way: Layout) -> Layout:
        if self.micro is not None:
            way = replace(way, micro=self.micro, accumulation=self.batch // way.dp // self.micro)
        if self.chunks is not None:
            way = replace(way, schedule="interleaved" if self.chunks > 1 else "1f1b", chunks=self.chunks)
        return way


@cache
def published() -> tuple[Published, ...]:
    """Return all rows of the table."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["runs"]
    return tuple(_run(row) for row in rows)


def _run(row: dict[str, Any]) -> Published:
    known = {"stage": 0, "micro": None, "chunks": None, **row}
    kind = dict(row["model"])
    model = AutoConfig.for_model(kind.pop("model_type"), **kind)
    length = {
        "n_positions": row["sequence"],
        "max_position_embeddings": row["sequence"],
        "seq_length": row["sequence"],
    }
    for key in length:
        if hasattr(model, key):
            setattr(model, key, row["sequence"])
    known |= {"device": device(row["device"]), "model": model, "flops": known.pop("tflops") * 1e12}
    return Published(**known)


@cache
def _work(name: str, sequence: int) -> ModelWork:
    run = next(run for run in published() if run.name == name)
    return work_of(run.model, sequence)
