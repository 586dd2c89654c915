"""Activations are freed after a step: attributes that layers set on them must not keep them alive."""

from __future__ import annotations

import gc

import pytest
from torch import Tensor

from launcher.comm import Axis
from launcher.tensor.apply import apply
from launcher.tensor.split_model import TensorParallelOptions
from tests.pool.device import DEVICE
from tests.pool.reference import batch, tiny_llama


def living() -> int:
    """Return the tensors that Python can reach, including cycles that only the garbage collector would free."""
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


@pytest.mark.parametrize("sequence", [False, True])
def test_a_step_leaves_no_activations(sequence: bool) -> None:
    alone = Axis("tp", degree=2)  # without a group nothing is sent: values are wrong, memory is not
    model = tiny_llama(layers=2, vocab=67)
    apply(model, alone, TensorParallelOptions(sequence=sequence), device=DEVICE)
    after = []
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            ids = batch(step)
            model(input_ids=ids).logits.sum().backward()
            after.append(living())
    finally:
        gc.enable()
    assert after[0] == after[1] == after[2]
