"""Approximate orthogonalisation of a matrix by five Newton-Schulz steps, as Muon applies it to an update.

Each step is the polynomial X <- a X + (b A + c A^2) X with A = X X^T, whose coefficients quickly raise small
singular values and leave all of them between about 0.7 and 1.2 (Jordan 2024,
https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
RESTART = 2  # "gram": X is recomputed before this step; otherwise float16 loses the small singular values
EPS = 1e-7

NSMethod = Literal["gram", "standard"]


def orthogonalize(update: Tensor, method: NSMethod) -> Tensor:
    """Return U V^T of `update` = U S V^T, with singular values near 1, times sqrt(rows / columns) if that is
    greater than 1.

    Args:
        update: [..., rows, columns]; a convolution filter [out, in, height, width] is treated as [out, rest].
        method: DeepSpeed's `ns_method`: "standard" iterates on the matrix, "gram" on the Gram matrix of its
            short side. Both give the same result up to rounding.

    Returns:
        The orthogonalised update, with the shape and dtype of `update`.
    """
    matrix = update.reshape(len(update), -1) if update.dim() == 4 else update
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + EPS)
    x = x.to(_compute_dtype(update.device, method))
    x = _on_gram(x) if method == "gram" and x.shape[-1] > x.shape[-2] else _on_matrix(x)
    x = x.mT if tall else x
    return (x.to(update.dtype) * _scale(update.shape)).reshape(update.shape)


def _compute_dtype(device: torch.device, method: NSMethod) -> torch.dtype:
    """Return a 16-bit dtype on GPUs, for speed: float16 for "gram", which needs precision more than range."""
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if method == "gram" else torch.bfloat16


def _scale(shape: torch.Size) -> float:
    """Return sqrt(rows / columns) if there are more rows than columns, so that the rows of a tall update have
    a norm of 1 on average (root mean square). Rows and columns are the last two dims, as in DeepSpeed."""
    rows, columns = shape[-2:]
    return math.sqrt(rows / columns) if rows > columns else 1.0


def _on_matrix(x: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _on_gram(x: Tensor) -> Tensor:
    """Apply the same polynomials to R = X X^T [n, n]: with Q the product so far, X_k = Q X, R_k = Q R Q^T."""
    a, b, c = COEFFICIENTS
    identity = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
    for first, last in ((0, RESTART), (RESTART, STEPS)):
        r = x @ x.mT
        q = identity
        for step in range(first, last):
            factor = a * identity + b * r + c * r @ r
            q = factor @ q
            if step + 1 < last:
                r = factor @ r @ factor
        x = q @ x
    return x
