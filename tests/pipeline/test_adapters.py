"""Models with PEFT's adapters in pipeline stages, also with split layers: as one process, or refused."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

from launcher.errors import ConfigError
from tests.pipeline.running import CLIP, LR, advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import PlainRun, batch, tiny_llama, train_plain

STEPS = 3
METHODS: dict[str, Any] = {
    "LoRA": lambda: LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    "DoRA": lambda: LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True),
    "AdaLoRA": lambda: AdaLoraConfig(total_step=9, target_modules=["q_proj"]),
    "prompts": lambda: PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}


def adapted(method: str, tied: bool) -> PeftModel:
    model = tiny_llama(tied, layers=4)
    torch.manual_seed(1)
    return get_peft_model(model, METHODS[method]()).train()  # type: ignore[return-value]


@cache
def truth(method: str, tied: bool) -> PlainRun:
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    return train_plain(adapted(method, tied), batch, adamw, STEPS, 4, clip=CLIP)  # type: ignore[arg-type]


def trained(ctx: RankContext, method: str, tied: bool, config: dict[str, Any]) -> Any:
    return advance(engine_of(config, adapted(method, tied)), range(STEPS))


@pytest.mark.parametrize(
    ("method", "tied", "world", "stage", "schedule", "tp"),
    [
        ("LoRA", True, 2, 1, "1f1b", 1),
        ("LoRA", False, 2, 3, "zb-h1", 1),
        ("LoRA", False, 4, 1, "zbv", 2),
        ("DoRA", False, 2, 3, "1f1b", 1),
    ],
)
def test_as_one_process(
    pool: WorkerPool, method: str, tied: bool, world: int, stage: int, schedule: str, tp: int
) -> None:
    split = {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    config = config_of(stage, 4, {"stages": 2, "schedule": schedule}, **split)
    losses, norms = pool.run(trained, world, method, tied, config)[0]
    assert losses == pytest.approx(truth(method, tied).losses, rel=2e-6)
    assert norms == pytest.approx(truth(method, tied).grad_norms, rel=3e-5)


def refused(ctx: RankContext, method: str) -> str:
    with pytest.raises(ConfigError) as error:
        engine_of(config_of(0, 4, {"stages": 2}), adapted(method, tied=False))
    return str(error.value)


@pytest.mark.parametrize(
    ("method", "says"),
    [("AdaLoRA", "adds a loss term of all adapters"), ("prompts", "trains inputs of the model")],
)
def test_what_needs_the_whole_model_is_refused(pool: WorkerPool, method: str, says: str) -> None:
    """A stage would add the term of its own adapters alone."""
    assert says in pool.run(refused, 2, method)[0]
