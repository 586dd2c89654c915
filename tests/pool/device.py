"""`DEVICE`: the device on which tests train and compute the reference. `pytest --device cuda` makes it a GPU."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.pool.worker import DEVICE_VARIABLE

ON_GPU = os.environ.get(DEVICE_VARIABLE) == "cuda"
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
"""Every rank of the pool sees one GPU, as its first. If there are fewer GPUs than ranks, ranks share GPUs."""

if ON_GPU:  # results of ranks are on the host, the reference is on the GPU
    _equal = torch.equal
    torch.equal = lambda one, other: _equal(one.cpu(), other.cpu())
    torch.testing.assert_close = partial(torch.testing.assert_close, check_device=False)


def assert_alike(got: Any, want: Any, *, bf16: bool = False) -> None:
    """Assert that two runs gave the same numbers (floats and tensors, in lists, tuples and dicts), bit for bit.

    Use it if one run steps on the host and one on the device. A GPU rounds differently from its host, so there the
    numbers are compared within a tolerance.
    """
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert_alike(got[name], value, bf16=bf16)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_alike(one, other, bf16=bf16)
    elif not ON_GPU:
        assert torch.equal(got, want) if isinstance(want, Tensor) else got == want
    else:
        tolerance = {"rtol": 2**-7, "atol": 1e-3} if bf16 else {"rtol": 1e-4, "atol": 5e-6}
        torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), **tolerance)
