"""The load of each expert: counted in training, written to `metrics.jsonl`, and plotted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launcher.comm import Mesh, all_reduce
from launcher.comm.plain import gather_plain
from launcher.experts.counts import counts_of
from launcher.experts.gates import capacity_of
from launcher.experts.modules import arguments_of, experts_in, number_of
from launcher.models.activation import recomputing
from launcher.monitor.figure import blank, save
from launcher.tensor.parts import even_sizes


class TokenCounts:
    """Counts the tokens that the routers of a model assign to each expert in training, on this rank.
    Recomputations in backward are not counted again.

    Args:
        modules: the experts of each layer.
        factor: capacity factor of the experts; 0: no capacity.

    Attributes:
        dropped: number of the counted (token, expert) pairs that exceed the capacity; a scalar.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, factor: float = 0.0) -> None:
        most = max(map(number_of, modules), default=0)
        self._counts = torch.zeros(len(modules), most, dtype=torch.float64, device=device)
        self.dropped = torch.zeros((), dtype=torch.float64, device=device)
        self._factor = factor
        self._row = {module: row for row, module in enumerate(modules)}
        for module in modules:  # prepended, to see the router's choices before other hooks change them
            module.register_forward_pre_hook(self._count, prepend=True, with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if module.training and not recomputing():
            index, most = arguments_of(module, args, keywords)[1].flatten(), self._counts.shape[1]
            known = index.where((index >= 0) & (index < most), most)
            counts = counts_of(known, most + 1)[:most]
            self._counts[self._row[module]] += counts
            if self._factor:
                capacity = capacity_of(len(index), number_of(module), self._factor)
                self.dropped += (counts - capacity).clamp(min=0).sum()

    def take(self) -> Tensor:
        """Return the counts, fp64 [layers, experts of the layer with the most], and reset them."""
        counts = self._counts.clone()
        self._counts.zero_()
        self.dropped.zero_()
        return counts


class ExpertLoad:
    """Counts the tokens of each expert, over the ranks that have batches of their own.

    Args:
        model: has this rank's layers.
        mesh: every rank of the mesh must create an instance.
        factor: capacity factor of the experts; 0: no capacity.
        ranks: number of ranks over which the experts are sharded.

    Attributes:
        experts: name of each layer's experts -> their number, for all pipeline stages.
        total: tokens of each expert since the start, fp64 [layers, experts]. Layers with fewer experts than
            others are padded with zeros.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, factor: float = 0.0, ranks: int = 1) -> None:
        self._mesh, self._factor, self._ranks = mesh, factor, ranks
        found, pp = experts_in(model), mesh.axes["pp"]
        mine = {name: number_of(module) for name, module in found}
        stages = [mine] if pp.group is None else gather_plain(mine, pp.group)
        self.experts: dict[str, int] = {name: count for stage in stages for name, count in stage.items()}
        self.total = torch.zeros(
            len(self.experts), max(self.experts.values(), default=0), dtype=torch.float64
        )
        self._counts = TokenCounts([module for _, module in found], mesh.device, factor)
        self._rows = [list(self.experts).index(name) for name, _ in found]

    def forget(self) -> None:
        """Discard the token counts of the step so far."""
        self._counts.take()

    def take(self) -> dict[str, float]:
        """Return the metrics of a step, and reset the counts for the next one. Every rank must call it.

        Returns:
            expert_load: tokens of the most loaded expert / an even share, maximum over the layers.
            expert_entropy: normalized entropy of the experts' shares, mean over the layers. 1: even; 0: one
                expert has all tokens.
            expert_rank_load: tokens of the most loaded rank / an even share, mean over the layers; only if
                experts are sharded. All other ranks wait for the most loaded rank of each layer.
            expert_dropped: share of (token, expert) pairs that were dropped; only with a capacity.
            Empty without experts.
        """
        if not self.experts:
            return {}
        dropped, mine = self._counts.dropped.clone(), self._counts.take()
        rows, columns = self.total.shape
        summed = torch.zeros(rows * columns + 1, dtype=torch.float64, device=self._mesh.device)
        summed[:-1].view(rows, columns)[self._rows, : mine.shape[1]] = mine
        summed[-1] = dropped
        for axis in (self._mesh.dp_cp, self._mesh.axes["pp"]):
            all_reduce(summed, axis, "root/experts").wait()
        counts, lost = summed[:-1].view(rows, columns).cpu(), float(summed[-1])
        self.total += counts
        numbers = torch.tensor(list(self.experts.values()), dtype=torch.float64)
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        entropy = -torch.xlogy(shares, shares).sum(1) / numbers.clamp(min=2).log()
        told = {
            "expert_load": float((shares.amax(1) * numbers).max()),
            "expert_entropy": float(entropy.mean()),
        }
        if self._ranks > 1:
            told["expert_rank_load"] = self._of_ranks(shares) * self._ranks
        if self._factor:
            told["expert_dropped"] = lost / max(1.0, float(counts.sum()))
        return told

    def _of_ranks(self, shares: Tensor) -> float:
        """Return the most loaded rank's share of tokens: [layers, experts] -> mean over the layers."""
        most = [
            max(float(part.sum()) for part in row[:count].split(even_sizes(count, self._ranks)))
            for row, count in zip(shares, self.experts.values(), strict=True)
        ]
        return sum(most) / len(most)

    def plot(self, png: Path, *, title: str) -> Path:
        """Plot the tokens of each expert since the start, relative to an even share, which is white."""
        numbers = torch.tensor(list(self.experts.values()), dtype=torch.float64)[:, None]
        times_even = (self.total / self.total.sum(1, keepdim=True).clamp(min=1) * numbers).numpy()
        for row, count in enumerate(self.experts.values()):
            times_even[row, count:] = np.nan
        most = max(2.0, float(np.nanmax(times_even)))
        shade = np.interp(times_even, [0, 1, most], [0, 0.5, 1])
        from matplotlib.ticker import MaxNLocator

        figure = blank()
        axes = figure.add_subplot()
        image = axes.imshow(shade, aspect="auto", cmap="RdBu_r", vmin=0, vmax=1, interpolation="nearest")
        bar = figure.colorbar(image, ticks=[0, 0.25, 0.5, 0.75, 1])
        bar.ax.set_yticklabels(
            ["no tokens", "0.5", "even share", f"{(1 + most) / 2:.1f}", f"{most:.1f} times"]
        )
        axes.set(title=title, xlabel="expert", ylabel="expert layer")
        for ticks in (axes.xaxis, axes.yaxis):
            ticks.set_major_locator(MaxNLocator(integer=True))
        return save(figure, png)
