"""Published runs beside what is predicted of them; `literature.json` has the runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from launcher.monitor.devices import Device, device
from launcher.plan.layout import Layout, layouts
from launcher.plan.speed import flops_per_rank, step_time
from launcher.plan.work import ModelWork, work_of

TABLE = Path(__file__).with_name("literature.json")
PER_NODE = 8


@dataclass(frozen=True)
class Published:
    """A run that somebody has measured.

    Args:
        recompute: whether blocks were recomputed, and these operations counted.
        flops: FLOP/s of a device.
    """

    name: str
    device: Device
    model: PretrainedConfig
    sequence: int
    tp: int
    pp: int
    ranks: int
    batch: int
    recompute: bool
    flops: float

    @property
    def mesh(self) -> tuple[int, int, int, int, int]:
        return self.tp, self.pp, self.ranks // self.tp // self.pp, 1, 1

    def work(self) -> ModelWork:
        return _work(self.name, self.sequence)

    def predicted(self) -> tuple[float, Layout]:
        """Return FLOP/s of a device in the published mesh, with the microbatch and the schedule that are fastest."""
        work = self.work()
        ways = layouts(
            work,
            self.ranks,
            self.batch,
            stages=(0 if self.recompute else 1,),
            recompute=(self.recompute,),
            offloads=("none",),
        )
        mine = [
            way
            for way in ways
            if way.mesh == self.mesh
            and way.schedule in ("1f1b", "interleaved")
            and way.micro <= (4 if self.recompute else 1)
        ]
        best = min(mine, key=lambda way: step_time(work, way, self.device, PER_NODE).total)
        seconds = step_time(work, best, self.device, PER_NODE, exact=True).total
        return flops_per_rank(work, best, seconds, recomputed=self.recompute), best


@cache
def published() -> tuple[Published, ...]:
    """Return all rows of the table."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["runs"]
    return tuple(_run(row) for row in rows)


def _run(row: dict[str, Any]) -> Published:
    gpt = isinstance(row["model"], list)
    sequence = 2048 if gpt else 8192
    return Published(
        row["name"],
        device(row["device"]),
        _config(row["model"], sequence),
        sequence,
        row["tp"],
        row["pp"],
        row["ranks"],
        row["batch"],
        gpt,
        row["tflops"] * 1e12,
    )


def _config(model: Any, sequence: int) -> PretrainedConfig:
    if isinstance(model, list):
        heads, hidden, layers = model
        return GPT2Config(
            vocab_size=51_200, n_positions=sequence, n_embd=hidden, n_layer=layers, n_head=heads
        )
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=sequence,
    )


@cache
def _work(name: str, sequence: int) -> ModelWork:
    run = next(run for run in published() if run.name == name)
    return work_of(run.model, sequence)
