"""`cpu_checkpointing` with every kind of parallelism: results are bit-identical, and no block input stays on the
device.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from launcher.models import host_copies
from launcher.models.units import unit_modules
from tests.models.late import InputsAlive, late_lanes
from tests.pipeline import running as stages
from tests.pool import RankContext, WorkerPool
from tests.pool.logical import logical_parameters
from tests.pool.reference import tiny_llama
from tests.tensor import running as layers

STEPS = range(2)


def train(
    ctx: RankContext, schedule: str, tp: int, sequence: bool, stage: int, section: dict[str, Any]
) -> tuple[list[float], dict[str, Any], int, int]:
    """Return (losses, weights, peak block inputs in memory between forwards, bytes copied to the host)."""
    driving: Any = stages if schedule else layers
    microbatches = 4 if schedule else 2
    model = tiny_llama(layers=4)
    alive = InputsAlive(model, unit_modules(model), returns=not schedule)
    with patch.object(host_copies, "lanes", late_lanes):
        tensor = {"autotp_size": tp, "sequence_parallel": sequence}
        more = {"tensor_parallel": tensor, "activation_checkpointing": section}
        if schedule:
            pipeline = {"stages": 2, "schedule": schedule}
            engine = stages.engine_of(stages.config_of(stage, microbatches, pipeline, **more), model)
        else:
            config = layers.config_of(stage, gradient_accumulation_steps=microbatches, **more)
            engine = layers.engine_of(tp, config, model, sequence=sequence)
        losses, _ = driving.advance(engine, STEPS)
    assert alive.forwards >= 2 * len(STEPS) * microbatches
    weights = {name: value.clone() for name, value in logical_parameters(engine.zero)}
    return losses, weights, alive.most, engine.checkpointer.saved.host_bytes


@pytest.mark.key("activation_checkpointing.cpu_checkpointing")
@pytest.mark.parametrize(("world", "schedule", "tp", "sequence", "stage", "partition"), [
    (2, "", 1, False, 3, False),
    (2, "", 2, False, 1, True),
    (2, "", 2, True, 0, False),
    (2, "1f1b", 1, False, 1, False),
    (2, "interleaved", 1, False, 0, False),
    (4, "zb-h1", 2, False, 3, True),
], ids=str)  # fmt: skip
def test_no_input_of_a_block_stays_on_the_device(pool: WorkerPool, world: int, schedule: str, tp: int, sequence: bool,
                                                 stage: int, partition: bool) -> None:  # fmt: skip
    plain = pool.run(train, world, schedule, tp, sequence, stage, {})
    host = {"cpu_checkpointing": True, "partition_activations": partition}
    for got, want in zip(pool.run(train, world, schedule, tp, sequence, stage, host), plain, strict=True):
        assert got[0] == want[0]
        assert all(torch.equal(got[1][name], weight) for name, weight in want[1].items())
        assert want[3] == 0 and got[2] == 0 and got[3] > 0
    assert any(most > 0 for _, _, most, _ in plain)
