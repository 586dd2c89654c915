"""Builds the content of Megatron's `common.pt`: optimizer options, position in the data and the schedule."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from launcher.checkpoint.source import SourceCheckpoint


def common_of(stored: SourceCheckpoint, step: int, config: Any) -> dict[str, Any]:
    """Return the content of `common.pt`, which is the same for all ranks."""
    samples = int(stored.meta["global_samples"])
    common: dict[str, Any] = {"iteration": step, "checkpoint_version": 3.0}
    common["args"] = _arguments(config, samples, stored.config)
    if not stored.options:
        return common
    count = max(stored.steps.values(), default=0.0)
    inner = {"param_groups": _groups(stored, count), "state": {"common_step": torch.tensor(count)}}
    # The distributed and float16 optimizers read the inner "optimizer"; the fp32 one, the keys next to it.
    common["optimizer"] = {"optimizer": inner, "param_state_sharding_type": "fully_reshardable", **inner}
    # Megatron-LM resumes at this sample count; --override-opt_param-scheduler replaces the other values.
    rate, decay = common["optimizer"]["param_groups"][0]["lr"], _decay(stored)
    common["opt_param_scheduler"] = {
        "num_steps": samples, "max_lr": rate, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": samples,
        "lr_decay_style": "constant", "start_wd": decay, "end_wd": decay, "wd_incr_steps": samples,
        "wd_incr_style": "constant",
    }  # fmt: skip
    common["content_metadata"] = {
        "distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }  # fmt: skip
    return common


def _arguments(config: Any, samples: int, run: Mapping[str, Any]) -> Namespace:
    """Return the run's arguments that Megatron-LM compares with its own, and the position in the data."""
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    return Namespace(
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups,
        add_position_embedding=config.model_type == "gpt2",
        max_position_embeddings=int(config.max_position_embeddings),
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_rng=True,
        no_save_optim=False,
        consumed_train_samples=samples,
        consumed_valid_samples=0,
        global_batch_size=run.get("train_batch_size"),
        micro_batch_size=run.get("train_micro_batch_size_per_gpu"),
    )


def _decay(stored: SourceCheckpoint) -> float:
    return max(float(options.get("weight_decay", 0.0)) for options in stored.options)


def _groups(stored: SourceCheckpoint, count: float) -> list[dict[str, Any]]:
    """Return Megatron's param groups, with the keys that it matches them by."""
    first = stored.options[0]
    rate, betas, eps = (
        float(first.get("lr", 0.0)),
        tuple(first.get("betas", (0.9, 0.999))),
        first.get("eps", 1e-8),
    )
    common = {
        "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True,
        "max_lr": rate, "min_lr": None, "lr": rate, "betas": betas, "eps": eps, "step": count,
    }  # fmt: skip
    return [{**common, "wd_mult": mult, "weight_decay": _decay(stored) * mult} for mult in (1.0, 0.0)]
