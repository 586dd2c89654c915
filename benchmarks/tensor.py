"""Compare tensor parallelism with DeepSpeed's AutoTP and torch's parallelize_module.

    python -m benchmarks.tensor --model small --repeat 3

Two ranks with one thread each split every layer and get the same batch. Plain PyTorch runs in one process as the
reference for the losses. Prints the tables and writes the records to benchmarks/results/.
"""

from __future__ import annotations

from benchmarks.suite import KEEP, Suite, main
from benchmarks.sweep import Row
from benchmarks.workload import Work

# The ranks share a batch, so a step of two microbatches has two on each.
WORK = {
    "tiny": Work("tiny", global_batch=4, micro_batch=2, steps=8, warmup=3),
    "small": Work("small", global_batch=4, micro_batch=2, steps=8, warmup=3),
    "medium": Work("medium", global_batch=2, micro_batch=1, steps=6, warmup=2),
}

GROUPS = ["one rank", "tp 2"]
HERE = ("tp 2",)
TP = {"tp": 2}

OURS = [Row("ours, tp 2", HERE, "ours", flags=TP)]
PEERS = [
    Row("plain PyTorch", ("one rank",), "single", world=1),
    Row("DeepSpeed AutoTP", HERE, "deepspeed", flags=TP),
    Row("parallelize_module", HERE, "dtensor", flags=TP),
]
TUNED = [
    Row("DeepSpeed AutoTP, malloc keeps", HERE, "deepspeed", flags=TP, environment=KEEP),
    Row("parallelize_module, blocks only", HERE, "dtensor", flags=TP | {"ends": False}),
    Row("parallelize_module, malloc keeps", HERE, "dtensor", flags=TP, environment=KEEP),
]

SUITE = Suite("tensor", WORK, GROUPS, OURS, PEERS, TUNED)

if __name__ == "__main__":
    main(SUITE, __doc__)
