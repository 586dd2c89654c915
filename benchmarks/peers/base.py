"""What the plain PyTorch peers share: the loop over micro-batches, AdamW, autocast for bf16."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.workload import ADAM, Work, lm_loss


@dataclass(frozen=True)
class Flags:
    """How a peer is set up. 0 leaves a size at the peer's own default.

    Args:
        stage: ZeRO stage (DeepSpeed, ours).
        reshard: FSDP2 drops gathered parameters after forward.
        bucket: elements of a bucket (`reduce_bucket_size`, `allgather_bucket_size`).
        max_live: elements ZeRO-3 keeps gathered (`stage3_max_live_parameters`, `stage3_max_reuse_distance`).
        sharded_init: build the model sharded, where the peer can.
        tp: ranks that share every layer, and get the same batch.
        ends: parallelize_module splits the embedding and the head, too.
        pp: ranks that the blocks are dealt out to; they share a batch, too.
        schedule: of these stages.
        offload: what rests elsewhere: "cpu", "nvme" (optimizer); "cpu-all", "nvme-all" (parameters, too).
        nvme_path: for those.
        buffers: of what rests elsewhere, at once in memory (`buffer_count` of parameters and optimizer).
        watch: ours reports the bubble of every step; that takes time.
    """

    stage: int = 0
    reshard: bool = True
    bucket: int = 0
    max_live: int = 0
    sharded_init: bool = False
    tp: int = 1
    ends: bool = True
    pp: int = 1
    schedule: str = "1f1b"
    offload: str = ""
    nvme_path: str = "/tmp"
    buffers: int = 0
    watch: bool = False

    @property
    def sharing(self) -> int:
        """Ranks that get the same batch."""
        return self.tp * self.pp


class LoopPeer:
    """A model that is called once a micro-batch, and a torch optimizer over its parameters."""

    def __init__(self, model: nn.Module, autocast: bool) -> None:
        self.model, self.autocast = model, autocast
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)

    def sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Surrounds one micro-batch; gradients are reduced in the `last` one."""
        return contextlib.nullcontext()

    def forward_backward(self, micro_batches: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for i, ids in enumerate(micro_batches):
            with self.sync(i == len(micro_batches) - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    logits = self.model(input_ids=ids).logits
                loss = lm_loss(logits, ids) / len(micro_batches)
                loss.backward()
            total += loss.detach()
        return total

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def extra(self) -> dict[str, str]:
        return {"optimizer": type(self.optimizer).__name__}


def autocast(work: Work) -> bool:
    """bf16 by autocast over fp32 weights."""
    return work.dtype == "bf16"
