"""torch.distributed.pipelining: equal numbers of consecutive blocks, with embedding and head at the ends."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.peers.base import Flags
from benchmarks.peers.pieces import pieces
from benchmarks.workload import ADAM, Work, lm_loss

ONE_CHUNK = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
TWO_CHUNKS = {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}


class Pipelining:
    """A schedule object over this rank's stages, and AdamW."""

    def __init__(self, work: Work, flags: Flags, rank: int) -> None:
        chunks = 1 if flags.schedule in ONE_CHUNK else 2
        virtual = flags.pp * chunks
        mine = [rank] if chunks == 1 else [rank, rank + flags.pp]
        if flags.schedule == "zbv":
            mine[1] = virtual - 1 - rank
        runs = _runs(pieces(work.model), virtual)
        stages = [PipelineStage(runs[k], k, virtual, torch.device("cpu")) for k in mine]
        count = work.accumulation(1)
        if chunks == 1:
            self.schedule = ONE_CHUNK[flags.schedule](stages[0], count, loss_fn=lm_loss)
        else:
            self.schedule = TWO_CHUNKS[flags.schedule](stages, count, loss_fn=lm_loss)
        self.first, self.last = 0 in mine, virtual - 1 in mine
        parameters = [p for k in mine for p in runs[k].parameters()]
        self.optimizer = torch.optim.AdamW(parameters, fused=True, **ADAM)

    def forward_backward(self, micro_batches: list[Tensor]) -> Tensor:
        ids = torch.cat(micro_batches)
        losses: list[Tensor] = []
        told = {"target": ids, "losses": losses} if self.last else {}
        self.schedule.step(*([ids] if self.first else []), **told)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.tensor(torch.nan)

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def extra(self) -> dict[str, str]:
        return {"schedule": type(self.schedule).__name__}


def _runs(parts: list[nn.Module], number: int) -> list[nn.Sequential]:
    """Return parts of consecutive blocks of equal number; the first includes the embedding, the last the head."""
    blocks = parts[1:-1]
    each = len(blocks) // number
    runs = [blocks[k * each : (k + 1) * each] for k in range(number)]
    runs[0], runs[-1] = [parts[0], *runs[0]], [*runs[-1], parts[-1]]
    return [nn.Sequential(*run) for run in runs]


def build(work: Work, flags: Flags, rank: int, world: int) -> Pipelining:
    return Pipelining(work, flags, rank)
