"""A training job that both engines run: JSON, model, data, and the loop over DeepSpeed's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from tests.pool.reference import batch, share, tiny_llama

WORLD = 2
STEPS = 10


@dataclass(frozen=True)
class Job:
    """The parameters of one run."""

    stage: int
    dtype: str = "fp32"
    accumulation: int = 2
    clip: float = 1.0
    tied: bool = False
    scheduler: str = "WarmupLR"
    csv: str = ""  # directory of csv_monitor, for the engine's own numbers
    managed: bool = True  # the engine counts microbatches

    @property
    def name(self) -> str:
        """Return the key of the results."""
        tied = "tied" if self.tied else "untied"
        by = "" if self.managed else "-by_caller"
        return f"stage{self.stage}-{self.dtype}-acc{self.accumulation}-clip{self.clip:g}-{tied}-{self.scheduler}{by}"

    def config(self) -> dict[str, Any]:
        """Return the JSON for both engines."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": {
                "type": "AdamW",
                # torch's AdamW in DeepSpeed too: nothing is compiled, and eps is applied in the same place.
                "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
            },
            "scheduler": {"type": self.scheduler, "params": self._schedule()},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 100},
            "steps_per_print": 1_000_000,
        }
        if not self.managed:  # DeepSpeed accepts it with overlap_comm at stage 2 only
            config["managed_gradient_accumulation"] = False
            config["zero_optimization"]["overlap_comm"] = False
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.csv:
            config |= {
                "csv_monitor": {"enabled": True, "output_path": self.csv, "job_name": "job"},
                "wall_clock_breakdown": True,
            }
        return config

    def _schedule(self) -> dict[str, Any]:
        if self.scheduler == "WarmupCosineLR":
            return {"warmup_num_steps": 3, "total_num_steps": STEPS}
        params: dict[str, Any] = {"warmup_num_steps": 3, "warmup_max_lr": 1e-2, "warmup_type": "linear"}
        return params | ({"total_num_steps": STEPS} if self.scheduler == "WarmupDecayLR" else {})

    def model(self) -> PreTrainedModel:
        """Return the model, with the same values in both engines.

        For bf16 the values are rounded first, because DeepSpeed's fp32 master weights start from the rounded values.
        """
        model = tiny_llama(tied=self.tied)
        if self.dtype == "bf16":
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.bfloat16())
        return model


def train(engine: Any, job: Job) -> dict[str, list[Any]]:
    """Return losses (mean over the global batch), gradient norms before clipping (None if the engine has none), and
    learning rates, one per step.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    losses, norms, rates = [], [], []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        rates.append(float(engine.get_lr()[0]))
        parts = share(batch(step, 2 * world * job.accumulation), rank, world, job.accumulation)
        for index, ids in enumerate(parts, start=1):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            if job.managed or index == len(parts):
                engine.step()
            total += loss.detach().double() / (world * job.accumulation)
        dist.all_reduce(total)
        losses.append(total.item())
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    return {"losses": losses, "norms": norms, "rates": rates}
