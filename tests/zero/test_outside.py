"""Modules called outside of the model's forward at stage 3: parameters are gathered, gradients match one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from tests.engine.driving import advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_llama
from tests.zero.models import points, stack

SGD = {"type": "SGD", "params": {"lr": 0.1}}
IDS = torch.arange(16).view(2, 8) % 11


def tiny_t5() -> nn.Module:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=16, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=15,
        )
    )  # fmt: skip


def llama(tied: bool) -> Callable[[], nn.Module]:
    return lambda: tiny_llama(tied=tied, layers=2)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama(False), "llama tied": llama(True), "t5": tiny_t5}


def embedded(model: nn.Module) -> Tensor:
    return model.get_input_embeddings()(IDS).square().mean()  # type: ignore[operator, no-any-return]


def part_by_part(model: nn.Module) -> Tensor:
    """Call a norm, an embedding, an inner linear layer, and a head."""
    inner = model.model
    hidden = inner.norm(inner.embed_tokens(IDS))
    hidden = hidden + inner.layers[1].mlp(hidden)
    return model.lm_head(hidden).square().mean()  # type: ignore[no-any-return]


def checkpointed(model: nn.Module) -> Tensor:
    inner = model.model
    hidden = inner.embed_tokens(IDS)
    hidden = torch.utils.checkpoint.checkpoint(
        lambda h: inner.layers[0].mlp(inner.norm(h)), hidden, use_reentrant=False
    )
    return model.lm_head(hidden).square().mean()  # type: ignore[no-any-return]


def then_the_whole(model: nn.Module) -> Tensor:
    return embedded(model) + model(input_ids=IDS, labels=IDS).loss  # type: ignore[no-any-return]


def encoded_first(model: nn.Module) -> Tensor:
    encoded = model.encoder(input_ids=IDS)
    return model(encoder_outputs=encoded, labels=IDS).loss  # type: ignore[no-any-return]


CALLS: dict[str, tuple[str, Callable[[nn.Module], Tensor]]] = {
    "embedding": ("llama", embedded),
    "tied embedding": ("llama tied", embedded),
    "parts": ("llama", part_by_part),
    "tied parts": ("llama tied", part_by_part),
    "checkpointed": ("llama", checkpointed),
    "embedding, then all": ("llama tied", then_the_whole),
    "encoder first": ("t5", encoded_first),
}


def weights_after(ctx: RankContext, call: str, stage: int) -> tuple[dict[str, Tensor], int]:
    """Take two steps on losses of parts of the model; return the weights, and the elements that are still gathered."""
    kind, loss_of = CALLS[call]
    engine = engine_of(config_of(stage, optimizer=SGD), MODELS[kind]())
    for _ in range(2):
        with torch.no_grad():
            loss_of(engine.module)
        loss_of(engine.module).backward()
        engine.step()
    return whole_weights(engine), engine.zero.unsharder.live


@pytest.mark.parametrize("call", CALLS)
def test_what_is_called_by_itself_trains_as_in_one_process(pool: WorkerPool, call: str) -> None:
    kind, loss_of = CALLS[call]
    model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    for weights, live in pool.run(weights_after, 2, call, 3):
        assert live == 0
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6, msg=name)


def generated(ctx: RankContext, kind: str) -> Tensor:
    engine = engine_of(config_of(3, optimizer=SGD), MODELS[kind]())
    engine.module.eval()
    with torch.no_grad():
        tokens: Tensor = engine.module.generate(IDS, max_new_tokens=5, do_sample=False)
    return tokens


@pytest.mark.parametrize("kind", MODELS)
def test_generate_is_that_of_one_process(pool: WorkerPool, kind: str) -> None:
    want = MODELS[kind]().eval().generate(IDS, max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    for tokens in pool.run(generated, 2, kind):
        assert torch.equal(tokens, want)


def transformed(ctx: RankContext, stage: int) -> None:
    """Use torch.func with the engine: gradients of inputs, and no effect on the step that follows."""
    plain, engine = stack(), engine_of(config_of(stage, 2, optimizer=SGD))
    x, y = points(0, 4)
    for transform in (torch.func.grad, torch.func.jacrev):
        torch.testing.assert_close(transform(lambda x: engine(x, y))(x), transform(lambda x: plain(x, y))(x))

    def by_row(model: Any) -> Tensor:
        one = torch.func.grad(lambda x, y: model(x, y))
        return torch.func.vmap(one)(x.unsqueeze(1), y.unsqueeze(1))

    torch.testing.assert_close(by_row(engine), by_row(plain))
    untouched = advance(engine_of(config_of(stage, 2, optimizer=SGD)), ctx, [0, 1])
    assert advance(engine, ctx, [0, 1]) == untouched


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_transforms_of_torch_are_no_backward_of_a_step(pool: WorkerPool, stage: int) -> None:
    pool.run(transformed, 2, stage)
