"""A pipeline-parallel model is saved, loaded and exported as the complete model."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import launcher
from launcher.checkpoint.reader import read_metadata
from launcher.engine.weights import model_with_source
from launcher.errors import CheckpointError, ElsewhereError
from launcher.models.build import load_config
from launcher.zero import GatheredParameters
from tests.engine.driving import counted_reads
from tests.engine.test_killed_save import at_call, die
from tests.engine.test_saving import node
from tests.pipeline.running import advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import tiny_gpt2, tiny_llama
from tests.tensor.running import whole_state

BEFORE, AFTER = range(2), range(2, 4)
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.002, "warmup_num_steps": 4, "warmup_type": "linear"},
}
PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8, "loss_scale_window": 2}},
}


def model_of(kind: str, **options: Any) -> nn.Module:
    make = {"llama": tiny_llama, "gpt2": tiny_gpt2}[kind]
    return make(**{"tied": True, "layers": 4, **options})


def engine_for(
    kind: str,
    pp: int = 2,
    tp: int = 1,
    stage: int = 0,
    schedule: str = "1f1b",
    sections: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    pipeline = {"stages": pp, "schedule": schedule}
    parallel = {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    config = config_of(stage, 2, pipeline, scheduler=WARMUP, **parallel, **(sections or {}))
    return engine_of(config, model_of(kind, **options))


def facts(engine: Any) -> list[Any]:
    counters = [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps]
    return [*counters, engine.get_lr(), engine.loss_scaler.state_dict()]


# ---- other topologies ---------------------------------------------------------------------------


def save(ctx: RankContext, directory: Path, precision: str, kind: str, *how: Any) -> dict[str, Any]:
    engine = engine_for(kind, *how, PRECISION[precision])
    engine.optimizer.param_groups[0]["eps"] = 1e-7
    advance(engine, BEFORE)
    engine.save_checkpoint(directory, client_state={"epoch": 1})
    return went_on(engine, directory)


def load(ctx: RankContext, directory: Path, precision: str, kind: str, *how: Any) -> dict[str, Any]:
    engine = engine_for(kind, *how, PRECISION[precision], seed=1)
    path, client = engine.load_checkpoint(directory)
    assert path == str(directory / "global_step2") and client == {"epoch": 1}
    engine.save_checkpoint(directory / "again", client_state=client)
    return went_on(engine, directory / "again")


def went_on(engine: Any, directory: Path) -> dict[str, Any]:
    engine.save_16bit_model(directory / "model")
    found = {
        "facts": facts(engine),
        "eps": engine.optimizer.param_groups[0]["eps"],
        "state": whole_state(engine),
        "consolidated": engine._zero3_consolidated_16bit_state_dict(),
    }
    found["losses"], _ = advance(engine, AFTER)
    engine.destroy()
    return found


CASES = [  # ranks that save and load: number, then pp, tp, ZeRO stage, schedule
    pytest.param("fp32", "llama", (2, 1, 1, 3, "1f1b"), (8, 2, 2, 1, "1f1b"), marks=pytest.mark.full),
    ("fp16", "gpt2", (2, 2, 1, 0, "interleaved"), (4, 2, 1, 3, "gpipe")),
]


@pytest.mark.parametrize(("precision", "kind", "first", "second"), CASES, ids=["3d", "chunks"])
def test_another_topology_and_back(
    pool: WorkerPool, tmp_path: Path, precision: str, kind: str, first: Any, second: Any
) -> None:
    """State is bit-identical with the same losses; the export has the same bytes everywhere."""
    want = pool.run(save, first[0], tmp_path, precision, kind, *first[1:])[0]
    assert {name.split("/")[0] for name in want["state"] if "/" in name} == {"exp_avg", "exp_avg_sq", "step"}
    assert want["facts"][:3] == [2, 16, 4] and want["eps"] == 1e-7
    directory = tmp_path
    for topology in (second, first):
        ranks = pool.run(load, topology[0], directory, precision, kind, *topology[1:])
        for got in ranks:
            assert got["facts"] == want["facts"] and got["eps"] == want["eps"]
            assert got["losses"] == pytest.approx(want["losses"], rel=1e-5 if precision == "fp32" else 2e-2)
            assert got["state"].keys() == want["state"].keys()
            for name, value in want["state"].items():
                assert torch.equal(got["state"][name], value), name
        directory /= "again"
        assert_exported(kind, directory / "model", ranks, want["state"])
        files = [path / "model" / "model.safetensors" for path in (tmp_path, directory)]
        assert files[0].read_bytes() == files[1].read_bytes()


def assert_exported(
    kind: str, directory: Path, ranks: list[dict[str, Any]], masters: dict[str, Tensor]
) -> None:
    fresh, consolidated = model_of(kind, seed=5), ranks[0]["consolidated"]
    assert [rank["consolidated"] for rank in ranks[1:]] == [None] * (len(ranks) - 1)
    assert list(consolidated) == list(fresh.state_dict())
    fresh.load_state_dict(consolidated)
    stored = load_file(directory / "model.safetensors")
    assert list(stored) and stored.keys() == dict(fresh.named_parameters()).keys()
    for name, p in fresh.named_parameters():
        assert torch.equal(p, stored[name].float()), name
        assert torch.equal(stored[name], masters[name].to(stored[name].dtype)), name
    loaded, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.tie_word_embeddings


# ---- the same topology --------------------------------------------------------------------------

DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


def stop_and_go(ctx: RankContext, directory: Path) -> tuple[list[float], set[str]]:
    """Return the next random numbers, and the names that this rank writes."""
    torch.manual_seed(ctx.rank)
    engine = engine_for("gpt2", stage=1, **DROPOUT)
    advance(engine, BEFORE)
    engine.save_checkpoint(directory)
    losses, weights = advance(engine, AFTER), whole_weights(engine)
    torch.manual_seed(7)
    again = engine_for("gpt2", stage=1, seed=1, **DROPOUT)
    again.load_checkpoint(directory)
    assert advance(again, AFTER) == losses
    for name, value in whole_weights(again).items():
        assert torch.equal(value, weights[name]), name
    again.load_checkpoint(directory)
    return torch.rand(2).tolist(), {piece.name for piece in again.zero.written_slices()}


def draw_after(ctx: RankContext, directory: Path) -> list[float]:
    engine = engine_for("gpt2", 1, stage=1)
    engine.load_checkpoint(directory)
    return torch.rand(2).tolist()


def test_dropout_goes_on_in_every_stage(pool: WorkerPool, tmp_path: Path) -> None:
    """Each stage has its own random state; a single stage resumes with that of the first.

    Tensors on both are written once.
    """
    (first, mine), (last, others) = pool.run(stop_and_go, 2, tmp_path)
    assert first != last
    assert not mine & others and "transformer.wte.weight" in mine
    assert pool.run(draw_after, 1, tmp_path) == [first]


def save_and_die(ctx: RankContext, directory: Path) -> None:
    engine = engine_for("llama")
    engine.save_checkpoint(directory, "first")
    advance(engine, BEFORE)
    with at_call("fsync", 1 if ctx.rank == 1 else 10**6, die):
        engine.save_checkpoint(directory, "second")


def test_a_stage_that_is_killed_while_it_saves_spoils_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="exit code -9"):
        pool.run(save_and_die, 2, tmp_path)
    assert (tmp_path / "latest").read_text() == "first\n"
    assert not (tmp_path / "second").exists()


# ---- what fits ----------------------------------------------------------------------------------


def load_others(ctx: RankContext, directory: Path) -> None:
    """Every stage raises if one of them cannot load; then those with the same names are loaded."""
    saved = engine_for("llama")
    saved.save_checkpoint(directory)
    weights = whole_weights(saved)
    for layers, said in (
        (2, r"18 tensors that the model does not have: model/model.layers.2"),
        (6, "missing"),
    ):
        engine = engine_for("llama", layers=layers, seed=1)
        fresh = whole_weights(engine)
        with pytest.raises(CheckpointError, match=said):
            engine.load_checkpoint(directory)
        engine.load_checkpoint(directory, load_module_strict=False, load_optimizer_states=False)
        for name, value in whole_weights(engine).items():
            assert torch.equal(value, weights[name] if name in weights else fresh[name]), name


def test_all_stages_refuse_another_model(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(load_others, 2, tmp_path)


def leave_frozen_out(ctx: RankContext, directory: Path) -> None:
    model = model_of("llama", tied=False)
    model.register_buffer("seen", torch.ones(()))
    model.model.layers[3].register_buffer("scale", torch.arange(3, dtype=torch.float64))
    for part in (model.model.layers[0], model.model.layers[2]):
        part.requires_grad_(False)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    order = list(model.state_dict())
    engine = engine_of(config_of(1, 2, {"stages": 2}), model)
    engine.save_checkpoint(directory, "trained", exclude_frozen_parameters=True)
    engine.save_16bit_model(directory / "model", exclude_frozen_parameters=True)
    buffers = {"seen", "model.layers.3.scale"}
    stored = {name.partition("/")[2] for name in read_metadata(directory / "trained").state_dict_metadata
              if name.startswith(("model/", "buffer/"))}  # fmt: skip
    exported = load_file(directory / "model" / "model.safetensors")
    assert stored == exported.keys() == names | buffers
    assert exported["model.layers.3.scale"].tolist() == [0, 1, 2]
    state = engine._zero3_consolidated_16bit_state_dict()
    assert state is None if ctx.rank else list(state) == order


def test_frozen_parameters_and_buffers_of_other_stages(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(leave_frozen_out, 2, tmp_path)


def save_by_node(ctx: RankContext, directory: Path) -> None:
    """Each stage is on its own node."""
    local = {"checkpoint": {"use_node_local_storage": True}}
    with node(ctx.rank):
        engine = engine_for("llama", sections=local)
        advance(engine, BEFORE)
        engine.save_checkpoint(directory / f"node{ctx.rank}")
        losses, _ = advance(engine, AFTER)
        again = engine_for("llama", sections=local, seed=1)
        again.load_checkpoint(directory / f"node{ctx.rank}")
        assert advance(again, AFTER)[0] == losses
        with pytest.raises(CheckpointError, match="missing"):
            again.load_checkpoint(directory / f"node{1 - ctx.rank}")
        smaller = engine_for("llama", sections=local, layers=2)
        with pytest.raises(CheckpointError, match="does not have"):  # what one node alone can see
            smaller.load_checkpoint(directory / f"node{ctx.rank}")
    names = read_metadata(directory / f"node{ctx.rank}" / "global_step2").state_dict_metadata
    assert ("model/model.layers.0.mlp.up_proj.weight" in names) == (ctx.rank == 0)


def test_each_node_keeps_its_stage(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_by_node, 2, tmp_path)


# ---- weights in ---------------------------------------------------------------------------------


def start_from(ctx: RankContext, directory: Path, stage: int) -> tuple[dict[str, Tensor], int]:
    """Return the weights after initialize(), and the elements that this rank read."""
    made = model_with_source(load_config(str(directory)), str(directory), from_scratch=False, seed=0)
    with counted_reads() as read:
        zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        config = config_of(stage, 2, {"stages": 2}, **zero)
        engine = launcher.initialize(model=made.model, config=config, source=made.source, device=DEVICE)[0]
    return whole_weights(engine), sum(read)


@pytest.mark.parametrize(("world", "stage", "kind"), [(2, 0, "gpt2"), (4, 3, "llama")])
def test_each_rank_reads_its_stage(
    pool: WorkerPool, tmp_path: Path, world: int, stage: int, kind: str
) -> None:
    model = model_of(kind, seed=3)
    model.save_pretrained(tmp_path)
    ranks = pool.run(start_from, world, tmp_path, stage)
    total = sum(p.numel() for p in model.parameters())
    twice = model.get_input_embeddings().weight.numel()  # also the head, on the last stage
    for weights, _ in ranks:
        assert weights.keys() == dict(model.named_parameters()).keys()
        for name, p in model.named_parameters():
            assert torch.equal(weights[name], p), name
    reads = [read for _, read in ranks]
    assert sum(reads) == total + twice
    assert max(reads) < (0.65 if stage == 0 else 0.4) * total


# ---- parameters of other stages -----------------------------------------------------------------


def name_others(ctx: RankContext) -> None:
    model = tiny_llama(layers=4)
    named = dict(model.named_parameters())
    shapes = {name: p.shape for name, p in named.items()}
    engine = engine_of(config_of(3, 2, {"stages": 2}), model)
    place = "model.layers.{}.mlp.up_proj.weight"
    mine, other = (named[place.format(layer)] for layer in ((0, 3) if ctx.rank == 0 else (3, 0)))
    with GatheredParameters([mine]):
        assert mine.shape == shapes[place.format(0)]
    said = rf"layers\.\d\.mlp\.up_proj\.weight is on pipeline stage {1 - ctx.rank}, but this rank is stage {ctx.rank}"
    with pytest.raises(ElsewhereError, match=said), GatheredParameters([mine, other]):
        pass
    with pytest.raises(
        ElsewhereError, match=rf"on pipeline stage {1 - ctx.rank}: 'mlp' is not available on this rank"
    ):
        getattr(model.model.layers[3 - 3 * ctx.rank], "mlp")  # noqa: B009
    gone = weakref.ref(other)
    del named, other, engine
    gc.collect()
    assert gone() is None, "a stage holds the weights of another one"


def test_a_parameter_of_another_stage_is_refused(pool: WorkerPool) -> None:
    pool.run(name_others, 2)
