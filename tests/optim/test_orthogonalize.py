"""Newton-Schulz steps bring singular values close to 1 and keep the singular vectors."""

from __future__ import annotations

import pytest
import torch

from launcher.optim.orthogonalize import NSMethod, orthogonalize
from tests.optim.references import newton_schulz

SHAPES = [(16, 16), (8, 40), (40, 8), (1, 12), (12, 1), (3, 8, 24)]
METHODS: list[NSMethod] = ["gram", "standard"]


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.key("optimizer.params.ns_method")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_singular_values_are_near_one(shape: tuple[int, ...], method: NSMethod) -> None:
    given = matrix(*shape)
    u, _, vh = torch.linalg.svd(given, full_matrices=False)
    got = orthogonalize(given * 1e-3, method)  # the size of the update is lost, as it should be
    scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
    values = torch.linalg.svdvals(got) / scale
    if shape != (16, 16):  # a square random matrix has singular values near 0, which five steps do not lift
        assert values.min() > 0.6 and values.max() < 1.25
    # What is left outside of the directions U V^T is nothing: U^T got V is diagonal and positive.
    inside = u.mT @ got @ vh.mT
    assert torch.allclose(inside, torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1)), atol=1e-4)
    assert (inside.diagonal(dim1=-2, dim2=-1) > 0).all()


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)], ids=str)
def test_both_methods_are_the_formula(shape: tuple[int, int]) -> None:
    given = matrix(*shape)
    want = newton_schulz(given) * max(1.0, shape[0] / shape[1]) ** 0.5
    for method in METHODS:
        torch.testing.assert_close(orthogonalize(given, method), want, rtol=1e-4, atol=1e-5)


def test_filters_of_convolutions_are_matrices() -> None:
    given = matrix(6, 4, 3, 3)
    got = orthogonalize(given, "gram")
    assert got.shape == given.shape
    values = torch.linalg.svdvals(got.reshape(6, -1))
    assert values.min() > 0.6 and values.max() < 1.25


def test_zero_stays_zero_and_dtypes_stay() -> None:
    for method in METHODS:
        assert not orthogonalize(torch.zeros(4, 6), method).any()
        assert orthogonalize(matrix(4, 6).bfloat16(), method).dtype == torch.bfloat16
