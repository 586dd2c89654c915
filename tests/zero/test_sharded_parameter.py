"""A sharded parameter has its shape and dtype; accessing its data is an error that names it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import launcher
from launcher.errors import ShardedParameterError
from tests.engine.driving import config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.zero.models import stack

TOUCHES: dict[str, Callable[[Any], Any]] = {
    "p + 1": lambda p: p + 1,
    "1 + p": lambda p: 1 + p,
    "p.data.norm()": lambda p: p.data.norm(),
    "p.detach().clone()": lambda p: p.detach().clone(),
    "p.item()": lambda p: p[0, 0].item(),
    "p.tolist()": lambda p: p.tolist(),
    "p.numpy()": lambda p: p.detach().numpy(),
    "p.cpu().sum()": lambda p: p.cpu().sum(),
    "p.copy_()": lambda p: p.data.copy_(torch.zeros_like(p)),
    "p.fill_()": lambda p: p.data.fill_(0),
    "torch.cat": lambda p: torch.cat([p, p]),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 4), p),
    "init": lambda p: nn.init.normal_(p),
    "pickle": pickle.dumps,
    "torch.save": lambda p: torch.save({"weight": p}, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "p.contiguous()": lambda p: p.contiguous(),
    "p.storage()": lambda p: p.storage().tolist(),
    "p.untyped_storage()": lambda p: p.detach().untyped_storage().tolist(),
}


def touch(ctx: RankContext) -> dict[str, str]:
    p = engine_of(config_of(3)).module.first.weight
    said = {}
    for name, operation in TOUCHES.items():
        try:
            said[name] = f"no error: {operation(p)!r}"
        except ShardedParameterError as error:
            said[name] = str(error)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_touching_a_sharded_parameter_names_it(pool: WorkerPool) -> None:
    for said in pool.run(touch, 2):
        wrong = {
            name: text
            for name, text in said.items()
            if "parameter 'first.weight' (shape (8, 4))" not in text or "GatheredParameters" not in text
        }
        assert wrong == {}


def look(ctx: RankContext) -> None:
    engine = engine_of(config_of(3, bf16={"enabled": True}))
    plain = dict(stack().named_parameters())
    for name, p in engine.module.named_parameters():
        want = plain[name]
        assert (p.shape, p.dtype, p.device) == (want.shape, torch.bfloat16, DEVICE)
        assert (
            p.numel() == want.numel()
            and p.dim() == want.dim()
            and p.size(-1 if p.dim() else None) is not None
        )
        assert p.requires_grad and isinstance(p, nn.Parameter) and p.is_leaf and p.grad is None
        assert name in repr(p) and "sharded" in str(p) and "sharded" in f"{p}"
    assert sum(p.numel() for p in engine.module.parameters()) == sum(p.numel() for p in plain.values())
    assert "Linear" in str(engine.module)
    torch.optim.AdamW(engine.module.parameters())  # many a library makes one, and never steps it


def test_shape_dtype_and_count_are_there(pool: WorkerPool) -> None:
    pool.run(look, 2)


def state_dicts(ctx: RankContext) -> None:
    engine = engine_of(config_of(3))
    plain, model = stack().state_dict(), engine.module
    sharded = model.state_dict()
    assert {n: v.shape for n, v in sharded.items()} == {n: v.shape for n, v in plain.items()}
    with pytest.raises(ShardedParameterError, match=r"first\.weight"):
        sharded["first.weight"].sum()
    with launcher.zero.GatheredParameters(model.parameters()):
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain[name]), name
    with pytest.raises(RuntimeError, match=r"GatheredParameters"):
        model.load_state_dict(stack(seed=1).state_dict())
    with launcher.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.load_state_dict(stack(seed=1).state_dict())
    for name, value in stack(seed=1).named_parameters():
        assert torch.equal(whole_weights(engine)[name], value), name


def test_state_dict_of_a_sharded_module(pool: WorkerPool) -> None:
    """Names and shapes work at any time; values, and loading, inside GatheredParameters."""
    pool.run(state_dicts, 2)
