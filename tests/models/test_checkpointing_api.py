"""`launcher.checkpointing`: DeepSpeed's functions for models that use activation checkpointing themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launcher import checkpointing
from launcher.comm import init_distributed
from launcher.errors import ConfigError
from tests.pool import RankContext, WorkerPool


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpointing, "_checkpointer", None)
    yield


def noisy(x: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.dropout(x.sin(), 0.5).exp() * scale


def gradient(run: Any) -> Tensor:
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 50, requires_grad=True)
    run(noisy, x, 3.0).sum().backward()
    assert x.grad is not None
    return x.grad


def test_it_computes_again_with_the_same_random_numbers() -> None:
    want = gradient(lambda function, *args: function(*args))
    assert not checkpointing.is_configured()
    assert torch.equal(gradient(checkpointing.checkpoint), want)
    assert checkpointing.is_configured()
    assert torch.equal(gradient(checkpointing.non_reentrant_checkpoint), want)


def test_arguments_beat_the_json() -> None:
    section = {"cpu_checkpointing": True, "contiguous_memory_optimization": True, "number_checkpoints": 2}
    checkpointing.configure(None, {"activation_checkpointing": section}, checkpoint_in_cpu=False)
    made = checkpointing._checkpointer
    assert made is not None and not made.saved.keeping.on_host and made.saved.keeping.places == 2
    gradient(checkpointing.checkpoint)
    checkpointing.reset()
    gradient(checkpointing.checkpoint)
    with pytest.raises(ConfigError, match="num_checkpoints"):
        checkpointing.configure(contiguous_checkpointing=True)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"num_checkpoints": 0}, "number_checkpoints"), ({"checkpoint_in_cpu": "perhaps"}, "cpu_checkpointing")],
)
def test_arguments_are_checked_before_anything_changes(wrong: dict[str, Any], named: str) -> None:
    checkpointing.configure(num_checkpoints=3, contiguous_checkpointing=True)
    made = checkpointing._checkpointer
    with pytest.raises(ConfigError, match=named):
        checkpointing.configure(**wrong)
    assert checkpointing._checkpointer is made
    checkpointing.partition_activations_in_checkpoint(False)  # with the arguments of before
    assert checkpointing._checkpointer is not None and checkpointing._checkpointer.saved.keeping.places == 3


def test_without_an_mpu_nothing_is_split(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(partition_activations=True)
    assert "without mpu_" in caplog.text
    assert torch.equal(gradient(checkpointing.checkpoint), gradient(lambda function, *args: function(*args)))


class Mpu:
    """Every rank is a model-parallel rank."""

    get_model_parallel_world_size = staticmethod(dist.get_world_size)
    get_model_parallel_rank = staticmethod(dist.get_rank)
    get_model_parallel_group = staticmethod(lambda: dist.group.WORLD)


def split(ctx: RankContext) -> tuple[int, Tensor]:
    init_distributed(torch.device("cpu"))
    checkpointing.configure(Mpu, partition_activations=True)
    made = checkpointing._checkpointer
    assert made is not None
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 50, requires_grad=True)
    out = checkpointing.checkpoint(noisy, x, 3.0)
    kept = made.saved.kept_bytes
    out.sum().backward()
    assert x.grad is not None
    return kept, x.grad


def test_inputs_are_split_over_the_ranks_of_mpu(pool: WorkerPool) -> None:
    want = gradient(lambda function, *args: function(*args))
    for kept, got in pool.run(split, 2):
        assert kept == 50 * 4 // 2
        assert torch.equal(got, want)
