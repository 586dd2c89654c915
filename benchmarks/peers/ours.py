"""The launcher's engine, from the same JSON as DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from torch import Tensor

from benchmarks.peers.base import Flags
from benchmarks.peers.engine import EnginePeer, StagesPeer, zero_config
from benchmarks.workload import Work, build_model


def build(work: Work, flags: Flags, rank: int, world: int) -> EnginePeer | StagesPeer:
    import launcher

    config = zero_config(work, flags, world)
    if flags.pp > 1:
        config["pipeline"] = {"stages": flags.pp, "schedule": flags.schedule}
    engine = launcher.initialize(model=build_model(work.model), config=config)[0]
    # as in the recipes: with whole steps the engine can step parameters on NVMe early
    if flags.pp == 1 and not flags.offload:
        return EnginePeer(engine)
    return (WatchedStages if flags.watch else StagesPeer)(engine, _item)


def _item(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids}


class WatchedStages(StagesPeer):
    """Report the bubble after every step, without the first ones."""

    UNSETTLED = 2

    def __init__(self, engine: Any, item: Callable[[Tensor], Any]) -> None:
        super().__init__(engine, item)
        self.reports: list[dict[str, Any]] = []

    def optimizer_step(self) -> None:
        from launcher.engine.report import last_step

        found = last_step(self.engine, None)
        assert found is not None, "there was a step"
        self.reports.append(found)

    def extra(self) -> dict[str, str]:
        settled = self.reports[self.UNSETTLED :]
        return {key: str(median(r[key] for r in settled)) for key in ("bubble", "bubble_predicted")}
