"""DeepSpeed's getters return the JSON's values."""

from __future__ import annotations

from typing import Any

from launcher.config import Config, load
from launcher.config.section import Section
from launcher.engine.config_getters import KEYS, value_at
from tests.engine.driving import config_of, engine_of
from tests.pool import RankContext, WorkerPool


def test_every_key_is_one_of_the_json() -> None:
    config = load({"train_batch_size": 1})
    optional = {"optimizer", "scheduler"}  # null unless they are written
    unknown = []
    for name, path in KEYS.items():
        section: Any = config
        *sections, last = path.split(".")
        for key in sections:
            section = getattr(section, key)
        if sections and sections[0] in optional:
            continue
        assert isinstance(section, Section)
        if last not in type(section).model_fields:
            unknown.append(f"{name}: {path}")
    assert unknown == []
    assert isinstance(config, Config)


def answered(ctx: RankContext) -> None:
    sections: dict[str, Any] = dict(
        gradient_clipping=0.5,
        zero_optimization={"reduce_bucket_size": 1000},
        bf16=None,
        prescale_gradients=True,
    )
    engine = engine_of(config_of(2, **sections))
    assert engine.gradient_clipping() == 0.5 and engine.zero_reduce_bucket_size() == 1000
    assert engine.zero_param_persistence_threshold() == 0 and engine.zero_optimization_stage() == 2
    assert engine.fp16_enabled() is False and engine.postscale_gradients() is False
    assert engine.optimizer_params()["lr"] == 0.01 and engine.scheduler_name() is None
    assert engine.get_batch_info() == (8, 8, 1) and engine.optimizer_name() == "AdamW"
    assert (
        engine.get_data_parallel_rank()
        == engine.get_model_parallel_rank()
        == engine.get_pipeline_parallel_rank()
        == 0
    )
    assert value_at(engine.resolved, "aio")["block_size"] > 0
    engine.set_lr(0.25)
    assert engine.get_lr() == [0.25]


def test_what_they_answer(pool: WorkerPool) -> None:
    pool.run(answered, 1)
