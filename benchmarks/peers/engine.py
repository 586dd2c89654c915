"""Code shared by DeepSpeed and ours: the JSON, and the loop over an engine with DeepSpeed's API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.base import Flags
from benchmarks.workload import ADAM, Work, lm_loss


def zero_config(work: Work, flags: Flags, world: int) -> dict[str, Any]:
    """Return the DeepSpeed JSON of the job."""
    zero: dict[str, Any] = {"stage": flags.stage}
    if flags.bucket:
        zero |= {"reduce_bucket_size": flags.bucket, "allgather_bucket_size": flags.bucket}
    if flags.stage == 3 and flags.max_live:
        zero |= {"stage3_max_live_parameters": flags.max_live, "stage3_max_reuse_distance": flags.max_live}
    place, _, all_of_it = flags.offload.partition("-")
    if place:
        where: dict[str, Any] = {"device": place} | (
            {"nvme_path": flags.nvme_path} if place == "nvme" else {}
        )
        where |= {"buffer_count": flags.buffers} if flags.buffers else {}
        zero["offload_optimizer"] = where
        if all_of_it:
            zero["offload_param"] = where | ({"max_in_cpu": 0} if place == "nvme" else {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation(world // flags.sharing),
        "optimizer": {"type": "AdamW", "params": ADAM | {"betas": list(ADAM["betas"])}},
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    if flags.tp > 1:
        config["tensor_parallel"] = {"autotp_size": flags.tp}
    if work.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


class EnginePeer:
    """Calls an engine as in DeepSpeed's documentation: forward, backward and step for every microbatch."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def forward_backward(self, micro_batches: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for i, ids in enumerate(micro_batches):
            if i:
                self.engine.step()  # for the previous microbatch: only counts
            loss = lm_loss(self.engine(input_ids=ids).logits, ids)
            self.engine.backward(loss)
            total += loss.detach() / len(micro_batches)
        return total

    def optimizer_step(self) -> None:
        self.engine.step()

    def extra(self) -> dict[str, str]:
        return optimizer_of(self.engine)


class StagesPeer:
    """A pipeline-parallel engine: one call runs a full step.

    Args:
        item: the item that the engine's iterator yields for the token ids of a microbatch.
    """

    def __init__(self, engine: Any, item: Callable[[Tensor], Any]) -> None:
        self.engine, self.item = engine, item

    def forward_backward(self, micro_batches: list[Tensor]) -> Tensor:
        loss: Tensor = self.engine.train_batch(iter([self.item(ids) for ids in micro_batches]))
        return loss.detach()

    def optimizer_step(self) -> None:
        """Do nothing: the step is part of the call."""

    def extra(self) -> dict[str, str]:
        return optimizer_of(self.engine)


def optimizer_of(engine: Any) -> dict[str, str]:
    """Return the optimizer that an engine created from the JSON."""
    outer = engine.optimizer
    inner = getattr(outer, "optimizer", outer)
    return {"zero": type(outer).__name__, "optimizer": type(inner).__name__}
