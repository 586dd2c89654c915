"""A checkpoint loads only into its own model, not into a different model with the same shapes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import launcher
from launcher.errors import CheckpointError
from tests.checkpoint.forging import agree, of_first_format
from tests.engine.driving import config_of, whole_state
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, share, tiny_llama

OTHERS: dict[str, dict[str, Any]] = {
    "num_attention_heads was 4 and is 2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "rope_parameters.rope_theta was 10000.0 and is 500000.0": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}
    },
    "rms_norm_eps": {"rms_norm_eps": 1e-3},
}


def engine_of(stage: int = 3, **settings: Any) -> Any:
    model = tiny_llama(layers=2, **settings)
    return launcher.initialize(model=model, config=config_of(stage), device=DEVICE)[0]


def step(engine: Any, ctx: RankContext, number: int) -> None:
    for ids in share(batch(number), ctx.rank, ctx.world):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def save(ctx: RankContext, directory: Path) -> None:
    engine = engine_of()
    step(engine, ctx, 0)
    engine.save_checkpoint(directory, "a")


def resume(ctx: RankContext, directory: Path, settings: dict[str, Any], **flags: Any) -> tuple[str, bool]:
    """Return the message of the load, and whether the engine was left unchanged."""
    engine = engine_of(0, **settings)
    step(engine, ctx, 1)
    before, said = whole_state(engine), ""
    try:
        engine.load_checkpoint(directory, **flags)
    except CheckpointError as error:
        said = str(error)
    after = whole_state(engine)
    return said, before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


@pytest.fixture
def saved(pool: WorkerPool, tmp_path: Path) -> Path:
    pool.run(save, 2, tmp_path)
    return tmp_path


def test_other_settings_are_refused_by_name_and_can_be_allowed(
    pool: WorkerPool, saved: Path, subtests: pytest.Subtests
) -> None:
    for want, settings in OTHERS.items():
        with subtests.test(want):
            for said, untouched in pool.run(resume, 2, saved, settings):
                assert want in said and "--allow-model-changes" in said
                assert untouched
    assert pool.run(resume, 2, saved, {}) == [("", False)] * 2
    changed = {"rms_norm_eps": 1e-3, "use_cache": False, "attention_dropout": 0.1}
    assert pool.run(resume_allowed, 2, saved, changed) == [("", False)] * 2
    assert pool.run(resume, 2, saved, {"use_cache": False, "attention_dropout": 0.1}) == [("", False)] * 2


def resume_allowed(ctx: RankContext, directory: Path, settings: dict[str, Any]) -> tuple[str, bool]:
    return resume(ctx, directory, settings, allow_model_changes=True)


def test_other_shapes_are_refused_before_anything_is_changed(pool: WorkerPool, saved: Path) -> None:
    for said, untouched in pool.run(resume_allowed, 2, saved, {"intermediate_size": 48}):
        assert "with a different shape" in said and untouched


def lose(directory: Path, name: str) -> None:
    """Rename a tensor in the metadata, like a single flipped bit."""
    file = directory / "a" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    other = name[:-1] + chr(ord(name[-1]) ^ 1)
    metadata.state_dict_metadata[other] = metadata.state_dict_metadata.pop(name)
    file.write_bytes(pickle.dumps(metadata))
    agree(directory / "a", ".metadata")


WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_parameter_without_one_of_its_states_is_told(pool: WorkerPool, saved: Path, key: str) -> None:
    """This also holds without checksums."""
    file = saved / "a" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    del metadata.state_dict_metadata[f"optimizer/{key}/{WEIGHT}"]
    file.write_bytes(pickle.dumps(metadata))
    agree(saved / "a", ".metadata")
    of_first_format(saved / "a")
    for said, untouched in pool.run(resume, 2, saved, {}):
        assert WEIGHT in said and key in said and untouched


@pytest.mark.parametrize("name", [f"optimizer/exp_avg/{WEIGHT}", f"model/{WEIGHT}"])
def test_a_state_of_a_parameter_that_there_is_not_is_told(pool: WorkerPool, saved: Path, name: str) -> None:
    lose(saved, name)
    for said, untouched in pool.run(resume, 2, saved, {}):
        assert WEIGHT[:-1] in said and untouched
