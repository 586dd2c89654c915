"""`zero.Init` creates the same model on every topology; `zero.GatheredParameters` reads and edits full parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import launcher
from launcher.errors import LauncherError, ShardedParameterError
from launcher.zero import source
from tests.engine.driving import STAGES, advance, config_of, engine_of, whole_state, whole_weights
from tests.models.truth import materialize
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_gpt2, tiny_llama
from tests.zero.models import Stack, stack

BF16 = {"bf16": {"enabled": True}}
HF: dict[str, Callable[..., nn.Module]] = {"llama": tiny_llama, "gpt2": tiny_gpt2}


# ---- Init ---------------------------------------------------------------------------------------


class Counted(Stack):
    """Its two direct parameters have a value too."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.normal_(self.offset)


def on_meta(kind: str, tied: bool) -> nn.Module:
    with launcher.zero.Init():
        model = Counted() if kind == "stack" else HF[kind](tied=tied)
    assert all(p.is_meta for p in model.parameters())
    return model


def made(ctx: RankContext, stage: int, kind: str, tied: bool, seed: int) -> dict[str, Tensor]:
    return whole_weights(engine_of(config_of(stage), on_meta(kind, tied), seed=seed))


@pytest.mark.pairwise
@pytest.mark.parametrize(("kind", "tied"), [("stack", False), ("llama", False), ("gpt2", True)])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (2, 0), (2, 3), (4, 0), (4, 3)])
def test_a_model_on_meta_gets_the_same_values_everywhere(
    pool: WorkerPool, kind: str, tied: bool, world: int, stage: int
) -> None:
    """Values equal those of one process; another seed gives others."""
    with torch.device("meta"):
        truth = Counted() if kind == "stack" else HF[kind](tied=tied)
    materialize(truth, 3)
    for rank in pool.run(made, world, stage, kind, tied, 3):
        assert rank.keys() == dict(truth.named_parameters()).keys()
        for name, p in truth.named_parameters():
            assert torch.equal(rank[name], p), name
    if world == 1:
        (others,) = pool.run(made, 1, stage, kind, tied, 4)
        assert any(not torch.equal(others[name], p) for name, p in truth.named_parameters())


def most_alive(ctx: RankContext, stage: int) -> tuple[int, int, int]:
    """Return the peak elements of full parameters at a time, of the largest block, and of the model."""
    model = on_meta("llama", False)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    alive: dict[int, int] = {}
    most = 0
    real = source.MadeOnMeta._made

    def counting(self: Any, module: nn.Module) -> dict[str, Tensor]:
        nonlocal most
        values = real(self, module)
        for value in values.values():
            alive[id(value)] = value.numel()
            torch.utils.weak.weakref.finalize(value, alive.pop, id(value), None)
        most = max(most, sum(alive.values()))
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.MadeOnMeta, "_made", counting)
        engine_of(config_of(stage), model)
    block = sum(numel for name, numel in sizes.items() if name.startswith("model.layers.0."))
    return most, block, sum(sizes.values())


def test_no_rank_ever_holds_the_whole_model(pool: WorkerPool) -> None:
    for most, block, whole in pool.run(most_alive, 2, 3):
        assert 0 < most <= block < whole / 2


def dtypes_inside() -> list[torch.dtype]:
    with launcher.zero.Init(dtype=torch.bfloat16, config_dict_or_path={"zero_optimization": {"stage": 3}}):
        inside = nn.Linear(2, 2)
    with launcher.zero.Init(enabled=False):
        outside = nn.Linear(2, 2)
    assert inside.weight.is_meta and not outside.weight.is_meta
    return [inside.weight.dtype, outside.weight.dtype]


def test_init_leaves_the_defaults_as_they_were() -> None:
    assert dtypes_inside() == [torch.bfloat16, torch.float32]
    with pytest.raises(KeyError), launcher.zero.Init(dtype=torch.float16):
        raise KeyError
    assert nn.Linear(1, 1).weight.dtype == torch.float32 and not nn.Linear(1, 1).weight.is_meta


def half_on_meta(ctx: RankContext) -> None:
    model = stack()
    with launcher.zero.Init():
        model.last = nn.Linear(8, 1)
    with pytest.raises(LauncherError, match=r"on the meta device, but the rest are not: last\.weight"):
        engine_of(config_of(3), model)
    with launcher.zero.Init():
        orphan = Stack()  # nobody says what `scale` and `offset` begin as
    with pytest.raises(LauncherError, match=r"Nothing initialises scale"):
        engine_of(config_of(3), orphan)


def test_what_cannot_be_made_is_named(pool: WorkerPool) -> None:
    pool.run(half_on_meta, 1)


# ---- GatheredParameters -------------------------------------------------------------------------


def read_and_edit(ctx: RankContext, stage: int, sections: dict[str, Any]) -> tuple[float, float]:
    engine = engine_of(config_of(stage, **sections))
    model, before, masters_before = engine.module, whole_weights(engine), whole_state(engine)
    chosen = [model.first.weight, model.blocks[1].up.bias, model.scale]
    with launcher.zero.GatheredParameters(chosen):
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if p in set(chosen))
        assert float(model.scale.item()) == 1.0
    with launcher.zero.GatheredParameters(iter(chosen), modifier_rank=1), torch.no_grad():
        for p in chosen:
            p.add_(1 + ctx.rank)  # rank 1's count
    edited = whole_weights(engine)
    names = {"first.weight", "blocks.1.up.bias", "scale"}
    for name, value in edited.items():
        assert torch.equal(value, before[name] + 2 * (name in names)), name
    masters = whole_state(engine)
    for name, value in edited.items():
        assert torch.equal(masters[name].to(value.dtype), value.flatten()), f"master of {name}"
        if name not in names:  # in 16-bit training the weights know less than their masters
            assert torch.equal(masters[name], masters_before[name]), f"master of {name}"
    advance(engine, ctx, [0])
    after = whole_weights(engine)
    return (after["scale"] - edited["scale"]).abs().item(), (
        after["first.weight"] - edited["first.weight"]
    ).abs().max().item()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
def test_edits_of_one_rank_arrive_everywhere(pool: WorkerPool, stage: int, sections: dict[str, Any]) -> None:
    """In the compute weights, in the master weights, and in the next step, which is small."""
    for moved in pool.run(read_and_edit, 2, stage, sections):
        assert all(0 <= m < 0.05 for m in moved)


def edit_without_a_rank(ctx: RankContext) -> None:
    engine = engine_of(config_of(3))
    before = whole_weights(engine)
    with launcher.zero.GatheredParameters(engine.module.parameters()), torch.no_grad():
        for p in engine.module.parameters():
            p.zero_()
    for name, value in whole_weights(engine).items():
        assert torch.equal(value, before[name]), name


def test_edits_of_no_rank_are_lost_when_sharded(pool: WorkerPool) -> None:
    pool.run(edit_without_a_rank, 2)


def edit_one_element(ctx: RankContext, stage: int) -> int:
    engine = engine_of(config_of(stage, **BF16))
    before = whole_state(engine)["first.weight"]
    with launcher.zero.GatheredParameters(engine.module.first.weight, modifier_rank=0), torch.no_grad():
        engine.module.first.weight[0, 0] = 3
    return int((whole_state(engine)["first.weight"] != before).sum())


@pytest.mark.parametrize("stage", [0, 3])
def test_what_was_not_edited_keeps_all_bits_of_its_master(pool: WorkerPool, stage: int) -> None:
    assert pool.run(edit_one_element, 2, stage) == [1, 1]


def gather_and_fail(ctx: RankContext) -> None:
    engine = engine_of(config_of(3))
    weight = engine.module.first.weight
    with pytest.raises(KeyError), launcher.zero.GatheredParameters(weight, modifier_rank=0):
        raise KeyError
    with pytest.raises(ShardedParameterError):
        engine.module.first.weight.sum()
    with launcher.zero.GatheredParameters(weight, enabled=False), pytest.raises(ShardedParameterError):
        engine.module.first.weight.sum()
    with launcher.zero.GatheredParameters([nn.Parameter(torch.ones(2))]):  # nobody's: nothing to do
        pass


def test_a_failure_inside_frees_what_was_gathered(pool: WorkerPool) -> None:
    pool.run(gather_and_fail, 2)
