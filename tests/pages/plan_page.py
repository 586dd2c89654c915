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
(below), and with no run of this launcher on GPUs. Take it as a list of layouts to measure.

`launch plan` tries every layout of a run: tensor and pipeline degrees, ranks that share sequences or experts, ZeRO
stage, microbatch, schedule, checkpointing,
offload. Of each it predicts the step and, in the order of speed, the memory, until {top} meshes that fit are found.

- **Work** (`plan/work.py`) is read off the model itself, on meta: operations of its products, bytes that everything
  else in a block reads and writes, parameters.
- **Computing**: products take their operations at a share of the device's peak, all else its bytes at a share of the
  memory's. Gradients of inputs and of weights take as long as the forward each; a checkpointed block runs forward
  twice.
- **Tensor parallelism** sends 4 all-reduces of tokens x hidden a block and microbatch, 6 where blocks are recomputed.
- **Shared experts** send the tokens of each expert of a token to the rank that has it and back, in a forward and in
  a backward.
- **Shared sequences** exchange heads for tokens before attention, and back behind it.
- **Pipelines**: layers are cut into stages as a run cuts them, the embedding and the head with the first and the last
  block. The schedule's own list of actions, the same that a run executes, is simulated with what each stage costs
  then.
- **Data parallelism**: the volumes of ZeRO (arXiv 1910.02054, section 7), less what the backward or the forward
  hides.
- **Links**: ranks lie as in a run: those of tp are neighbours, then those of dp, then those of pp. A group inside a
  node has the node's links; a group across nodes shares the ways out of those of its ranks that share a node.
- **Memory** is what `launch memory-estimate` says of the layout's own JSON: of the first stage, the last, and the one
  with most blocks. Tensors can take what CUDA's context, NCCL's buffers and a reserve of 6 % (`--reserve`) leave.
- **Offload** adds the way over the host's link and a step at the host's memory bandwidth.

Devices and links are data: `launcher/monitor/devices.json`, with sources. What training reaches of the peaks is one
set of numbers a device: of products {matmul:.0%} where they are wide (half of it at a hidden size over tp of
{half_width}), of the memory {traffic:.0%}, of links {network:.0%}, unless the device's row says otherwise.

What it does not know: the shapes that a device likes, congestion, slow nodes, attention that is not one kernel. It
assumes that all
ranks get the same number of tokens for their experts, unless `--expert-load` says otherwise.

## Published runs

FLOP/s of a device as published, and as predicted for the published mesh, with the microbatch and the interleaving
of the
publication, or the best ones where it does not say. Place: where the published mesh stands among the planner's own
choices for that model, number of devices and batch, with the run's recomputation and ZeRO stage. "Too large": no
layout
of that mesh fits by the estimate. {within} of {number} predictions are within 12 %; the median is off by
{middle:.1%}. The
devices' shares were fitted to the ten runs of 2104.04473, and to the smaller one of Llama 3; the others were
predicted
afterwards.

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
