"""`PipelineModule`: any partition gives the same model with the same names; ties, methods, seeds and errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import launcher
from launcher.config import load
from launcher.errors import ConfigError, LauncherError
from launcher.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from launcher.pipeline.partition.costs import elements
from launcher.pipeline.sequential.stage import PipelineStage

WIDTH, VOCABULARY = 6, 11


class Block(nn.Module):
    def __init__(self, width: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), scale
        self.noise = nn.Parameter(torch.full((1,), np.random.rand() + random.random(), dtype=torch.float32))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.scale * torch.tanh(self.linear(inputs)) * self.noise


def logits(module: nn.Module, inputs: Tensor) -> Tensor:
    assert isinstance(module, nn.Embedding)
    return inputs @ module.weight.T


def row() -> list[Any]:
    """Return seven layers, the first and the last of which are tied."""
    return [
        TiedLayerSpec("word", nn.Embedding, VOCABULARY, WIDTH),
        LayerSpec(Block, WIDTH, scale=0.5),
        nn.ReLU(),
        LayerSpec(Block, WIDTH),
        lambda inputs: inputs * 2,
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("word", nn.Embedding, VOCABULARY, WIDTH, forward_fn=logits),
    ]


def stages(module: PipelineModule, boundaries: list[int]) -> list[PipelineStage]:
    return [module.build(first, last) for first, last in pairwise(boundaries)]


def values(built: list[PipelineStage]) -> Iterator[tuple[str, Tensor]]:
    for stage in built:
        yield from stage.state_dict().items()


def another_rank(seed: int) -> None:
    """Use different random numbers."""
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)


INPUTS = torch.arange(5)


@pytest.mark.parametrize("seed_layers", [False, True])
@pytest.mark.parametrize("boundaries", [[0, 3, 7], [0, 1, 2, 4, 7], [0, 6, 7]])
def test_any_cut_makes_the_same_model(boundaries: list[int], seed_layers: bool) -> None:
    module = PipelineModule(row(), num_stages=2, seed_layers=seed_layers)
    another_rank(7)
    whole = module.build(0, 7)
    another_rank(8)
    cut = stages(module, boundaries)
    assert list(whole.state_dict()) == [
        "0.weight", "1.noise", "1.linear.weight", "1.linear.bias", "3.noise", "3.linear.weight", "3.linear.bias",
        "5.weight", "5.bias",
    ]  # fmt: skip
    for name, value in values(cut):
        assert torch.equal(value, whole.state_dict()[name])
    assert {name for name, _ in values(cut)} == set(whole.state_dict())
    assert "0.weight" in cut[-1].state_dict()  # the tied layer, by the name of its first place
    hidden: Any = INPUTS
    for stage in cut:
        hidden = stage(hidden)
    assert hidden.shape == (5, VOCABULARY) and torch.equal(hidden, whole(INPUTS))


def test_seeds() -> None:
    """Layers of one class differ; seed_layers is base_seed + i; the random state outside is unchanged."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = torch.get_rng_state()
    drawn = (random.random(), np.random.rand())
    random.seed(1), np.random.seed(1)
    module = PipelineModule(row(), num_stages=1)
    first = dict(values([module.build(0, 7)]))
    assert torch.equal(before, torch.get_rng_state()) and (random.random(), np.random.rand()) == drawn
    assert not torch.equal(first["1.linear.weight"], first["3.linear.weight"])
    assert not torch.equal(first["0.weight"], module.build(0, 1, seed=5).state_dict()["0.weight"])
    seeded = PipelineModule(row(), num_stages=1, seed_layers=True, base_seed=40)
    torch.manual_seed(40)
    assert torch.equal(seeded.build(0, 1).state_dict()["0.weight"], nn.Embedding(VOCABULARY, WIDTH).weight)
    called: list[int] = []
    PipelineModule(row(), seed_layers=True, base_seed=40, seed_fn=called.append).build(0, 4)
    assert called == [40, 41, 43]


def test_nothing_is_built_before_it_is_known_where() -> None:
    class Costly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            raise AssertionError

    module = PipelineModule([LayerSpec(Costly), nn.ReLU()], num_stages=2)
    assert len(module) == 2 and not list(module.parameters()) and "Costly" in repr(LayerSpec(Costly))
    module.build(1, 2)
    with pytest.raises(LauncherError, match="a PipelineModule cannot be called directly"):
        module(INPUTS)


def test_ties() -> None:
    module = PipelineModule(row(), num_stages=2)
    assert module.tied == {"word": [0, 6]}
    whole = module.build(0, 7)
    whole(INPUTS).sum().backward()
    assert len(list(whole.parameters())) == 9 and whole.get_parameter("0.weight").grad is not None
    twice = nn.Linear(WIDTH, WIDTH)
    again = PipelineModule([twice, nn.ReLU(), twice], num_stages=2)
    assert again.tied == {"layer 0": [0, 2]} and list(again.build(2, 3).state_dict()) == [
        "0.weight",
        "0.bias",
    ]
    relu = nn.ReLU()
    assert PipelineModule([relu, relu], num_stages=2).tied == {}


def test_a_sequential_keeps_its_names() -> None:
    plain = nn.Sequential()
    plain.add_module("embed", nn.Embedding(VOCABULARY, WIDTH))
    plain.add_module("head", nn.Linear(WIDTH, 2))
    module = PipelineModule(plain, num_stages=2)
    cut = stages(module, [0, 1, 2])
    assert [name for name, _ in values(cut)] == list(plain.state_dict())
    assert torch.equal(cut[1](cut[0](INPUTS)), plain(INPUTS))
    twice = nn.Linear(2, 2)
    again = PipelineModule(nn.Sequential(twice, nn.ReLU(), twice), num_stages=1)
    assert len(again) == 3 and again.tied == {"layer 0": [0, 2]}


def test_costs_by_every_method() -> None:
    module = PipelineModule(row(), num_stages=2)
    block, embedding = WIDTH * WIDTH + WIDTH + 1, VOCABULARY * WIDTH
    assert module.layer_costs("uniform") == [1] * 7
    assert module.layer_costs("parameters") == [embedding, block, 0, block, 0, 2 * WIDTH, embedding]
    assert module.layer_costs("best") == [
        0,
        72,
        0,
        72,
        0,
        0,
        2 * embedding,
    ]  # lookups cost nothing, the head does
    assert module.layer_costs("type:block") == module.layer_costs("Type:^Block$") == [0, 1, 0, 1, 0, 0, 0]
    assert module.layer_costs("profile", [1, 2, 3, 4, 5, 6, 7]) == [1, 2, 3, 4, 5, 6, 7]
    assert module.boundaries(2) == [0, 3, 7]
    assert module.balance([0, 3, 7]).parameters == (embedding + block, block + 2 * WIDTH + embedding)
    assert sum(module.balance([0, 3, 7]).costs) == sum(module.layer_costs("parameters"))
    assert elements([module.build(0, 3)]) == embedding + block
    for method, what in (
        ("type:conv", "matches no layer"),
        ("type:(", "not a regular"),
        ("profile", "seconds of 7 layers"),
    ):
        with pytest.raises(ConfigError, match=what):
            module.layer_costs(method)


def test_a_layer_that_looks_at_values_is_counted_too() -> None:
    class Looks(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.largest = self.weight.max().item()

    assert PipelineModule([LayerSpec(Looks)], num_stages=1).layer_costs("parameters") == [6]


def test_the_json_comes_before_arguments() -> None:
    module = PipelineModule(row(), num_stages=2, partition_method="Uniform", activation_checkpoint_interval=3)
    module.configure(load({}).pipeline)
    assert (module.partition_method, module.seed_layers, module.activation_checkpoint_interval) == (
        "uniform",
        False,
        3,
    )
    written = {"partition": "type:block", "seed_layers": True, "activation_checkpoint_interval": 1}
    module.configure(load({"pipeline": written}).pipeline)
    assert module.partition_method == "type:block" and module.seed_layers
    assert module.activation_checkpoint_interval == 1


def test_groups_of_layers_are_recomputed() -> None:
    calls: list[int] = []

    def count(function: Callable[..., Any], *inputs: Any) -> Any:
        calls.append(len(inputs))
        return function(*inputs)

    pair = [LayerSpec(Block, WIDTH), lambda inputs: (inputs, inputs), lambda two: two[0] + two[1],
            LayerSpec(Block, WIDTH), nn.ReLU(), nn.ReLU()]  # fmt: skip
    plain = PipelineModule(pair, num_stages=1)
    inputs = torch.randn(3, WIDTH)
    expected = plain.build(0, 6)(inputs)
    for interval, groups in ((0, 0), (1, 2), (2, 2), (6, 1)):
        calls.clear()
        module = PipelineModule(
            pair, activation_checkpoint_interval=interval, activation_checkpoint_func=count
        )
        stage = module.build(0, 6)
        assert torch.equal(stage(inputs), expected) and len(calls) == groups
        with torch.no_grad():
            assert torch.equal(stage(inputs), expected) and len(calls) == groups
    calls.clear()
    named = PipelineModule(pair, activation_checkpoint_interval=1, activation_checkpoint_func=count,
                           checkpointable_layers=["ReLU"])  # fmt: skip
    named.build(0, 6)(inputs)
    assert len(calls) == 2
    ours = PipelineModule(pair, activation_checkpoint_interval=2).build(0, 6)
    kept = plain.build(0, 6)
    for stage in (ours, kept):
        stage(inputs).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), kept.parameters(), strict=True))  # type: ignore[arg-type]


SHARED = nn.Linear(2, 2)
WITH_SHARED = nn.Sequential(SHARED, nn.ReLU())
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: LayerSpec(len), "is not a subclass of nn.Module"),  # type: ignore[arg-type]
    (lambda: PipelineModule(["linear"]), "layer 0 is 'linear'"),
    (lambda: PipelineModule([PipelineModule([nn.ReLU()])]), "layer 0 is a PipelineModule"),
    (lambda: PipelineModule([TiedLayerSpec("a", nn.Linear, 1, 1), TiedLayerSpec("a", nn.Embedding, 1, 1)]),
     "have different classes: Linear and Embedding"),
    (lambda: PipelineModule([TiedLayerSpec("a", nn.ReLU)]).build(0, 1), "no weight 'weight' to tie with key 'a'"),
    (lambda: PipelineModule([SHARED, WITH_SHARED]), "layer 1 shares its parameter 0.weight with layer 0"),
    (lambda: PipelineModule([nn.ReLU()], loss_fn=nn.Linear(1, 1)), "has parameters"),
    (lambda: PipelineModule([nn.ReLU()], num_stages=0), "num_stages is 0"),
    (lambda: PipelineModule([nn.ReLU()], partition_method="profil"), "unknown partition method 'profil'"),
    (lambda: PipelineModule([nn.ReLU()]).build(0, 2), "layers 0 to 1 are out of range"),
    (lambda: PipelineModule([nn.ReLU()], num_stages=2).boundaries(2), "1 layer cannot be split into 2 stages"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "what"), REFUSED, ids=[what for _, what in REFUSED])
def test_what_cannot_be(make: Callable[[], Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make()


def test_the_public_names() -> None:
    assert launcher.pipe.PipelineModule is PipelineModule and launcher.pipe.TiedLayerSpec is TiedLayerSpec
    assert PipelineModule([nn.ReLU()], loss_fn=nn.functional.mse_loss).loss_fn is nn.functional.mse_loss
