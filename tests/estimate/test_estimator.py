"""The estimate matches the dry run: states to the byte, peaks within five percent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, MixtralConfig

import launcher
from launcher.config import load
from launcher.errors import ConfigError
from launcher.estimate.dry_run import dry_run
from launcher.estimate.estimator import Estimator
from launcher.models.build import load_config
from tests.estimate.cases import CASES, MORE, SEQUENCE, WORLD, chosen, config_of, rehearsed
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import VOCAB, tiny_llama

ALL = CASES | MORE
SCRATCH = 4 << 20  # bytes at most of the optimizer's kernel on CPUs, which devices do not have


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator(load_config("default"))


@pytest.mark.parametrize("name", chosen(ALL))
def test_an_estimate_is_what_a_rehearsal_finds(estimator: Estimator, name: str) -> None:
    config = load(ALL[name])
    off = 0.015 if "pipeline" in ALL[name] else 0.002
    for rank in estimator.ranks(config, WORLD):
        found, played = estimator.estimate(config, WORLD, rank, SEQUENCE), rehearsed(name, rank)
        assert found.between.parameters == played.between.parameters
        assert found.between.gradients == played.between.gradients
        assert found.between.optimizer == played.between.optimizer
        assert found.between.buffers == played.between.buffers
        scratch = SCRATCH if "bf16" in name else 0
        assert found.peak <= played.peak * (1 + off)
        assert found.peak >= played.peak * (1 - off) - scratch
        assert found.phase == played.phase
        assert found.at_peak.total == found.peak
        assert found.host == pytest.approx(played.host, rel=0.01)
        assert found.nvme == played.nvme


def test_blocks_that_are_alike_are_traced_once(estimator: Estimator) -> None:
    """A model of any depth is then the sum of its blocks."""
    config = load_config("default")
    config.num_hidden_layers = 4
    few = Estimator(config).estimate(load(config_of(0)), 1, sequence=SEQUENCE)
    many = estimator.estimate(load(config_of(0)), 1, sequence=SEQUENCE)
    config.num_hidden_layers = 12
    most = Estimator(config).estimate(load(config_of(0)), 1, sequence=SEQUENCE)
    assert most.peak - many.peak == many.peak - few.peak


def test_a_model_keeps_what_was_found_out(estimator: Estimator, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = estimator.estimate(load(config_of(2)), WORLD, sequence=SEQUENCE)
    monkeypatch.setattr("launcher.estimate.model_trace._traced", None)
    assert estimator.estimate(load(config_of(2)), WORLD, sequence=SEQUENCE) == wanted
    estimator.estimate(load(config_of(3)), 1024, sequence=SEQUENCE)


def test_ranks_that_cannot_be(estimator: Estimator) -> None:
    with pytest.raises(ConfigError, match="stages"):
        estimator.estimate(load(config_of(0, pipeline={"stages": 2})), 3)


def test_experts_in_fp32() -> None:
    """The meta kernel of their products supports only bf16."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    made = Estimator(MixtralConfig(**sizes, **heads, max_position_embeddings=64))
    found = made.estimate(load(config_of(2)), WORLD, sequence=64)
    played = dry_run(made.copy(), load(config_of(2)), world=WORLD, sequence=64)
    assert found.peak == pytest.approx(played.peak, rel=0.01)


@pytest.mark.parametrize("rank", range(WORLD))
def test_older_weights_are_held(estimator: Estimator, rank: int) -> None:
    config = load(config_of(1, pipeline={"stages": 2, "schedule": "2bw"}))
    found = estimator.estimate(config, WORLD, rank, SEQUENCE)
    played = dry_run(estimator.copy(), config, world=WORLD, rank=rank, sequence=SEQUENCE)
    assert found.peak == pytest.approx(played.peak, rel=0.02)
    assert found.between.total == pytest.approx(played.between.total, rel=0.01)


def bytes_of_copies(ctx: RankContext, config: dict[str, Any], directory: Path) -> int:
    engine = launcher.initialize(model=tiny_llama(hidden=128), config=config, device=torch.device("cpu"))[0]
    ids = torch.randint(0, VOCAB, (2, 16))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(directory)
    engine.saver.wait()
    memory = engine.saver._snapshot._memory
    return sum(copy.nbytes for name, copy in memory.items() if name.startswith(("model/", "optimizer/")))


@pytest.mark.parametrize(("stage", "more"), [(0, {}), (2, {"bf16": {"enabled": True}}), (3, {})])
def test_copies_of_saves_in_the_background_are_counted(
    pool: WorkerPool, tmp_path: Path, stage: int, more: dict[str, Any]
) -> None:
    plain = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    copied = plain | {"checkpoint": {"writer": {"decoupled": True}}}
    made = Estimator(tiny_llama(hidden=128).config)
    without, found = (made.estimate(load(config), 2, sequence=16).host for config in (plain, copied))
    assert without == 0
    for told in pool.run(bytes_of_copies, 2, copied, tmp_path):
        assert found == pytest.approx(told, rel=0.02)
    in_memory = load(plain | {"checkpoint": {"peer_memory": {"every": 5}}})
    assert (
        made.estimate(in_memory, 2, sequence=16).host == 5 * found
    )  # of two steps, of two nodes, and one on its way


def test_the_ranks_of_replicas_are_those_of_a_run_of_its_own() -> None:
    alone: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "pipeline": {"stages": 2},
    }
    replicas = alone | {"train_batch_size": 8, "fault_tolerance": {"replicas": 2}}
    made = Estimator(tiny_llama(hidden=128).config)
    expected = made.run(load(alone), 2, sequence=16)
    found = made.run(load(replicas), 4, sequence=16)
    assert [one.rank for one in found] == [0, 1] and [one.peaks for one in found] == [
        one.peaks for one in expected
    ]
    assert all(mine.host > one.host for mine, one in zip(found, expected, strict=True))  # for the exchange


@pytest.mark.parametrize(("schedule", "tp"), [("1f1b", 1), ("zbv", 2)])
def test_a_head_that_is_tied_to_the_embedding_is_on_another_stage(schedule: str, tp: int) -> None:
    """Each gets its gradient in its own stage's backward; a layer with a custom backward accumulates in place."""
    model = GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=51_200, n_positions=256)
    config = load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "bf16": {"enabled": True},
            "pipeline": {"stages": 2, "schedule": schedule},
            "tensor_parallel": {"autotp_size": tp},
        }
    )
    estimator = Estimator(model)
    for rank in estimator.ranks(config, 2 * tp):
        found = estimator.estimate(config, 2 * tp, rank, 256)
        wanted = dry_run(estimator.copy(), config, world=2 * tp, rank=rank, sequence=256)
        assert found.peak == pytest.approx(wanted.peak, rel=0.01, abs=3 * 2**20)  # a CPU kernel


def test_what_waits_for_a_backward_does_not_grow_with_microbatches() -> None:
    """A stage holds as many microbatches as the schedule has in flight; nothing of one outlives its backward."""
    model = GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=8_192, n_positions=512)
    estimator = Estimator(model)
    for schedule in ("1f1b", "zbv"):
        peaks = []
        for microbatches in (8, 24):
            config = load(
                {
                    "train_micro_batch_size_per_gpu": 2,
                    "gradient_accumulation_steps": microbatches,
                    "bf16": {"enabled": True},
                    "pipeline": {"stages": 2, "schedule": schedule},
                }
            )
            peaks.append([estimator.estimate(config, 2, rank).peak for rank in (0, 1)])
        assert peaks[0] == pytest.approx(peaks[1], rel=0.002), schedule
