"""A sequence of layers in stages trains like in one process: PipelineModule, nn.Sequential, tensors between stages."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import launcher
from launcher.errors import ConfigError
from launcher.pipe import LayerSpec, PipeDataParallelTopology, PipelineModule, TiedLayerSpec
from launcher.zero import Init, PartitionedInit
from tests.pipeline.running import CLIP, LR, config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import VOCAB, batch, share

STEPS, WIDTH = 2, 16
States = tuple[Tensor, Tensor]  # numbers of the tokens, and which of them count


class Embed(nn.Module):
    """Passes an integer mask on, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, ids: Tensor) -> States:
        return F.embedding(ids, self.weight), (ids % 5 > 0).long()


class Mix(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, inputs: States) -> States:
        states, mask = inputs
        return states + torch.tanh(self.linear(self.norm(states))) * mask.unsqueeze(-1), mask


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, states: Tensor) -> Tensor:
        return states @ self.weight.T


def logits(module: nn.Module, states: Tensor) -> Tensor:
    assert isinstance(module, Embed)
    return states @ module.weight.T


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def row(tied: bool, **arguments: Any) -> PipelineModule:
    """Return nine layers; one has no parameters, and works in place."""
    ends = [TiedLayerSpec("word", Embed), TiedLayerSpec("word", Embed, forward_fn=logits)]
    first, last = ends if tied else [LayerSpec(Embed), LayerSpec(Head)]
    mixes = [LayerSpec(Mix, WIDTH) for _ in range(5)]
    layers = [first, *mixes, lambda inputs: inputs[0], nn.ReLU(inplace=True), last]
    return PipelineModule(layers, loss_fn=loss_of, **arguments)


def pairs(step: int, rank: int, world: int, microbatches: int) -> list[tuple[Tensor, Tensor]]:
    return [(ids, ids) for ids in share(batch(step), rank, world, microbatches)]


def train(
    ctx: RankContext, module: nn.Module, config: dict[str, Any], make: Any = pairs, **given: Any
) -> dict[str, Any]:
    """Return the results of `STEPS` steps, of all stages."""
    engine = engine_of(config, module, **given)
    losses, norms, dp = [], [], engine.mesh.dp
    for step in range(STEPS):
        parts = make(step, dp.rank, dp.degree, engine.gradient_accumulation_steps())
        data = iter(parts) if engine.is_first_stage() else None
        losses.append(float(engine.train_batch(data)))
        norms.append(engine.get_global_grad_norm())
    found = {"losses": losses, "norms": norms, "weights": whole_weights(engine)}
    names = [name for name, _ in engine.module.named_parameters()]
    engine.destroy()
    return found | {"names": names}


def train_rows(ctx: RankContext, cases: list[tuple[bool, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [train(ctx, row(tied), config) for tied, config in cases]


def plainly(module: nn.Module, loss_fn: Any, make: Any = pairs) -> dict[str, Any]:
    """Train the same in one process, without the launcher."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        total, parts = 0.0, make(step, 0, 1, 4)
        for inputs, labels in parts:
            loss = loss_fn(module(inputs), labels) / len(parts)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "norms": norms,
        "weights": {n: p.detach() for n, p in module.named_parameters()},
    }


@cache
def truth(tied: bool) -> dict[str, Any]:
    return plainly(row(tied).build(0, 9), loss_of)


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-5)
    assert got["weights"].keys() == want["weights"].keys()
    for name, weight in want["weights"].items():
        assert (got["weights"][name] - weight).norm() <= 1e-5 * weight.norm(), name


GATHER = {"gather_per_microbatch": True, "reduce_per_microbatch": True, "activation_checkpoint_interval": 2}
CASES: dict[int, list[tuple[bool, dict[str, Any]]]] = {  # by the number of ranks
    1: [(True, config_of(3, 4, {})), (False, config_of(0, 4, {"schedule": "interleaved"}))],
    2: [
        (True, config_of(0, 4, {"stages": 2, "partition": "uniform"})),
        (True, config_of(1, 4, {"stages": 2, "schedule": "interleaved"}, activation_checkpointing={})),
        (False, config_of(2, 4, {"stages": 2, "schedule": "interleaved"})),
        (True, config_of(2, 2, {"stages": 1})),
    ],
    4: [
        (True, config_of(1, 4, {"stages": 4})),
        (False, config_of(0, 4, {"stages": 4, "schedule": "interleaved"})),
        (True, config_of(3, 2, {"stages": 2, "schedule": "interleaved"})),
        (True, config_of(3, 2, {"stages": 2, "schedule": "gpipe", **GATHER})),
        (True, config_of(3, 2, {"stages": 2, "schedule": "interleaved", **GATHER})),
        (True, config_of(3, 2, {"stages": 2, "schedule": "zb-h1", **GATHER})),
        (False, config_of(3, 2, {"stages": 2, "schedule": "zbv", **GATHER})),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_any_cut_trains_alike(pool: WorkerPool, ranks: int) -> None:
    """The cases differ by ZeRO stage, schedule, stages x data-parallel ranks, ties."""
    for found in pool.run(train_rows, ranks, CASES[ranks]):
        for (tied, config), got in zip(CASES[ranks], found, strict=True):
            assert_same(got, truth(tied))
            assert len(got["names"]) < len(got["weights"]) or config["pipeline"].get("stages", 1) == 1


def from_own_parameters(ctx: RankContext) -> tuple[int, dict[str, Any], str]:
    """A script asks the module for its parameters before initialize(): those of this rank's stage."""
    module = row(False, num_stages=2)
    for context in (Init(), PartitionedInit()):
        with context:
            assert not list(row(False, num_stages=2).parameters())
    count = torch.tensor(sum(parameter.numel() for parameter in module.parameters()))
    torch.distributed.all_reduce(count)
    weights = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": rest}], lr=LR, weight_decay=0.1)
    config = config_of(1, 4, {})
    found = train(ctx, module, {**config, "optimizer": None}, optimizer=optimizer)
    other = row(False, num_stages=2)
    uneven = config_of(0, 4, {"schedule": "interleaved"})
    return int(count), found, refusal(engine_of, uneven, other, model_parameters=list(other.parameters()))


def test_a_stage_is_there_before_initialize(pool: WorkerPool) -> None:
    for count, found, refused in pool.run(from_own_parameters, 2):
        assert count == sum(weight.numel() for weight in truth(False)["weights"].values())
        assert_same(found, truth(False))
        assert "to other stages" in refused


def sequential() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(VOCAB, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
    return nn.Sequential(*layers, nn.Flatten(0), SquareMean())


class SquareMean(nn.Module):
    """A last layer that returns the loss."""

    def forward(self, values: Tensor) -> Tensor:
        return values.square().mean()


def points(step: int, rank: int, world: int, microbatches: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    rows = torch.rand(8, VOCAB, generator=generator)
    return [(part, part) for part in share(rows, rank, world, microbatches)]


def test_a_sequential_whose_layer_stands_in_it_twice(pool: WorkerPool) -> None:
    model = sequential()
    twice = nn.Sequential(*model[:3], model[2], *model[3:])
    want = plainly(twice, lambda loss, _: loss, points)
    config = config_of(1, 4, {"stages": 2, "partition": "uniform"})
    got = pool.run(partial_sequential, 2, config)
    for found in got:
        assert_same(found, want)
    assert "2.weight" in got[0]["names"] and "2.weight" in got[1]["names"]


def partial_sequential(ctx: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    model = sequential()
    with torch.no_grad():
        model[2].weight += ctx.rank  # held by both stages: the first one's counts
    return train(ctx, nn.Sequential(*model[:3], model[2], *model[3:]), config, points)


def surface(ctx: RankContext, directory: str) -> dict[str, Any]:
    """Use DeepSpeed's names on an engine of two stages."""
    monitor = {"enabled": True, "output_path": directory, "job_name": "monitor"}
    module = row(True, num_stages=2, topology=PipeDataParallelTopology(2, 1))
    rows = [row_ for step in range(4) for row_ in batch(step)]
    engine, _, loader, _ = launcher.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        config=config_of(1, 4, {}, csv_monitor=monitor),
        training_data=rows,
        device=DEVICE,
    )
    engine.set_batch_fn(lambda ids: (ids, ids))
    as_they_lie = next(iter(loader))[0].equal(rows[0])
    first = [float(engine.train_batch()) for _ in range(2)]  # of training_data
    engine.set_dataiterator(iter([ids.unsqueeze(0).repeat(2, 1) for ids in rows[:4]]))
    again = float(engine.train_batch())
    engine.set_dataloader(loader)
    held_out = [ids.unsqueeze(0) for ids in rows[:3]]
    loss, last = engine.eval_batch(iter(held_out), return_logits=True, num_micro_batches=3)
    each = engine.eval_batch(iter(held_out), reduce_output=None, num_micro_batches=3)
    mine = engine.eval_batch(iter(held_out), bcast_loss=False, num_micro_batches=3)
    outputs = engine.eval_batch(iter(held_out), compute_loss=False, reduce_output=None, num_micro_batches=3)
    refusals = [
        refusal(engine.forward, rows[0]),
        refusal(engine.backward, torch.ones(())),
        refusal(engine.step),
    ]
    ends = (engine.is_first_stage(), engine.is_last_stage(), engine.stage_id, engine.num_stages)
    weights = whole_weights(engine)
    engine.destroy()
    return locals() | {"engine": None, "loader": None, "module": None, "ctx": None}


def refusal(function: Any, *args: Any, **given: Any) -> str:
    with pytest.raises(ConfigError) as error:
        function(*args, **given)
    return str(error.value)


def test_deepspeed_surface(pool: WorkerPool, tmp_path: Path) -> None:
    start, end = pool.run(surface, 2, str(tmp_path))
    assert start["as_they_lie"] and end["as_they_lie"]
    assert start["first"] == end["first"] and start["again"] == end["again"]
    assert (start["ends"], end["ends"]) == ((True, False, 0, 2), (False, True, 1, 2))
    plain = row(True).build(0, 9)
    plain.load_state_dict(start["weights"])
    held_out = [ids.unsqueeze(0) for ids in batch(0)[:3]]
    wanted = [plain(ids).detach() for ids in held_out]
    losses = [float(loss_of(output, ids)) for output, ids in zip(wanted, held_out, strict=True)]
    for found in (start, end):
        assert float(found["loss"]) == pytest.approx(sum(losses) / 3, rel=1e-5)
        assert [float(loss) for loss in found["each"]] == pytest.approx(losses, rel=1e-5)
        for text, call in zip(
            found["refusals"], ("engine(...)", "engine.backward()", "engine.step()"), strict=True
        ):
            assert call in text and "train_batch" in text
    assert start["last"] is None and start["mine"] is None and start["outputs"] is None
    assert torch.allclose(end["last"], wanted[-1], atol=1e-5)
    assert float(end["mine"]) == float(end["loss"])
    written = (tmp_path / "monitor" / "Train_Samples_eval_loss.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in written] == ["24"] * 3  # samples trained by then
    assert [float(line.split(",")[1]) for line in written] == [float(end["loss"])] * 3
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(end["outputs"], wanted, strict=True))


def refused(ctx: RankContext) -> list[str]:
    pipeline: dict[str, Any] = {"stages": 2}
    wrong = [
        (row(False, num_stages=1), config_of(0, 4, pipeline)),
        (row(False, topology=PipeDataParallelTopology(1, 1)), config_of(0, 4, {})),
        (
            row(False),
            config_of(0, 4, pipeline, compile={"deepcompile": False, "backend": "eager", "enabled": True}),
        ),
        (row(False), config_of(0, 4, {}, managed_gradient_accumulation=False)),
    ]
    return [refusal(engine_of, config, module) for module, config in wrong]


def test_what_contradicts_itself(pool: WorkerPool) -> None:
    words = ("contradicts the model", "degree 1 along data, but the run has 2", "compile", "managed_gradient")
    for found in pool.run(refused, 2):
        for word, text in zip(words, found, strict=True):
            assert word in text, text


def bad_rows(ctx: RankContext) -> list[str]:
    """Mistakes that show only with data."""
    texts = []
    for layers, loss_fn, given in (
        ([nn.Linear(4, 4), nn.ReLU()], None, (torch.ones(2, 4), torch.ones(2, 4))),
        ([nn.Linear(4, 4), nn.ReLU()], F.mse_loss, (torch.ones(2, 4),)),
        ([nn.Linear(4, 4), nn.ReLU()], F.mse_loss, {"inputs": torch.ones(2, 4)}),
    ):
        engine = engine_of(config_of(0, 1, {}, train_batch_size=2), PipelineModule(layers, loss_fn=loss_fn))
        texts.append(refusal(engine.train_batch, iter([given])))
        engine.destroy()
    return texts


def test_batches_without_a_loss(pool: WorkerPool) -> None:
    words = ("returns no loss", "returns no loss", "the batch is a dict of inputs")
    for word, text in zip(words, pool.run(bad_rows, 1)[0], strict=True):
        assert word in text
