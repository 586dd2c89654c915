"""Asynchronous copies: gradients to the host during the backward, and parameters back to the device.

Reads wait for the copies, and memory is not reused before. A CPU copies at once; here a copy runs when it is waited
for, so that code that does not wait reads something else.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from launcher.offload.buffer_cache import BufferCache
from launcher.optim import upload
from launcher.zero.gradients import FlatGradient
from tests.engine.driving import advance, config_of, engine_of, whole_state, whole_weights
from tests.pool import RankContext, WorkerPool

CPU = {"device": "cpu"}
STEPS = 3


class Late:
    """An event of a copy that runs when it is waited for: by the host before it reads the copy, or by whoever reuses
    the source memory before it writes to it.
    """

    sent = 0

    def __init__(self, into: Tensor, source: Tensor) -> None:
        # as to a device, for which nobody holds the memory
        memory = (ctypes.c_char * source.nbytes).from_address(source.data_ptr())
        self.source = torch.frombuffer(memory, dtype=source.dtype)
        self.into, self.done = into, False
        into.fill_(torch.nan)
        Late.sent += 1

    def synchronize(self) -> None:
        if not self.done:
            self.into.copy_(self.source)
        self.done = True

    wait = synchronize


def trained(
    ctx: RankContext, config: dict[str, Any], late: bool
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], int]:
    """Return losses, weights, states and the number of late copies."""
    lands = property(lambda self: self.sharded)
    Late.sent = 0
    with ExitStack() as patches:
        patches.enter_context(patch.object(FlatGradient, "_lands", lands))
        if late:
            patches.enter_context(patch("launcher.models.host_copies.send_to_host", Late))
        engine = engine_of(config)
        losses = advance(engine, ctx, range(STEPS))
        state, weights = whole_state(engine), whole_weights(engine)
        engine.destroy()
    return losses, weights, state, Late.sent


@pytest.mark.pairwise
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_whoever_reads_a_gradient_waits(
    pool: WorkerPool, tmp_path: Any, world: int, stage: int, accumulation: int, clip: float, place: str
) -> None:
    offload = CPU if place == "cpu" else {"device": "nvme", "nvme_path": str(tmp_path)}
    sections = {"bf16": {"enabled": True, "check_grad_overflow": bool(clip)}, "gradient_clipping": clip}
    config = config_of(stage, accumulation, zero_optimization={"offload_optimizer": offload}, **sections)
    config["zero_optimization"]["stage"] = stage
    want = pool.run(trained, world, config, False)
    for got, wanted in zip(pool.run(trained, world, config, True), want, strict=True):
        assert got[3] > 0
        assert got[0] == wanted[0]
        for mine, theirs in zip(got[1:3], wanted[1:3], strict=True):
            assert all(torch.equal(mine[name], value) for name, value in theirs.items())


class Recorded:
    """An event that records when it is waited for."""

    def __init__(self, said: list[str], number: int) -> None:
        self.said, self.number = said, number

    def synchronize(self) -> None:
        self.said.append(f"waited for {self.number}")


def step(uploads: upload.Upload, params: Tensor, number: int) -> None:
    with uploads.to(params) as values:
        values.fill_(number)
        params.copy_(values, non_blocking=True)


def test_memory_of_an_upload_is_used_again_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    events = iter(range(9))
    monkeypatch.setattr(upload, "recorded", lambda _: Recorded(said, next(events)))

    def make(numel: int, dtype: torch.dtype) -> Tensor:
        said.append("new memory")
        return torch.empty(numel, dtype=dtype)

    uploads, params = upload.Upload(BufferCache(make), []), torch.zeros(4, dtype=torch.bfloat16)
    uploads._bytes = params.nbytes
    for number in range(4):
        step(uploads, params, number)
        assert params.eq(number).all()
    assert said == ["new memory", "new memory", "waited for 0", "waited for 1"]
