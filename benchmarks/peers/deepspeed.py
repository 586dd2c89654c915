"""DeepSpeed on its CPU accelerator, with its default AdamW (an op that g++ compiles at first use)."""

from __future__ import annotations

import logging
from typing import Any

from benchmarks.peers.base import Flags
from benchmarks.peers.engine import EnginePeer, StagesPeer, zero_config
from benchmarks.peers.pieces import Block, pieces
from benchmarks.workload import SIZES, Work, build_model, llama_config, lm_loss


def build(work: Work, flags: Flags, rank: int, world: int) -> EnginePeer | StagesPeer:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = zero_config(work, flags, world)
    config["zero_optimization"]["overlap_comm"] = False  # there are no streams for overlap
    if flags.stage == 3:
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = int(5e6)  # measured best on CPU
    if flags.offload == "nvme-all":
        _fit_nvme(config, work)
    if flags.pp > 1:
        return StagesPeer(_pipeline(work, flags, config), lambda ids: (ids, ids))
    sharded = flags.stage == 3 and (flags.sharded_init or flags.offload == "nvme-all")
    model = _sharded_model(work, config) if sharded else build_model(work.model)
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    return EnginePeer(engine)


def _fit_nvme(config: dict[str, Any], work: Work) -> None:
    """Set enough buffers. Otherwise it fails with "Not enough buffers" or for a weight that is larger than a buffer."""
    size = SIZES[work.model]
    buffers = {"buffer_count": 32, "buffer_size": size.hidden * size.intermediate}
    config["zero_optimization"]["offload_param"] |= buffers
    config["zero_optimization"]["sub_group_size"] = int(1e7)
    config["aio"] = {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True}


def _pipeline(work: Work, flags: Flags, config: dict[str, Any]) -> Any:
    """Return its pipeline engine: 1F1B, without recomputation."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")  # the module requires ranks
    module = PipelineModule(
        layers=pieces(work.model),
        num_stages=flags.pp,
        loss_fn=lm_loss,
        partition_method=f"type:{Block.__name__}",
        activation_checkpoint_interval=0,
    )
    trainable = [p for p in module.parameters() if p.requires_grad]
    return deepspeed.initialize(model=module, model_parameters=trainable, config=config)[0]


def _sharded_model(work: Work, config: dict[str, Any]) -> Any:
    """Return a sharded model with the common initial weights.

    This is Hugging Face's method for ZeRO-3; a manual `zero.Init(dtype=torch.float32)` gives bf16 on CPU.
    """
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    weights = build_model(work.model).state_dict()
    global _keep
    _keep = HfDeepSpeedConfig(config)  # transformers only keeps a weak reference
    model = AutoModelForCausalLM.from_config(llama_config(work.model), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if parameter.numel():
                parameter.copy_(weights.pop(name))
    model.train()
    return model


_keep: object = None
