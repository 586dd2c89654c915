"""torch parallelize_module, with the same Llama plan as ours and all ranks in one group."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.peers.base import Flags, LoopPeer, autocast
from benchmarks.workload import ADAM, Work, build_model


def plan(ends: bool) -> dict[str, ParallelStyle]:
    """Return the plan of the blocks, and with `ends` of the embedding and the head."""
    styles: dict[str, ParallelStyle] = {
        f"model.layers.*.{name}": RowwiseParallel()
        if name.endswith(("o_proj", "down_proj"))
        else ColwiseParallel()
        for name in [
            *(f"self_attn.{part}_proj" for part in "qkvo"),
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ]
    }
    if ends:
        styles["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        styles["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return styles


class Parallelized(LoopPeer):
    def __init__(self, model: nn.Module, autocast: bool) -> None:
        super().__init__(model, autocast)
        # The fused kernel cannot mix DTensors and tensors in a call; each param group is one call.
        split = [p for p in model.parameters() if isinstance(p, DTensor)]
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        self.optimizer = torch.optim.AdamW([{"params": split}, {"params": whole}], fused=True, **ADAM)


def build(work: Work, flags: Flags, rank: int, world: int) -> LoopPeer:
    model = build_model(work.model)
    parallelize_module(model, init_device_mesh("cpu", (flags.tp,)), plan(flags.ends))
    return Parallelized(model, autocast(work))
