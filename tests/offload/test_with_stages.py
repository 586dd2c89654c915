"""Everything on NVMe, with pipeline stages and tensor-parallel ranks, is bit-identical to training in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.running import advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_llama


def trained(ctx: RankContext, stage: int, tp: int, offload: dict[str, Any]) -> tuple[Any, ...]:
    config = config_of(stage, 4, {"stages": 2}, tensor_parallel={"autotp_size": tp})
    config["zero_optimization"] |= offload
    engine = engine_of(config, tiny_llama(True, 4))
    losses, norms = advance(engine, range(3))
    weights = whole_weights(engine)
    engine.destroy()
    return losses, norms, weights


@pytest.mark.pairwise
@pytest.mark.parametrize(("world", "stage", "tp"), [(2, 1, 1), (2, 3, 1), (4, 3, 2), (4, 2, 2)])
def test_bit_for_bit(pool: WorkerPool, tmp_path: Path, world: int, stage: int, tp: int) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    offload: dict[str, Any] = {"offload_optimizer": place}
    if stage == 3:
        offload["offload_param"] = place | {"max_in_cpu": 0}
    want = pool.run(trained, world, stage, tp, {})[0]
    got = pool.run(trained, world, stage, tp, offload)[0]
    assert got[:2] == want[:2]
    assert all(torch.equal(got[2][name], weight) for name, weight in want[2].items())
