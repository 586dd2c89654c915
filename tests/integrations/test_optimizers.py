"""DeepSpeed's optimizers are classes, and step like those of the JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.errors import ArgumentsError, ConfigError
from launcher.integrations import optimizers
from launcher.optim import one_pass
from tests.engine.driving import advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

Make = Callable[[Any], torch.optim.Optimizer]
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
PAIRS: dict[str, tuple[Make, dict[str, Any]]] = {
    "FusedAdam": (lambda p: optimizers.FusedAdam(p, **OPTIONS), {"type": "AdamW", "params": OPTIONS}),
    "DeepSpeedCPUAdam": (
        lambda p: optimizers.DeepSpeedCPUAdam(p, adamw_mode=False, **OPTIONS),
        {"type": "Adam", "params": {**OPTIONS, "adam_w_mode": False}},
    ),
    "DeepSpeedCPUAdagrad": (
        lambda p: optimizers.DeepSpeedCPUAdagrad(p, **OPTIONS),
        {"type": "Adagrad", "params": OPTIONS},
    ),
    "DeepSpeedCPULion": (
        lambda p: optimizers.DeepSpeedCPULion(p, **OPTIONS),
        {"type": "Lion", "params": OPTIONS},
    ),
    "FusedLamb": (lambda p: optimizers.FusedLamb(p, **OPTIONS), {"type": "Lamb", "params": OPTIONS}),
}  # fmt: skip


def trained(ctx: RankContext, name: str, mine: bool) -> tuple[dict[str, Tensor], bool]:
    """Return the weights after three steps, and whether the steps were fused."""
    make, section = PAIRS[name]
    model = stack()
    arguments = {"optimizer": make(model.parameters())} if mine else {}
    engine = engine_of(config_of(2, optimizer=None if mine else section), model, **arguments)
    advance(engine, ctx, range(3))
    return whole_weights(engine), one_pass.rule_of(engine.optimizer.inner) is not None


@pytest.mark.parametrize("name", PAIRS)
def test_they_step_as_the_json_says(pool: WorkerPool, name: str) -> None:
    (mine, fast), (json, as_fast) = pool.run(trained, 2, name, True)[0], pool.run(trained, 2, name, False)[0]
    assert fast == as_fast
    for key, value in json.items():
        assert torch.equal(mine[key], value), key


def states(ctx: RankContext) -> None:
    """Check the dtype of moments: bfloat16 by the argument, unless the JSON sets another."""
    low = {"enabled": True, "bf16_master_weights_and_grads": True}
    model = stack()
    narrow = optimizers.DeepSpeedCPUAdam(model.parameters(), fp32_optimizer_states=False)
    engine = engine_of(config_of(1, bf16=low, optimizer=None), model, optimizer=narrow)
    assert engine.optimizer.dtype_of("blocks.0.up.weight") == torch.bfloat16
    model, json = stack(), config_of(1, bf16=low | {"bf16_optimizer_states": True}, optimizer=None)
    with pytest.raises(ArgumentsError, match="fp32_optimizer_states=False"):
        engine_of(json, model, optimizer=optimizers.DeepSpeedCPUAdam(model.parameters()))


def test_the_dtype_of_moments_may_be_an_argument(pool: WorkerPool) -> None:
    pool.run(states, 1)


def test_they_are_classes() -> None:
    class Mine(optimizers.DeepSpeedCPUAdam):
        def step(self, closure: Any = None) -> Any:
            return None

    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert isinstance(optimizers.FusedAdam(parameters), torch.optim.Adam)
    assert one_pass.rule_of(optimizers.FusedAdam(parameters)) is one_pass.ADAMW
    assert one_pass.rule_of(Mine(parameters)) is None, "its own step is called"


def test_what_they_cannot_do_is_told() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(ConfigError, match="bias_correction"):
        optimizers.FusedAdam(parameters, bias_correction=False)
    with pytest.raises(ConfigError, match="gradient_clipping"):
        optimizers.FusedLamb(parameters, max_grad_norm=1.0)
