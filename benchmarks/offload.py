"""Compare offload of optimizer state and parameters, to host memory and to NVMe, with DeepSpeed's.

    python -m benchmarks.offload --model medium --repeat 3

Two ranks with one thread each; on a CPU, device and host are the same memory. NVMe is the disk of /tmp. Prints the
tables and writes the records to benchmarks/results/.
"""

from __future__ import annotations

from benchmarks.suite import KEEP, Suite, main
from benchmarks.sweep import Row
from benchmarks.zero import WORK

# table -> (stage, placement of the model's tensors)
PLACES = {
    "stage 2, optimizer on the CPU": (2, "cpu"),
    "optimizer on the CPU": (3, "cpu"),
    "all on the CPU": (3, "cpu-all"),
    "optimizer on NVMe": (3, "nvme"),
    "all on NVMe": (3, "nvme-all"),
}
GROUPS = ["one rank", *PLACES]


def rows(peer: str, how: str = "", environment: dict[str, str] | None = None, **more: int) -> list[Row]:
    name = {"ours": "ours", "deepspeed": "DeepSpeed"}[peer]
    return [
        Row(
            f"{name} {stage}{how}, {place}",
            (group,),
            peer,
            flags={"stage": stage, "offload": place, **more},
            environment=environment or {},
        )
        for group, (stage, place) in PLACES.items()
    ]


FEW = {"stage": 3, "offload": "nvme-all", "buffers": 2}
OURS = [*rows("ours"), Row("ours 3, two buffers, nvme-all", ("all on NVMe",), "ours", flags=FEW)]
PEERS = [Row("plain PyTorch", ("one rank",), "single", world=1), *rows("deepspeed")]
TUNED = [
    *rows("deepspeed", ", buckets 5e6, live 1e7", bucket=5_000_000, max_live=10_000_000),
    *rows("deepspeed", ", tuned, malloc keeps", KEEP, bucket=5_000_000, max_live=10_000_000),
]

SUITE = Suite("offload", WORK, GROUPS, OURS, PEERS, TUNED)

if __name__ == "__main__":
    main(SUITE, __doc__)
