"""Offload of optimizer state and parameters, to host memory and to NVMe, against DeepSpeed's.

    python -m benchmarks.offload --model medium --repeat 3

Two ranks with one thread each; on a CPU, device and host are the same memory. NVMe is what /tmp lies on. Prints the
tables and leaves the records in benchmarks/results/."""

from __future__ import annotations

from benchmarks.suite import KEEP, Suite, main
from benchmarks.sweep import Row
from benchmarks.zero import WORK

GROUPS = ["one rank", "optimizer on the CPU", "all on the CPU", "optimizer on NVMe", "all on NVMe"]
PLACES = {"cpu": GROUPS[1], "cpu-all": GROUPS[2], "nvme": GROUPS[3], "nvme-all": GROUPS[4]}


def rows(name: str, peer: str, environment: dict[str, str], **more: int) -> list[Row]:
    return [
        Row(
            f"{name}, {place}",
            (group,),
            peer,
            flags={"stage": 3, "offload": place, **more},
            environment=environment,
        )
        for place, group in PLACES.items()
    ]


OURS = rows("ours 3", "ours", {})
PEERS = [Row("plain PyTorch", ("one rank",), "single", world=1), *rows("DeepSpeed 3", "deepspeed", {})]
TUNED = [
    *rows("DeepSpeed 3, buckets 5e6, live 1e7", "deepspeed", {}, bucket=5_000_000, max_live=10_000_000),
    *rows("DeepSpeed 3, tuned, malloc keeps", "deepspeed", KEEP, bucket=5_000_000, max_live=10_000_000),
]

SUITE = Suite("offload", WORK, GROUPS, OURS, PEERS, TUNED)

if __name__ == "__main__":
    main(SUITE, __doc__)
