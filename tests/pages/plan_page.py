"""Writes docs/plan.md: how steps are predicted, and published runs beside their predictions.

python -m tests.pages.plan_page > docs/plan.md
"""

from __future__ import annotations

from launcher.monitor.device_budget import budget_for
from launcher.plan.choose import PlanSearch, choose
from launcher.plan.layout import layouts
from launcher.plan.memory import MemoryPredictor
from tests.plan.literature import PER_NODE, Published, published

TOP = 10
TEXT = """# `launch plan`: how a step is predicted

**Experimental.** A plan is a prediction on paper. Its formulas were compared with published runs of other programs
(below), and with no run of this launcher on GPUs. Take it as a list of layouts to measure.

`launch plan` tries every layout of a run: tensor and pipeline degrees, ZeRO stage, microbatch, schedule, checkpointing,
offload. Of each it predicts the step and, in the order of speed, the memory, until {top} meshes that fit are found.

- **Work** (`plan/work.py`) is read off the model itself, on meta: operations of its products, bytes that everything
  else in a block reads and writes, parameters.
- **Computing**: products take their operations at a share of the device's peak, all else its bytes at a share of the
  memory's. Gradients of inputs and of weights take as long as the forward each; a checkpointed block runs forward
  twice.
- **Tensor parallelism** sends 4 all-reduces of tokens x hidden a block and microbatch, 6 where blocks are recomputed.
- **Pipelines**: the schedule's own list of actions is simulated with these costs (the same lists that a run executes).
- **Data parallelism**: the volumes of ZeRO (arXiv 1910.02054, section 7), less what the backward or the forward hides.
- **Links**: ranks lie as in a run: those of tp are neighbours, then those of dp, then those of pp. A group inside a
  node has the node's links; a group across nodes shares the ways out of those of its ranks that share a node.
- **Memory** is what `launch memory-estimate` says of the layout's own JSON.
- **Offload** adds the way over the host's link and a step at the host's memory bandwidth.

Devices and links are data: `launcher/monitor/devices.json`, with sources. What training reaches of the peaks is one
set of numbers a device: of products {matmul:.0%}, of the memory {traffic:.0%}, of links {network:.0%}, unless the
device's row says otherwise.

What it does not know: the shapes that a device likes, congestion, slow nodes, attention that is not one kernel, uneven
use of experts. Context parallelism is not here.

## Published runs

FLOP/s of a device as published, and as predicted for the published mesh (microbatch and interleaving are the
prediction's). Place: where the published mesh stands among the planner's own choices for that model, number of devices
and batch, with their recomputation and without ZeRO; for Megatron-LM's runs of 2021, which had no other choice.

| run | devices | tp | pp | published | predicted | error | place |
|---|---:|---:|---:|---:|---:|---:|---:|
"""


def place_of(run: Published) -> int | None:
    """Return where the published mesh stands among the choices, from 1; None where it is not among the first."""
    work, memory = run.work(), MemoryPredictor(run.model, run.work(), attention=run.device.attention)
    place = PlanSearch(run.device, PER_NODE, budget_for(run.device))
    ways = layouts(work, run.ranks, run.batch, stages=(0,), recompute=(True,), offloads=("none",))
    found = [choice.layout.mesh for choice in choose(work, place, ways, memory.peak, memory.kept, top=TOP)]
    return found.index(run.mesh) + 1 if run.mesh in found else None


def main() -> None:
    first = published()[0].device
    shares = {"matmul": first.matmul_share, "traffic": first.traffic_share, "network": first.network_share}
    print(TEXT.format(top=TOP, **shares), end="")
    for run in published():
        predicted, _ = run.predicted()
        place = place_of(run) if run.recompute else "-"
        cells = [
            run.name,
            f"{run.ranks:,}",
            str(run.tp),
            str(run.pp),
            f"{run.flops / 1e12:.0f}",
            f"{predicted / 1e12:.0f}",
            f"{predicted / run.flops - 1:+.1%}",
            f"after {TOP}" if place is None else str(place),
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
