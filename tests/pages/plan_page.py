"""Writes docs/plan.md: how steps are predicted, and published runs beside their predictions.

python -m tests.pages.plan_page > docs/plan.md
"""

from __future__ import annotations

from launcher.monitor.device_budget import budget_for
from launcher.plan.choose import PlanSearch, choose
from launcher.plan.memory import MemoryPredictor
from tests.plan.literature import PER_NODE, Published, published

TOP = 10
TEXT = """# `launch plan`: how a step is predicted

**Experimental.** A plan is a prediction on paper. Its formulas were compared with published runs of other programs
(below), but with no run of this launcher on GPUs. Treat it as a list of layouts to measure.

`launch plan` tries every layout of a run: tensor and pipeline degrees, sequence and expert parallelism, ZeRO stage,
microbatch, schedule, activation checkpointing, offload. It predicts the step time of each. Then it estimates the
memory of the fastest ones, in order of speed, until {top} meshes that fit are found.

- **Work** (`plan/work.py`) is derived from the model itself, on the meta device: FLOPs of its matrix products, bytes
  that all other operations of a block read and write, number of parameters.
- **Compute**: matrix products run at a fraction of the device's peak FLOP/s, all other operations at a fraction of its
  memory bandwidth. Launching an operation takes a fixed time, during which a GPU works and a CPU does not. The
  gradients of inputs and of weights take as long as the forward each. With LoRA (`--lora`) frozen weights have no
  gradient. A checkpointed block runs its forward twice.
- **Tensor parallelism** takes 4 all-reduces of tokens x hidden per block and microbatch, 6 with recomputation.
- **Expert parallelism** sends each token to the ranks of its experts and back, in the forward and in the backward.
- **Sequence parallelism** exchanges heads for tokens before attention, and tokens for heads after it.
- **Pipeline parallelism**: layers are split into stages as in a run; the embedding belongs to the first block and the
  head to the last. The schedule's action list, the same that a run executes, is simulated with the cost of each stage.
- **Data parallelism** sends the volumes of ZeRO (arXiv 1910.02054, section 7). What overlaps with the forward or the
  backward costs nothing.
- **Links**: ranks are placed as in a run: tp ranks are neighbours, then dp ranks, then pp ranks. A group inside a node
  uses the links of the node; a group across nodes shares the node's network with the other groups of that node.
- **Memory** is what `launch memory-estimate` reports for the layout's own JSON: the first stage, the last stage, and
  the stage with most blocks. CUDA's context, NCCL's buffers and a reserve of 6 % (`--reserve`) are subtracted from the
  device's memory.
- **Offload** adds the transfers over the host's link, and an optimizer step at the host's memory bandwidth.

Devices and links are data: `launcher/monitor/devices.json`, with sources. The fractions of the peaks that training
reaches are one set of numbers: {matmul:.0%} of the FLOP/s for wide matrix products (half of it where the hidden size
divided by tp is {half_width}), {traffic:.0%} of the memory bandwidth, {network:.0%} of the links, unless the device's
row has its own.

Not modelled: matrix shapes that suit a device better or worse, congestion, slow nodes, attention that is not one
kernel. All ranks are assumed to get the same number of tokens for their experts; `--expert-load` changes that.

## Published runs

Published and predicted FLOP/s of a device, for the published mesh with the published microbatch and interleaving, or
the best ones where the publication does not name them. Place: the rank of the published mesh among the planner's own
choices for that model, number of devices and batch, with the run's recomputation and ZeRO stage. "Too large": no
layout of that mesh fits by the estimate. {within} of {number} predictions are within 12 %; the median error is
{middle:.1%}. The fractions were fitted to the ten runs of 2104.04473 and to the smaller run of Llama 3; the other runs
were predicted afterwards.

| run | devices | tp | pp | published | predicted | error | place |
|---|---:|---:|---:|---:|---:|---:|---:|
"""


def place_of(run: Published) -> str:
    """Return where the published mesh stands among the choices, from 1, or why it does not."""
    work = run.work()
    memory, place = MemoryPredictor(run.model, work, attention=run.device.attention), budget_for(run.device)
    search = PlanSearch(run.device, PER_NODE, place)
    ways = run.ways()
    found = [choice.layout.mesh for choice in choose(work, search, ways, memory.peak, memory.kept, top=TOP)]
    if run.mesh in found:
        return str(found.index(run.mesh) + 1)
    mine = [way for way in ways if way.mesh == run.mesh]
    fits = choose(work, search, mine, memory.peak, memory.kept, top=1)
    return f"after {TOP}" if fits else "too large"


def main() -> None:
    first = published()[0].device
    shares = {"matmul": first.matmul_share, "traffic": first.traffic_share, "network": first.network_share}
    errors = [run.predicted()[0] / run.flops - 1 for run in published()]
    sizes = sorted(map(abs, errors))
    counts = {
        "within": sum(size <= 0.12 for size in sizes),
        "number": len(sizes),
        "middle": sizes[len(sizes) // 2],
    }
    print(TEXT.format(top=TOP, half_width=f"{first.half_width:.0f}", **shares, **counts), end="")
    for run, error in zip(published(), errors, strict=True):
        cells = [
            run.name,
            f"{run.ranks:,}",
            str(run.tp),
            str(run.pp),
            f"{run.flops / 1e12:.0f}",
            f"{run.flops * (1 + error) / 1e12:.0f}",
            f"{error:+.1%}",
            place_of(run),
        ]
        print(f"| {' | '.join(cells)} |")
    print("\n`tests/plan/literature.json` names the sources.")


if __name__ == "__main__":
    main()
