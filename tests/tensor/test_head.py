"""A model with a split head has the loss and gradients of the plain model.

Code that may read full logits gets them; other code gets an error that explains how.
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaForCausalLM, PreTrainedModel, XLNetConfig

from launcher.comm import Axis, Mesh, record_collectives
from launcher.errors import LauncherError, SplitLogitsError
from launcher.tensor.apply import apply
from launcher.tensor.head import gather_logits, split_head, wants_gathered_head
from launcher.tensor.split_model import TensorParallelOptions, loss_only
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, tiny_gpt2, tiny_llama
from tests.tensor.transparency import all_ranks, gradient_difference, relative

VOCAB = 61  # no number of ranks divides it
IDS = batch(0, sequences=2, seq=8, vocab=VOCAB)


def tiny_gemma2() -> PreTrainedModel:
    """Return a model that caps its logits between head and loss."""
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=4,
        final_logit_softcapping=2.0,
        attn_implementation="eager",
        pad_token_id=None,
        use_cache=False,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_llama(vocab=VOCAB, layers=1, num_key_value_heads=4),
    "llama tied": lambda: tiny_llama(vocab=VOCAB, layers=1, num_key_value_heads=4, tied=True),
    "gemma2": tiny_gemma2,
}


def split(model: PreTrainedModel, axis: Axis) -> Any:
    return apply(model, axis, TensorParallelOptions(), device=DEVICE)


def compare(ctx: RankContext, name: str) -> None:
    axis = Mesh.build(DEVICE, tp=ctx.world).axes["tp"]
    plain = MODELS[name]()
    model: Any = copy.deepcopy(plain)
    made = split(model, axis)
    expected = plain(input_ids=IDS, labels=IDS)
    expected.loss.backward()

    with record_collectives() as records:
        outputs = model(input_ids=IDS, labels=IDS)
        outputs.loss.backward()
    assert [r.op for r in records if r.tag.startswith("head")] == ["all_gather"]
    assert relative(outputs.loss, expected.loss) < 1e-6
    assert len(set(all_ranks(outputs.loss.item()))) == 1
    worst = gradient_difference(plain, model, made)
    assert worst[0] < 1e-5, worst

    # The logits are there for whoever asks for them, and their gradient reaches every weight.
    assert outputs.logits.shape == expected.logits.shape
    with pytest.raises(SplitLogitsError):
        outputs.logits.argmax(-1)
    for each in (plain, model):
        each.zero_grad()
        found = each(input_ids=IDS, labels=IDS)
        logits = gather_logits(found.logits)
        assert relative(logits, expected.logits) < 1e-5
        logits.square().mean().backward()
    worst = gradient_difference(plain, model, made)
    assert worst[0] < 1e-5, worst

    assert relative(model(input_ids=IDS).logits, expected.logits) < 1e-5
    model.eval()
    evaluated = model(input_ids=IDS, labels=IDS)
    assert relative(evaluated.logits, expected.logits) < 1e-5
    assert relative(evaluated.loss, expected.loss) < 1e-6


@pytest.mark.parametrize(("name", "world"), [("llama", 2), ("llama tied", 4), ("gemma2", 2)])
def test_a_split_head_computes_what_the_plain_model_does(pool: WorkerPool, name: str, world: int) -> None:
    pool.run(compare, world, name)


def generate(ctx: RankContext) -> list[int]:
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    plain = model.generate(IDS[:, :3], max_new_tokens=5, do_sample=False)
    split(model, Mesh.build(DEVICE, tp=ctx.world).axes["tp"])
    assert torch.equal(model.generate(IDS[:, :3], max_new_tokens=5, do_sample=False), plain)
    with record_collectives() as records, loss_only(), torch.no_grad():
        loss = model(input_ids=IDS, labels=IDS).loss
    assert [r.tag for r in records if r.tag.startswith("head")] == ["head/loss"]
    return all_ranks(loss.item())


def test_generation_and_evaluation(pool: WorkerPool) -> None:
    """Generation reads full logits; a loop that reads only losses gathers none."""
    first, second = pool.run(generate, 2)
    assert first == second and first[0] == first[1]


# ---- the surface, on an axis of one rank -------------------------------------------------------


def alone(model: PreTrainedModel | None = None) -> Any:
    model = model or tiny_llama(vocab=VOCAB, layers=1)
    split_head(model, Axis("tp"), [VOCAB])
    return model


TOUCHES: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: x.float().softmax(-1),
    "operator": lambda x: 2 * x,
    "index": lambda x: x[:, -1],
    "view": lambda x: x.view(-1, VOCAB),
    "out": lambda x: torch.add(torch.zeros(1), 1, out=x),
    "cat": lambda x: torch.cat([x, x]),
    "to": lambda x: x.to(torch.float64),
    "detach": lambda x: x.detach().clone(),
    "data": lambda x: x.data.sum(),
    "iterate": lambda x: list(x),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("name", TOUCHES)
def test_touching_split_logits_says_how_to_get_them(name: str) -> None:
    logits = alone()(input_ids=IDS, labels=IDS).logits
    with pytest.raises(SplitLogitsError) as caught:
        TOUCHES[name](logits)
    for words in (
        f"LlamaForCausalLM (shape (2, 8, {VOCAB}))",
        "without labels",
        "eval mode",
        "gather_logits",
    ):
        assert words in str(caught.value)


def test_shape_and_dtype_of_split_logits_are_there() -> None:
    logits = alone().bfloat16()(input_ids=IDS, labels=IDS).logits
    assert (logits.shape, logits.dtype, logits.device) == ((2, 8, VOCAB), torch.bfloat16, DEVICE)
    assert "LlamaForCausalLM" in repr(logits) and "LlamaForCausalLM" in str(logits.detach())


def test_who_gets_whole_logits() -> None:
    model = alone()
    guarded = lambda outputs: "SplitLogits" in repr(outputs.logits)  # noqa: E731
    assert guarded(model(input_ids=IDS, labels=IDS))
    assert not guarded(model(input_ids=IDS))
    model.eval()
    assert not guarded(model(input_ids=IDS, labels=IDS))
    with loss_only():
        assert guarded(model(input_ids=IDS, labels=IDS))
        assert not guarded(model(input_ids=IDS))
    assert not guarded(model(input_ids=IDS, labels=IDS))
    assert not guarded(model.forward(input_ids=IDS, labels=IDS))  # as wrappers call it


def test_the_model_stays_what_it_was_for_who_asks() -> None:
    plain, model = tiny_llama(), alone()
    assert isinstance(model, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM" and type(model).__module__ == type(plain).__module__
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)


def test_outputs_as_a_tuple() -> None:
    loss, logits = alone()(input_ids=IDS, labels=IDS, return_dict=False)[:2]
    assert loss.requires_grad and gather_logits(logits).shape == (2, 8, VOCAB)


# ---- models that need a gathered head ----------------------------------------------------------


class OwnLoss(LlamaForCausalLM):
    """Calls the given loss only sometimes."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, **kwargs)
        outputs.loss = (
            self.loss_function(outputs.logits, labels, VOCAB) if labels is None else outputs.logits.sum()
        )
        return outputs


class OwnColumns(LlamaForCausalLM):
    """Drops some columns before the loss."""

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return self.loss_function(logits[..., :50], labels, 50)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnLoss, f"OwnLoss computed its own loss, on the logits of only {VOCAB} of {VOCAB}"),
        (OwnColumns, f"head of OwnColumns computes {VOCAB} columns, but its forward passed 50 to its loss"),
    ],
)
def test_a_forward_that_does_something_else_is_told(kind: type[PreTrainedModel], words: str) -> None:
    model = alone(kind(tiny_llama(vocab=VOCAB, layers=1).config))
    with pytest.raises(LauncherError, match=rf"{words}(.*\n)*.*vocab_parallel_lm_head to false"):
        model(IDS, labels=IDS)


def test_which_models_need_a_gathered_head() -> None:
    assert wants_gathered_head(tiny_llama(layers=1)) is None
    assert wants_gathered_head(tiny_gpt2(layers=1)) is None
    xlnet = AutoModelForCausalLM.from_config(
        XLNetConfig(vocab_size=8, d_model=8, n_layer=1, n_head=2, d_inner=8)
    )
    assert wants_gathered_head(xlnet) == "XLNetLMHeadModel.forward does not call loss_function"
    own, tuples, patched = (tiny_llama(layers=1) for _ in range(3))
    own.loss_function = lambda **kwargs: kwargs["logits"].sum()
    assert wants_gathered_head(own) == "the loss of LlamaForCausalLM is not ForCausalLMLoss"
    tuples.config.return_dict = False
    assert "config.return_dict is false" in str(wants_gathered_head(tuples))
    patched.forward = patched.forward
    assert wants_gathered_head(patched) == "the forward of this LlamaForCausalLM was replaced"
    with pytest.raises(
        LauncherError, match=r"logits are not supported: the forward of this.*\n.*gather the output"
    ):
        alone(patched)


def read_rows(ctx: RankContext) -> list[str]:
    model = tiny_llama(vocab=VOCAB, layers=1)
    split(model, Mesh.build(DEVICE, tp=2).axes["tp"])
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("launcher").addHandler(handler)
    model(input_ids=IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        assert model.lm_head.weight.dtype == torch.float32
    assert not said
    for _ in range(2):
        assert model.lm_head.weight.shape[0] < VOCAB
    logging.getLogger("launcher").removeHandler(handler)
    return said


def test_readers_of_its_rows_are_warned(pool: WorkerPool) -> None:
    """A loss of one's own that multiplies by the weight would see a part of the vocabulary."""
    for rank, rows in enumerate(("0 to 30", "31 to 60")):
        (said,) = pool.run(read_rows, 2)[rank]
        assert f"tests reads the weight of lm_head, which has only rows {rows}" in said
