"""The collectives of a tensor-parallel Llama in forward and backward match the theory, in bytes and order."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch

from launcher.comm import CollectiveRecord, Mesh, Pending, record_collectives
from launcher.tensor import functions
from launcher.tensor.apply import apply
from launcher.tensor.split_model import TensorParallelOptions
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import tiny_llama

ROWS, LENGTH, LAYERS, VOCAB = 2, 12, 2, 67


def one_pass(ctx: RankContext, sequence: bool) -> tuple[list[CollectiveRecord], int]:
    """Return the collectives of a forward and a backward, and the hidden size."""
    axis = Mesh.build(DEVICE, tp=ctx.world).axes["tp"]
    model = tiny_llama(layers=LAYERS, vocab=VOCAB, num_key_value_heads=4)
    apply(model, axis, TensorParallelOptions(sequence=sequence), device=DEVICE)
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCAB
    with record_collectives() as records:
        model(input_ids=ids, labels=ids).loss.backward()
    return records, model.config.hidden_size


@pytest.mark.parametrize(("world", "sequence"), [(2, False), (4, False), (2, True), (4, True)])
def test_messages_are_those_of_theory(pool: WorkerPool, world: int, sequence: bool) -> None:
    """Per layer: 4 all-reduces of tokens x hidden, or 4 all-gathers and 4 reduce-scatters of that size.

    Head and loss: a few numbers per token, nothing of vocabulary size.
    """
    for records, hidden in pool.run(one_pass, world, sequence):
        tokens = ROWS * LENGTH
        for layer in range(LAYERS):
            own = [
                r for r in records if r.tag.startswith(f"model.layers.{layer}.") and "sequence" not in r.tag
            ]
            want = {"all_gather": 4, "reduce_scatter": 4} if sequence else {"all_reduce": 4}
            assert Counter(r.op for r in own) == want
            assert {r.numel for r in own} == {tokens * hidden}
        ends = [r for r in records if "layers" not in r.tag]
        assert Counter((r.op, r.numel) for r in ends) == {
            ("all_reduce", tokens * hidden): 2,  # the embedding's output, the gradient of the head's input
            ("all_gather", tokens * 3 * world): 1,  # of each token: maximum, sum, the label's logit
        }


def order(ctx: RankContext, overlaps: bool) -> list[str]:
    """Return the events in the backward of two column-parallel layers that read the same input."""
    axis = Mesh.build(DEVICE, tp=ctx.world).axes["tp"]
    events: list[str] = []
    x = torch.randn(4, 8, requires_grad=True) * 1
    entered = functions.enter(x, axis, "here", overlaps=overlaps)
    outputs = []
    for name in "qk":
        weight = torch.randn(6, 8, requires_grad=True)
        weight.register_hook(lambda _, name=name: events.append(name))
        outputs.append(functions.linear(entered, weight, None))
    start, wait = functions.all_reduce, Pending.wait
    told = lambda *args: (events.append("reduce"), start(*args))[1]  # noqa: E731
    waits = lambda self: (events.append("wait"), wait(self))[1]  # noqa: E731
    with patch.object(functions, "all_reduce", told), patch.object(Pending, "wait", waits):
        (outputs[0] + outputs[1]).sum().backward()
    return events


def test_the_input_gradient_travels_while_the_last_weight_gradient_is_computed(pool: WorkerPool) -> None:
    assert pool.run(order, 2, True)[0] == ["k", "reduce", "q", "wait"]
    assert pool.run(order, 2, False)[0] == ["k", "q", "reduce", "wait"]
