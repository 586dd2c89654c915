"""Parameters that are partitioned before the engine exists, and models that get a second engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.comm import record_collectives
from launcher.errors import LauncherError, ShardedParameterError
from launcher.zero import GatheredParameters, PartitionedInit, ShardedParameter, set_z3_leaf_module
from tests.engine.driving import advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import points, stack


def partitioned_stack(ctx: RankContext) -> nn.Module:
    """Ranks build different values; rank 0's are used."""
    with PartitionedInit():
        model = stack(5 + ctx.rank)
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    return model


def plain_stack() -> nn.Module:
    return stack(5)


def trained(ctx: RankContext, stage: int, partitioned: bool) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(config_of(stage), partitioned_stack(ctx) if partitioned else plain_stack())
    return advance(engine, ctx, range(3)), whole_weights(engine)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 2), (3, 1)])
def test_a_dealt_model_trains_as_one_that_was_whole(pool: WorkerPool, stage: int, ranks: int) -> None:
    for (losses, weights), (expected, truth) in zip(
        pool.run(trained, ranks, stage, True), pool.run(trained, ranks, stage, False), strict=True
    ):
        assert losses == expected
        assert all(torch.equal(weights[name], value) for name, value in truth.items())


def in_sixteen_bits(ctx: RankContext) -> tuple[set[torch.dtype], Tensor, Tensor]:
    """Return the dtypes of the parameters, and a weight with its unrounded value; integers keep their dtype."""
    with PartitionedInit(dtype=torch.bfloat16):
        model = nn.Sequential(stack(5), nn.Linear(2, 2))
        model[1].steps = nn.Parameter(torch.zeros(1, dtype=torch.long), requires_grad=False)
    weight = next(model[0].parameters())
    with GatheredParameters(weight):
        got = weight.detach().clone()
    return {p.dtype for p in model.parameters()}, got, next(stack(5).parameters()).detach()


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_are_dealt_out_in_the_dtype_of_training(pool: WorkerPool, world: int) -> None:
    for dtypes, got, truth in pool.run(in_sixteen_bits, world):
        assert dtypes == {torch.bfloat16, torch.long}
        assert torch.equal(got, truth.bfloat16())


def changed(ctx: RankContext) -> dict[str, Tensor]:
    """Edit a partitioned parameter, a frozen one, a tied one, a new one; then create an engine."""
    with PartitionedInit():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    first, second, third = model
    with pytest.raises(ShardedParameterError, match="is sharded by ZeRO-3 and not gathered"):
        F.linear(torch.ones(4), first.weight)
    with GatheredParameters([first.weight, first.bias], modifier_rank=0):
        if ctx.rank == 0:
            with torch.no_grad():
                first.weight.copy_(torch.full((4, 4), 2.0))
                first.bias.data[:] = 3.0
    with GatheredParameters(first.weight), torch.no_grad():
        first.weight.zero_()  # nobody's edit is kept
    second.weight = first.weight
    second.weight.requires_grad_(False)
    third.weight = nn.Parameter(torch.full((4, 4), 7.0 + ctx.rank))
    engine = engine_of(config_of(3), model)
    assert not engine.module[1].weight.requires_grad and engine.module[1].weight is engine.module[0].weight
    return whole_weights(engine)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_done_to_a_dealt_model_reaches_the_engine(pool: WorkerPool, ranks: int) -> None:
    for weights in pool.run(changed, ranks):
        assert torch.equal(weights["0.weight"], torch.full((4, 4), 2.0))
        assert torch.equal(weights["0.bias"], torch.full((4,), 3.0))
        assert torch.equal(weights["2.weight"], torch.full((4, 4), 7.0))
        assert "1.weight" not in weights


def again(ctx: RankContext, first: int, second: int, destroy: bool) -> tuple[list[float], list[float]]:
    """Create two engines for one model, one after the other, with two steps each."""
    model = plain_stack()
    engine = engine_of(config_of(first), model)
    losses = advance(engine, ctx, range(2))
    if destroy:
        engine.destroy()
        del engine
    losses += advance(engine_of(config_of(second), model), ctx, range(2))
    return losses, advance(engine_of(config_of(second), plain_stack()), ctx, range(2))


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 1), (0, 3)])
@pytest.mark.parametrize("destroy", [True, False])
def test_a_model_gets_another_engine(pool: WorkerPool, first: int, second: int, destroy: bool) -> None:
    """It continues from the weights that the first one has trained."""
    told = pool.run(again, 2, first, second, destroy)
    losses, fresh = told[0]
    assert losses[:2] == pytest.approx(fresh, rel=1e-6)  # the first engine's
    assert losses[2] < fresh[0] * 0.999 and all(both == told[0] for both in told)


class ByHand(nn.Module):
    """Its head is not called: the weight is used directly, and gathered for that."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(4, 64), nn.Linear(64, 64, bias=False)
        set_z3_leaf_module(self.head, True)  # a unit of its own, which a forward of the root does not gather
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if not self.by_hand:
            return self.head(hidden).square().mean()
        weight = self.head.weight
        assert isinstance(weight, ShardedParameter)
        with GatheredParameters(weight):
            return F.linear(hidden, weight).square().mean()


def by_hand(ctx: RankContext, by_hand: bool) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(config_of(3, train_batch_size=4), ByHand(by_hand))
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + ctx.rank)
        losses.append(float(engine.backward(engine(torch.randn(2, 4)))))
        engine.step()
    return losses, whole_weights(engine)


def test_a_parameter_that_is_used_through_its_handle_is_trained(pool: WorkerPool) -> None:
    for (losses, weights), (expected, truth) in zip(
        pool.run(by_hand, 2, True), pool.run(by_hand, 2, False), strict=True
    ):
        assert losses == pytest.approx(expected, rel=1e-6)
        for name, value in truth.items():
            assert torch.allclose(weights[name], value, rtol=1e-5, atol=1e-7), name


def kept(ctx: RankContext) -> int:
    """Return the collectives of forwards inside GatheredParameters of everything, and after it."""
    engine = engine_of(config_of(3), plain_stack())
    advance(engine, ctx, range(2))
    x, y = points(0)
    with torch.no_grad(), GatheredParameters(engine.module.parameters()), record_collectives() as inside:
        for _ in range(1 + ctx.rank):  # ranks may differ
            engine.module(x, y)
    with torch.no_grad(), record_collectives() as after:
        engine.module(x, y)
    assert after
    return len(inside)


def test_forwards_inside_gathered_parameters_send_nothing(pool: WorkerPool) -> None:
    assert pool.run(kept, 2) == [0, 0]


class Nano(nn.Module):
    """Initializes its parameters like nanoGPT: by `apply`, and one by one by name."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
        self.head = nn.Linear(4, 4, bias=False)
        self.body["layers"][1].weight = self.head.weight  # type: ignore[index, union-attr]
        self.apply(self._fill)
        for name, parameter in self.named_parameters():
            if name.endswith("0.weight"):
                nn.init.normal_(parameter, std=0.5)

    def _fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def filled_by_its_init(ctx: RankContext) -> dict[str, Tensor]:
    with PartitionedInit():
        model = Nano(3 + ctx.rank)
    found = {}
    for name, parameter in model.named_parameters():
        with GatheredParameters(parameter):
            found[name] = parameter.detach().clone()
    return found


def test_a_model_fills_its_parameters_in_while_it_is_built(pool: WorkerPool) -> None:
    truth = dict(Nano().named_parameters())
    for found in pool.run(filled_by_its_init, 2):
        assert found.keys() == truth.keys()
        for name, value in found.items():
            assert torch.equal(value, truth[name].detach()), name


def partly_on_meta(ctx: RankContext) -> tuple[str, bool]:
    with PartitionedInit():
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, device="meta")))
        skipped = nn.Sequential(nn.utils.skip_init(nn.Linear, 4, 4))
    try:
        engine_of(config_of(3), model)
    except LauncherError as error:
        return str(error), isinstance(skipped[0].weight, ShardedParameter)
    return "", False


def test_what_is_on_meta_is_left_there_and_told(pool: WorkerPool) -> None:
    for said, skipped in pool.run(partly_on_meta, 2):
        assert "2 parameters are on the meta device, but the rest are not: 1.0.weight, 1.0.bias" in said
        assert skipped
