"""Code shared by the plain PyTorch peers: the loop over microbatches, AdamW, autocast for bf16."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.workload import ADAM, Work, lm_loss


@dataclass(frozen=True)
class Flags:
    """Settings of a peer. 0 keeps the peer's default size.

    Args:
        stage: ZeRO stage (DeepSpeed, ours).
        reshard: FSDP2 reshards after forward.
        bucket: elements of a bucket (`reduce_bucket_size`, `allgather_bucket_size`).
        max_live: elements ZeRO-3 keeps gathered (`stage3_max_live_parameters`, `stage3_max_reuse_distance`).
        sharded_init: build the model sharded, if the peer supports it.
        tp: tensor-parallel ranks; they get the same batch.
        ends: parallelize_module also splits the embedding and the head.
        pp: pipeline-parallel ranks; they get the same batch.
        schedule: pipeline schedule.
        offload: "cpu", "nvme" (optimizer states); "cpu-all", "nvme-all" (parameters as well).
        nvme_path: directory for NVMe offload.
        buffers: offload buffers in memory (`buffer_count` of parameters and optimizer).
        watch: ours reports the bubble of every step, which takes time.
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
        """Return the number of ranks that get the same batch."""
        return self.tp * self.pp


class LoopPeer:
    """A model that is called once per microbatch, and a torch optimizer over its parameters."""

    def __init__(self, model: nn.Module, autocast: bool) -> None:
        self.model, self.autocast = model, autocast
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)

    def sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Return the context of one microbatch; gradients are reduced in the `last` one."""
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
    """Return whether to train in bf16 by autocast over fp32 weights."""
    return work.dtype == "bf16"
