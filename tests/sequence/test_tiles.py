"""Tiled loss and MLPs: results equal those of the full computation, and the full tensors never exist."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import launcher
from launcher.errors import ConfigError, LauncherError
from launcher.sequence import tiled_loss, tiled_mlp
from launcher.sequence.tiled_loss import TiledLoss, tile_loss
from launcher.sequence.tiled_mlp import tile_mlps
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.sequence.families import _BASE, BATCHES, VOCAB, model_of
from tests.tensor.running import whole_state

LR = 0.01
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "caps": ("gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "a scale": ("cohere", {"logit_scale": 0.25}),
    "a divisor": ("granite", {"logits_scaling": 3.0}),
    "Conv1D": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "resid_pdrop": 0.0}),
}


def made(name: str) -> PreTrainedModel:
    kind, more = HEADS[name]
    config = AutoConfig.for_model(kind, **{**_BASE, **more})
    for key in ("attention_dropout", "attn_pdrop", "embd_pdrop"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.train()


def gradients(
    model: PreTrainedModel, batch: dict[str, Tensor], **more: Any
) -> tuple[float, dict[str, Tensor]]:
    loss = model(**batch, **more).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


@pytest.mark.parametrize("name", HEADS)
def test_every_gradient_is_that_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes another token count as divisor, and tiles without labels."""
    monkeypatch.setattr(tiled_mlp, "TOKENS", 4)
    model = made(name)
    batch = BATCHES["left padded"](0, 23)
    for more in ({}, {"num_items_in_batch": torch.tensor(50)}):
        loss, wanted = gradients(model, batch, **more)
        tiled = [TiledLoss(model, tile=5 * 2 * VOCAB), tile_mlps(model)]
        found_loss, found = gradients(model, batch, **more)
        assert found_loss == pytest.approx(loss, rel=1e-6) and found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)
        for one in reversed(tiled):
            one.remove()
        assert type(model.get_output_embeddings()) is torch.nn.Linear
    model.eval()
    assert isinstance(model(**batch).logits, Tensor)


def test_who_reads_logits_is_told() -> None:
    model = made("plain")
    tiled = TiledLoss(model)
    outputs = model(**BATCHES["plain"](0, 12))
    assert outputs.logits.shape == (2, 12, VOCAB)
    for read in (lambda x: x.argmax(-1), lambda x: x[:, -1], lambda x: torch.softmax(x, -1), lambda x: x * x):
        with pytest.raises(LauncherError, match='"tiled_loss": false'):
            read(outputs.logits)
    assert isinstance(model(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits, Tensor)
    tiled.remove()


@pytest.mark.key("tiled_loss")
def test_a_model_that_cannot_is_refused() -> None:
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="is not a transformers model"):
        tile_loss(linear, True, shared=False)
    assert tile_loss(linear, None, shared=True) is None
    assert tile_loss(made("plain"), None, shared=False) is None
    assert tile_loss(made("plain"), False, shared=True) is None


@pytest.mark.key("tiled_mlp")
def test_experts_are_no_mlp() -> None:
    with pytest.raises(ConfigError, match="has an MLP of linear layers"):
        tile_mlps(model_of("experts"))


@pytest.mark.parametrize(("kind", "rows"), [("gpt2", 2), ("bloom", 1)])
def test_what_comes_beside_an_mlps_input_is_cut(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BLOOM passes the residual to its MLP; GPT-2 views its input."""
    monkeypatch.setattr(tiled_mlp, "TOKENS", 4)
    sizes = {
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "hidden_size": 4,
        "resid_pdrop": 0.0,
        "hidden_dropout": 0.0,
    }
    config = AutoConfig.for_model(kind, **{**_BASE, **sizes})
    config.attention_dropout = config.attn_pdrop = config.embd_pdrop = 0.0
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    batch = {key: value[:rows] for key, value in BATCHES["plain"](0, 23).items()}
    loss, want = gradients(model, batch)
    tile_mlps(model)
    found, got = gradients(model, batch)
    assert found == pytest.approx(loss, rel=1e-6)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-7)


def test_a_layer_that_mixes_tokens_is_no_mlp() -> None:
    """RWKV's feed-forward uses the previous token."""
    config = AutoConfig.for_model("rwkv", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="has an MLP of linear layers"):
        tile_mlps(AutoModelForCausalLM.from_config(config))


class Case(NamedTuple):
    world: int
    stage: int
    sections: tuple[tuple[str, Any], ...] = ()
    name: str = "plain"


RUNS = [
    Case(2, 3, (("tensor_parallel", {"autotp_size": 2}),)),
    Case(2, 3, name="tied"),
    Case(2, 1, (("pipeline", {"stages": 2}),), "caps"),
    Case(2, 2, (("sequence_parallel_size", 2), ("activation_checkpointing", {})), "tied"),
]


def trained(ctx: RankContext, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    tiled_loss.TILE, tiled_mlp.TOKENS = 5 * VOCAB, 4
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "tiled_loss": True,
        "tiled_mlp": True,
        **dict(case.sections),
    }
    engine: Any = launcher.initialize(model=made(case.name), config=config, device=DEVICE)[0]
    losses = [float(engine.train_batch(iter([BATCHES["packed"](step, 22)]))) for step in range(2)]
    weights = {name: value for name, value in whole_state(engine).items() if "/" not in name}
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize(
    "case", [RUNS[0], *(pytest.param(case, marks=pytest.mark.full) for case in RUNS[1:])]
)
def test_runs_are_those_of_one_process(pool: WorkerPool, case: Case) -> None:
    model = made(case.name)
    sgd, losses = torch.optim.SGD(model.parameters(), LR), []
    for step in range(2):
        sgd.zero_grad()
        loss = model(**BATCHES["packed"](step, 22)).loss
        loss.backward()
        losses.append(loss.item())
        sgd.step()
    for found in pool.run(trained, case.world, case):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[1][name], value.detach(), rtol=2e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """Records the largest tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = ()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > self.numel:
                self.shape, self.numel = tuple(leaf.shape), leaf.numel()
        return out


def largest_tensor(ctx: RankContext, sections: dict[str, Any], length: int, tile: int) -> int:
    tiled_loss.TILE = tile
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 0},
        **sections,
    }
    engine: Any = launcher.initialize(model=model_of("grouped"), config=config, device=DEVICE)[0]
    ids = torch.zeros(1, length, dtype=torch.int64)
    with Largest() as seen:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
    engine.destroy()
    return seen.numel


@pytest.mark.parametrize("ways", [{"ulysses": 2}, {"ring": 2}])
def test_no_rank_holds_a_whole_sequence(pool: WorkerPool, ways: dict[str, int]) -> None:
    """Neither logits of a slice, nor hidden states of the sequence: the largest is a slice of the MLP's width."""
    length, tile = 2048, 64 * VOCAB
    for numel in pool.run(largest_tensor, 2, {"context_parallel": ways}, length, tile):
        assert numel < length * 32  # tokens x hidden
        assert numel < length // 2 * VOCAB
