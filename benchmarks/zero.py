"""Compare ZeRO 0-3 with DDP, FSDP2, DeepSpeed and plain PyTorch.

    python -m benchmarks.zero --model small --repeat 3

Two ranks with one thread each; every row trains the same model on the same text, in turns. Prints the tables
and writes the records to benchmarks/results/.
"""

from __future__ import annotations

from benchmarks.suite import HAND_BACK, KEEP, Suite, main
from benchmarks.sweep import Row
from benchmarks.workload import Work

WORK = {
    "tiny": Work("tiny", global_batch=8, micro_batch=2, steps=8, warmup=3),
    "small": Work("small", global_batch=4, micro_batch=2, steps=8, warmup=3),
    "medium": Work("medium", global_batch=2, micro_batch=1, steps=6, warmup=2),
}

GROUPS = ["one rank", "stage 0", "stage 1", "stage 2", "stage 3"]

SMALL_BUCKETS = {"bucket": 5_000_000}
FEW_LIVE = SMALL_BUCKETS | {"max_live": 10_000_000}

OURS = [
    Row("ours, one rank", ("one rank",), "ours", world=1),
    *(Row(f"ours {stage}", (f"stage {stage}",), "ours", flags={"stage": stage}) for stage in range(4)),
    Row("ours 3, buckets 5e6, live 1e7", ("stage 3",), "ours", flags={"stage": 3} | FEW_LIVE),
]
PEERS = [
    Row("plain PyTorch", ("one rank",), "single", world=1),
    Row("DDP", ("stage 0",), "ddp"),
    *(
        Row(f"DeepSpeed {stage}", (f"stage {stage}",), "deepspeed", flags={"stage": stage})
        for stage in range(4)
    ),
    Row("FSDP2, keep after forward", ("stage 1", "stage 2"), "fsdp2", flags={"reshard": False}),
    Row("FSDP2, reshard after forward", ("stage 3",), "fsdp2", flags={"reshard": True}),
]
TUNED = [
    Row("DDP, malloc keeps", ("stage 0",), "ddp", environment=KEEP),
    Row("DeepSpeed 1, buckets 5e6", ("stage 1",), "deepspeed", flags={"stage": 1} | SMALL_BUCKETS),
    Row("DeepSpeed 2, buckets 5e6", ("stage 2",), "deepspeed", flags={"stage": 2} | SMALL_BUCKETS),
    Row("DeepSpeed 3, buckets 5e6, live 1e7", ("stage 3",), "deepspeed", flags={"stage": 3} | FEW_LIVE),
    Row(
        "FSDP2, keep, malloc keeps",
        ("stage 1", "stage 2"),
        "fsdp2",
        flags={"reshard": False},
        environment=KEEP,
    ),
    Row("FSDP2, reshard, malloc keeps", ("stage 3",), "fsdp2", flags={"reshard": True}, environment=KEEP),
    Row(
        "FSDP2, reshard, malloc hands back",
        ("stage 3",),
        "fsdp2",
        flags={"reshard": True},
        environment=HAND_BACK,
    ),
]

SUITE = Suite("zero", WORK, GROUPS, OURS, PEERS, TUNED)

if __name__ == "__main__":
    main(SUITE, __doc__)
