"""Attention kernels: which one torch selects, and the tensors that each saves."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config

from launcher.config import load
from launcher.estimate.attention_kernels import attention_of, choose_kernel
from launcher.estimate.estimator import Estimator

CUDA = ("flash", "efficient", "math")
CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}


def test_dropout_of_scores_takes_no_memory_where_a_kernel_is_fused() -> None:
    """CPUs have no kernel for it, GPUs do: the estimate for a GPU must not depend on the local device."""
    peaks = {}
    for dropout in (0.0, 0.1):
        model = GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=1024, attn_pdrop=dropout
        )
        for kernels in (CUDA, ("math",)):
            estimator = Estimator(model, attention=kernels)
            peaks[dropout, kernels] = estimator.estimate(load(CONFIG), 1).peak
            assert estimator.attention == [kernels[0]]
    assert peaks[0.1, CUDA] == peaks[0.0, CUDA]
    scores = 4 * 1024 * 1024 * 2  # of one layer
    assert peaks[0.0, ("math",)] > peaks[0.0, CUDA] + 2 * scores
    assert peaks[0.1, ("math",)] > peaks[0.0, ("math",)] + scores


@pytest.mark.parametrize(
    ("dtype", "size", "masked", "grouped", "kernel"),
    [
        (torch.bfloat16, 64, False, True, "flash"),
        (torch.bfloat16, 64, True, False, "efficient"),
        (torch.float32, 64, False, False, "efficient"),
        (torch.bfloat16, 512, False, False, "efficient"),
        (torch.float32, 64, False, True, "math"),
        (torch.float64, 64, False, False, "math"),
    ],
)
def test_the_kernel_is_the_one_that_torch_takes(
    dtype: torch.dtype, size: int, masked: bool, grouped: bool, kernel: str
) -> None:
    query = torch.empty(1, 4, 8, size, dtype=dtype)
    assert choose_kernel(CUDA, query, masked=masked, grouped=grouped) == kernel
    assert choose_kernel(("cpu",), query, masked=masked, grouped=grouped) == "cpu"


def test_shapes_and_gradients_are_those_of_the_real_one() -> None:
    query = torch.randn(2, 4, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(2, 2, 8, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    real = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    used: set[str] = set()
    with attention_of(CUDA, used):
        from torch.nn import functional

        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out.sum().backward()
    assert used == {"flash"} and out.shape == real.shape and out.dtype == real.dtype
    assert out.transpose(1, 2).is_contiguous()  # as kernels of GPUs write it: no copy follows
    for one in (query, key, value):
        assert one.grad is not None and one.grad.shape == one.shape
