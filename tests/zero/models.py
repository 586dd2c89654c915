"""Awkward little models: what real ones do to an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.pool.device import DEVICE


class Block(nn.Module):
    """A residual MLP; `spare` is a parameter that only some forwards use."""

    def __init__(self, width: int, spare: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.spare = nn.Linear(width, width) if spare else None

    def forward(self, x: Tensor, use_spare: bool = False) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.spare(x) if use_spare and self.spare is not None else x


class Stack(nn.Module):
    """Blocks between two linear layers, and a loss.

    Args:
        repeat: run the blocks so many times: their parameters are used twice in a forward.
        frozen: names of blocks (by index) without gradients.
        spare: give every block a layer that only `use_spare` steps use.
        scale: a parameter of one element, and one of three: slices of some ranks are empty.
    """

    def __init__(
        self,
        width: int = 8,
        depth: int = 3,
        repeat: int = 1,
        frozen: tuple[int, ...] = (),
        spare: bool = False,
    ):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList([Block(width, spare) for _ in range(depth)])
        self.scale, self.offset = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(3))
        self.repeat = repeat
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def forward(
        self, x: Tensor, y: Tensor, use_spare: bool = False, without_grad: tuple[int, ...] = ()
    ) -> Tensor:
        """`without_grad`: blocks (by index) that run and get no gradients."""
        h = self.first(x)
        for _ in range(self.repeat):
            for index, block in enumerate(self.blocks):
                out = block(h, use_spare)
                h = out if index not in without_grad else h + (out - h).detach()
        out = self.last(h).squeeze(-1) * self.scale + self.offset.sum()
        return nn.functional.mse_loss(out, y)


def stack(seed: int = 0, **options: Any) -> Stack:
    """A Stack with the weights of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Stack(**options).to(DEVICE)


def points(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs [rows, 4] and targets [rows] of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 4, generator=generator)
    return x.to(DEVICE), x.sum(1).sin().to(DEVICE)
