"""Other arguments of initialize(): an mpu, and a configuration with warnings."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import launcher
from launcher.arguments import add_config_arguments
from launcher.errors import ArgumentsError, ConfigError
from tests.engine.driving import advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.zero.models import stack


def mpu_of(**answers: int) -> Any:
    return SimpleNamespace(
        **{f"get_{name}": lambda answer=answer: answer for name, answer in answers.items()}
    )


def refusal_of(mpu: Any, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        engine_of(config_of(1, **sections), mpu=mpu)
    return str(caught.value)


def with_mpus(ctx: RankContext) -> list[str]:
    plain = {"data_parallel_world_size": ctx.world, "data_parallel_rank": ctx.rank}
    for names in (
        {"model_parallel_world_size": 1, "model_parallel_rank": 0},
        {"tensor_model_parallel_world_size": 1, "pipeline_model_parallel_world_size": 1},
        {},
    ):
        engine = engine_of(config_of(1), mpu=mpu_of(**plain, **names))
        advance(engine, ctx, [0])
        assert engine.mesh.dp.degree == ctx.world
        engine.destroy()
    two = mpu_of(tensor_model_parallel_world_size=2, tensor_model_parallel_rank=ctx.rank)
    return [
        refusal_of(mpu_of(model_parallel_world_size=2)),
        refusal_of(mpu_of(**plain, pipeline_model_parallel_world_size=2)),
        refusal_of(mpu_of(data_parallel_world_size=1)),
        refusal_of(mpu_of(data_parallel_world_size=2, data_parallel_rank=1 - ctx.rank)),
        refusal_of(mpu_of(sequence_parallel_world_size=2, sequence_parallel_rank=1 - ctx.rank)),
        refusal_of(two, tensor_parallel={"autotp_size": 1}),
    ]


def test_an_mpu_must_say_what_the_json_says(pool: WorkerPool) -> None:
    for said in pool.run(with_mpus, 2):
        split, staged, data, order, sequence, two = said
        assert "2 tensor-parallel ranks, but the config sets tensor_parallel.autotp_size to 1" in split
        assert "set tensor_parallel.autotp_size to 2" in split and "autotp_size to 1" in two
        assert "2 pipeline stages, but the config sets pipeline.stages to 1" in staged
        assert "1 data-parallel ranks, but the mesh has 2" in data
        assert "mpu numbers this rank" in order and "among the context-parallel ranks" in sequence


def configured(ctx: RankContext) -> None:
    args = SimpleNamespace(deepscale_config=config_of(1), deepspeed_config=None)
    engine = launcher.initialize(args, model=stack())[0]
    assert engine.zero_optimization_stage() == 1
    args.deepspeed_config = config_of(2)
    for given in ({"args": args, "model": stack()}, {"model": stack()}, {"config": config_of(1)}):
        with pytest.raises(ArgumentsError) as caught:
            launcher.initialize(**given)
        assert isinstance(caught.value, AssertionError) and isinstance(caught.value, ValueError)


def test_the_config_is_given_once_also_by_its_former_name(pool: WorkerPool) -> None:
    pool.run(configured, 1)
    given = add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepscale_config", "ds.json"])
    assert (given.deepscale_config, given.deepspeed_config, given.deepscale) == ("ds.json", None, False)


def told(ctx: RankContext) -> list[tuple[int, str]]:
    records: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("launcher")
    logger.addHandler(handler)
    try:
        engine_of(config_of(1, epochs=3, my_model={"a": 1}, vocabulary_size=7)).destroy()
    finally:
        logger.removeHandler(handler)
    return records


def test_keys_that_change_nothing_are_one_warning_of_rank_0(pool: WorkerPool) -> None:
    first, second = pool.run(told, 2)
    (warning,) = [text for level, text in first if level == logging.WARNING]
    assert all(f"\n  {key}: " in warning for key in ("epochs", "my_model", "vocabulary_size"))
    assert [text for level, text in second if level == logging.WARNING] == []


def losses(ctx: RankContext, zero: dict[str, Any]) -> list[float]:
    offload = {"offload_optimizer": {"device": "cpu", **zero.pop("offload", {})}}
    engine = engine_of(config_of(2, zero_optimization={**offload, **zero}))
    trained = advance(engine, ctx, range(3))
    engine.destroy()
    return trained


def test_faster_offloads_of_deepspeeds_train_as_without_them(pool: WorkerPool) -> None:
    plain = pool.run(losses, 2, {})
    zenflow = {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True}
    for zero in (
        {"zenflow": zenflow},
        {"offload": {"super_offload": True, "cpuadam_cores_perc": 0.9}},
        {"offload_param": {"device": "cpu", "pin_memory": True}},
    ):
        assert pool.run(losses, 2, zero) == plain


def from_the_launcher(ctx: RankContext, path: str) -> int:
    """Run a script for DeepSpeed that names no JSON itself."""
    os.environ["LAUNCHER_CONFIG"] = path
    engine = launcher.initialize(model=nn.Linear(2, 2), device=DEVICE)[0]
    return int(engine.train_batch_size())


def test_the_config_of_the_command_line_is_taken(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 6}')
    assert pool.run(from_the_launcher, 1, str(tmp_path / "ds.json")) == [6]
