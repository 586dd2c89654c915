"""Which experts the tokens of a step go to: counted in training, told in `metrics.jsonl`, and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from launcher.comm import Mesh, all_reduce
from launcher.comm.plain import gather_plain
from launcher.experts.modules import arguments_of, experts_in, number_of
from launcher.monitor.figure import blank, save


class ExpertLoad:
    """Counts the tokens of each expert, over the ranks that have batches of their own.

    Args:
        model: with this rank's layers.
        mesh: every rank of it must make one.

    Attributes:
        experts: the name of each layer's experts -> how many they are, of all pipeline stages.
        total: tokens of each since the beginning, fp64 [layers, experts]. A layer with fewer experts than another has
            zeros at the end.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh, found, pp = mesh, experts_in(model), mesh.axes["pp"]
        mine = {name: number_of(module) for name, module in found}
        stages = [mine] if pp.group is None else gather_plain(mine, pp.group)
        self.experts: dict[str, int] = {name: count for stage in stages for name, count in stage.items()}
        shape = len(self.experts), max(self.experts.values(), default=0)
        self._step = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
        self.total = torch.zeros(shape, dtype=torch.float64)
        rows = list(self.experts)
        self._row = {module: rows.index(name) for name, module in found}
        for module in self._row:  # first: it sees what the router says
            module.register_forward_pre_hook(self._count, prepend=True, with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        recomputes = torch._C._current_graph_task_id() != -1
        if module.training and not recomputes:
            index, most = arguments_of(module, args, keywords)[1].flatten(), self._step.shape[1]
            known = index[(index >= 0) & (index < most)]
            self._step[self._row[module]] += torch.bincount(known, minlength=most)

    def take(self) -> dict[str, float]:
        """Return what the counts of a step say, and begin to count the next. Every rank must call it.

        Returns:
            expert_load: tokens of the expert that has most / an even share, in the layer where that is most.
            expert_entropy: of the experts' shares, the mean of the layers. 1: even; 0: one expert has all tokens.
            Empty without experts.
        """
        if not self.experts:
            return {}
        for axis in (self._mesh.dp_cp, self._mesh.axes["pp"]):
            all_reduce(self._step.view(-1), axis, "root/experts").wait()
        counts = self._step.to("cpu", copy=True)
        self._step.zero_()
        self.total += counts
        numbers = torch.tensor(list(self.experts.values()), dtype=torch.float64)
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        entropy = -torch.xlogy(shares, shares).sum(1) / numbers.clamp(min=2).log()
        return {
            "expert_load": float((shares.amax(1) * numbers).max()),
            "expert_entropy": float(entropy.mean()),
        }

    def plot(self, png: Path, *, title: str) -> Path:
        """Draw the tokens of each expert since the beginning, compared with an even share, which is white."""
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
        axes.set(title=title, xlabel="expert", ylabel="layer with experts")
        for ticks in (axes.xaxis, axes.yaxis):
            ticks.set_major_locator(MaxNLocator(integer=True))
        return save(figure, png)
