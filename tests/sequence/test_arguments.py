"""Arguments and outputs of a sequence-parallel forward: they match one process, or are refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import launcher
from launcher.errors import LauncherError
from launcher.integrations.ulysses import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.sequence.families import _BASE, BATCHES, model_of

LR = 0.01


def engine_of(model: Any, mpu: Any = None, **sections: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "context_parallel": {"ring": 2},
        **sections,
    }
    return launcher.initialize(model=model, config=config, mpu=mpu, device=DEVICE)[0]


def opt() -> Any:
    config = AutoConfig.for_model(
        "opt", **{**_BASE, "ffn_dim": 40, "word_embed_proj_dim": 32, "dropout": 0.0}
    )
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


# ---- numbers ----------------------------------------------------------------------------------------


def with_other_ignored(model: Any, step: Callable[[Any], float]) -> dict[str, Any]:
    """Pass `ignore_index` to the call, with labels and with shifted ones."""
    batch = BATCHES["plain"](0, 23)
    moved = torch.cat([batch["labels"][:, 1:], torch.zeros(2, 1, dtype=torch.int64)], 1)
    return {
        "labels": step(model(**batch, ignore_index=0).loss),
        "moved": step(model(**batch, shift_labels=moved, ignore_index=0).loss),
    }


def with_embeddings(model: Any, step: Callable[[Any], float]) -> dict[str, Any]:
    """Return the gradient of embeddings that the script created."""
    leaf = torch.randn(2, 23, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = step(model(inputs_embeds=leaf, labels=BATCHES["plain"](0, 23)["labels"]).loss)
    return {"loss": loss, "gradient": leaf.grad}


def as_a_teacher(model: Any, step: Callable[[Any], float]) -> dict[str, Any]:
    """Run in train mode without gradients; and with shifted labels alone, from which a model computes no loss."""
    batch = BATCHES["plain"](0, 23)
    with torch.no_grad():
        outputs = model(**batch)
        alone = model(input_ids=batch["input_ids"], shift_labels=batch["labels"])
    return {"logits": outputs.logits, "loss": float(outputs.loss), "alone": alone.loss, "those": alone.logits}


SCRIPTS = {"ignored": with_other_ignored, "embeddings": with_embeddings, "teacher": as_a_teacher}


def on_ranks(ctx: RankContext, script: str) -> dict[str, Any]:
    engine = engine_of(model_of("grouped"))

    def step(loss: Tensor) -> float:
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    found = SCRIPTS[script](engine, step)
    engine.destroy()
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_answers_are_those_of_one_process(pool: WorkerPool, script: str) -> None:
    model = model_of("grouped")
    sgd = torch.optim.SGD(model.parameters(), LR)

    def step(loss: Tensor) -> float:
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        return float(loss.detach())

    wanted = SCRIPTS[script](model, step)
    for found in pool.run(on_ranks, 2, script):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            if value is None:
                assert found[key] is None
            else:
                torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


# ---- refusals ---------------------------------------------------------------------------------------


def by_hand(engine: Any) -> None:
    """Generate without setting a cache."""
    engine.eval()
    ids = BATCHES["plain"](0, 8)["input_ids"]
    with torch.no_grad():
        outputs = engine(input_ids=ids)
        assert not hasattr(outputs.past_key_values, "to")  # as libraries ask that move what a model returns
        engine(input_ids=ids[:, -1:], past_key_values=outputs.past_key_values)


def with_another_mask(engine: Any) -> None:
    batch = BATCHES["plain"](0, 23)
    engine(**batch, attention_mask=torch.zeros(2, 20, dtype=torch.int64))


def with_three_positions(engine: Any) -> None:
    engine(**BATCHES["plain"](0, 23), position_ids=torch.zeros(3, 2, 23, dtype=torch.int64))


def with_attentions(engine: Any) -> None:
    engine(**BATCHES["plain"](0, 23), output_attentions=True)


def with_pixels(engine: Any) -> None:
    engine(**BATCHES["plain"](0, 23), pixel_values=torch.zeros(2, 3, 4, 4))


def padded(engine: Any) -> None:
    engine(**BATCHES["left padded"](0, 23))


def with_noise(engine: Any) -> None:
    engine.module.get_input_embeddings().neftune_noise_alpha = 5.0
    engine(**BATCHES["plain"](0, 23))


def with_other_embeddings(engine: Any) -> None:
    seed = torch.distributed.get_rank()
    leaf = torch.randn(2, 23, 32, generator=torch.Generator().manual_seed(seed))
    engine(inputs_embeds=leaf, labels=BATCHES["plain"](0, 23)["labels"])


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a cache": (by_hand, "no KV cache is kept for a sharded sequence"),
    "a mask": (with_another_mask, r"attention_mask is a tensor of shape \(2, 20\)"),
    "positions": (with_three_positions, r"position_ids is a tensor of shape \(3, 2, 23\)"),
    "attentions": (with_attentions, "called with output_attentions, of which each rank computes only a part"),
    "pixels": (with_pixels, "called with pixel_values"),
    "padding": (padded, "computes position_ids from the padding mask"),
    "noise": (with_noise, "neftune_noise_alpha"),
    "embeddings": (with_other_embeddings, "received different inputs"),
}


def refusals(ctx: RankContext) -> dict[str, str]:
    found = {}
    for name, (script, _) in REFUSED.items():
        model = opt() if name == "padding" else model_of("grouped")
        model.config.use_cache = name == "a cache"
        engine = engine_of(model)
        try:
            script(engine)
        except LauncherError as error:
            found[name] = str(error)
        engine.destroy()
    return found


def test_what_a_rank_cannot_answer_is_refused(pool: WorkerPool) -> None:
    for found in pool.run(refusals, 2):
        for name, (_, words) in REFUSED.items():
            assert name in found, name
            assert re.search(words, found[name]), found[name]


def packed(ctx: RankContext, family: str, cache: bool) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("launcher").addHandler(handler)
    model = model_of(family)
    model.config.use_cache = cache
    engine = engine_of(model)
    for _ in range(2):
        engine(**BATCHES["packed"](0, 24))
    logging.getLogger("launcher").removeHandler(handler)
    engine.destroy()
    return [text for text in told if "documents" in text]


@pytest.mark.parametrize(
    ("family", "cache", "told"), [("grouped", True, 1), ("grouped", False, 0), ("sinks", False, 1)]
)
def test_documents_that_would_see_each_other_on_one_rank_are_told_of(
    pool: WorkerPool, family: str, cache: bool, told: int
) -> None:
    """transformers detects documents only without a cache; gpt-oss never does."""
    first, second = pool.run(packed, 2, family, cache)
    assert (
        len(first) == told
        and all("do not attend to each other here, but they do without" in text for text in first)
        and not second
    )


# ---- a forward of the script's own -------------------------------------------------------------------


def with_own_forward(ctx: RankContext, takes: str) -> float | str:
    """As TRL and Liger do: the model's forward is replaced, and computes the loss itself."""
    model = model_of("grouped")
    mpu: Any = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 2)
    inner, head = model.model, model.lm_head

    def with_moved(input_ids: Tensor, labels: Any = None, shift_labels: Any = None, **more: Any) -> Any:
        logits = head(inner(input_ids=input_ids, **more)[0])
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())}

    def without(input_ids: Tensor, labels: Any = None, **more: Any) -> Any:
        more.pop("shift_labels", None)
        return with_moved(input_ids, shift_labels=labels, **more)

    own = with_moved if takes == "shift_labels" else without
    engine = engine_of(model, mpu, context_parallel={}, sequence_parallel_size=2)

    def forward(*args: Any, **keywords: Any) -> Any:
        return CausalLMOutputWithPast(**own(*args, **keywords))

    if takes == "shift_labels":

        @wraps(type(model).forward)  # as TRL does
        def in_its_place(*args: Any, labels: Any = None, shift_labels: Any = None, **more: Any) -> Any:
            return forward(*args, labels=labels, shift_labels=shift_labels, **more)

        model.forward = in_its_place
    else:
        model.forward = forward
    batches = [BATCHES["plain"](0, 24)]
    loader = UlyssesSPDataLoaderAdapter(batches, ctx.rank, mpu.get_sequence_parallel_group(), 2, DEVICE)
    batch = next(iter(loader))
    try:
        return float(engine(**batch, labels=batch["shift_labels"]).loss)
    except LauncherError as error:
        return str(error)
    finally:
        engine.destroy()


def test_a_forward_of_the_scripts_own_gets_moved_labels(pool: WorkerPool) -> None:
    wanted = model_of("grouped")(**BATCHES["plain"](0, 24)).loss.item()
    first, second = pool.run(with_own_forward, 2, "shift_labels")
    assert (first * 24 + second * 22) / 46 == pytest.approx(wanted, rel=1e-6)  # the last tokens learn nothing
    for told in pool.run(with_own_forward, 2, "labels"):
        assert "computes its loss itself" in told
