"""Compare pipeline parallelism with DeepSpeed's PipelineModule and torch.distributed.pipelining.

    python -m benchmarks.pipeline --model small --repeat 3

Two ranks with one thread each hold half of the blocks each, and a step has eight microbatches. Plain PyTorch runs in
one process as the reference for the losses. Prints the tables and writes the records to benchmarks/results/.
"""

from __future__ import annotations

from benchmarks.suite import KEEP, Suite, main
from benchmarks.sweep import Row
from benchmarks.workload import Work

WORK = {
    "tiny": Work("tiny", global_batch=16, micro_batch=2, steps=8, warmup=3),
    "small": Work("small", global_batch=16, micro_batch=2, steps=8, warmup=2),
    "medium": Work("medium", global_batch=8, micro_batch=1, steps=6, warmup=2),
}

GROUPS = ["one rank", "two stages", "two chunks"]


def flags(schedule: str) -> dict[str, str | int]:
    return {"pp": 2, "schedule": schedule}


OURS = [
    Row("ours, 1f1b", ("two stages",), "ours", flags=flags("1f1b")),
    Row("ours, zb-h1", ("two stages",), "ours", flags=flags("zb-h1")),
    Row("ours, interleaved", ("two chunks",), "ours", flags=flags("interleaved")),
    Row("ours, zbv", ("two stages", "two chunks"), "ours", flags=flags("zbv")),
]
PEERS = [
    Row("plain PyTorch", ("one rank",), "single", world=1),
    Row("DeepSpeed PipelineModule", ("two stages",), "deepspeed", flags=flags("1f1b")),
    Row("torch pipelining, 1f1b", ("two stages",), "pipelining", flags=flags("1f1b")),
    Row("torch pipelining, interleaved", ("two chunks",), "pipelining", flags=flags("interleaved")),
    Row("torch pipelining, zbv", ("two chunks",), "pipelining", flags=flags("zbv")),
]
TUNED = [
    Row("DeepSpeed, malloc keeps", ("two stages",), "deepspeed", flags=flags("1f1b"), environment=KEEP),
    Row("torch, 1f1b, malloc keeps", ("two stages",), "pipelining", flags=flags("1f1b"), environment=KEEP),
]

SUITE = Suite("pipeline", WORK, GROUPS, OURS, PEERS, TUNED)

if __name__ == "__main__":
    main(SUITE, __doc__)
