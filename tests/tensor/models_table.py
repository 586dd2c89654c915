"""How every causal-LM type behaves under tensor parallelism and in pipeline stages.

    python -m tests.tensor.models_table [--write]

trains every type (takes minutes), and fails if a type computes different values, raises an unexpected error, or has a
verdict that differs from `verdicts.tsv`. With --write it writes that file and docs/models.md.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.pipeline.judging import judged
from tests.pool import WorkerPool
from tests.tensor.judging import EXACTLY, KEYS, REFUSED, WORKS, Verdict, judge
from tests.tensor.zoo import CAUSAL_TYPES
from tests.tensor.zoo_tables import KNOWN_AT, UNRUNNABLE

VERDICTS = Path(__file__).with_name("verdicts.tsv")
SHARED, SPREAD = (Path(__file__).parents[1] / name / "verdicts.tsv" for name in ("sequence", "experts"))
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
LIMIT_S = 1800.0

_HEADS = {"split": "split", "gathered": "gathered", "whole": "on every rank", "": ""}
_PLANS = {"transformers": "transformers", "ours": "ours", "both": "transformers, with rules of ours", "": ""}

_INTRODUCTION = """# Models under tensor and pipeline parallelism

Every causal-LM type of transformers {version}, split over tensor-parallel ranks (`tensor_parallel.autotp_size`) and
into pipeline stages (`pipeline.stages`). `make models` trains a tiny model of each type and fails
if a result does not match this page; `make pages` generates the page.

| | types | matches one process | refused |
|---|---:|---:|---:|
| split at degrees 2 and 4 | {types} | {works} | {refused} |
| ... with a plan from transformers | {theirs} | {theirs} | 0 |
| ... with only a plan of ours | {ours} | {ours} | 0 |
| `"sequence_parallel": true`, degree 2 | {types} | {sequence} | {sequence_refused} |
| logits stay split over the vocabulary in training | {works} | {heads} | |
| split into 2 pipeline stages, and into 4 if it has 4 blocks | {types} | {stages} | {uncut} |
| sequences sharded over a ring of 2 ranks | {types} | {shared} | {unshared} |
| experts sharded over 2 ranks | {mixtures} | {spread} | {unspread} |

**works**: logits, loss, the gradient of every parameter, and all weights after 3 steps equal those of one process,
within 1e-5 of the largest value of each in fp32 (for a gradient: its own largest value, or 5 % of the model's largest
one). **works (float64)**: outside this tolerance in fp32 because terms cancel, so that the remainder is mostly rounding
error; within 1e-6 in float64. **refused**: an error is raised before training starts. No type is silently wrong.

Sharded sequences are compared by the loss and all gradients of one step, with a length that is not a multiple of the
number of ranks. So are sharded experts; the column is empty for types whose code has no experts.
For pipeline stages, the verdicts refer to losses, gradient norms and weights over 3 steps of 2 microbatches, schedule
1f1b, one rank per stage.

Limits of these tests: a larger degree must divide heads and features, and is refused if it does not; models are tested
without dropout, with eager attention, on the CPU; images and audio are tested only if a type requires them.

"whole" lists large parts (5 % of the tiny model or more) that every rank stores and computes in full: state-space
layers, image towers. "repeated" lists parts whose parameters are split, but which each rank computes in full. All other
parts are split. Output head: logits stay split over the vocabulary up to the loss ("split"), or are gathered before it
because the model's own code needs all of them ("gathered"; see `vocab_parallel_lm_head`).

## A model without a plan

You can write one: `partition_config` contains rules for the weights of linear layers, by name, in DeepSpeed's format. A
pair of rules splits a feed-forward layer: `"column"` for the projection that produces the features, `"row"` for the one
that consumes them. Operations between the two must be elementwise in the features, like an activation function. If they
are not, as in a recurrence, use `"column"` with `"gather_output": true`: weights, gradients and optimizer states are
split, and the rest is computed on every rank. Weights that match no rule stay unsplit; embedding and head are split
without a rule. This is all that RWKV needs:

```json
{example}
```

Then compare the first losses with those of one process: a wrong rule usually shows up at once, as a shape error or a
different loss.

## The types

| type | tensor parallel | sequence parallel | plan | output head | stages | sharded sequences | sharded experts |
|---|---|---|---|---|---|---|---|
{rows}
"""

EXAMPLE = """{
  "train_micro_batch_size_per_gpu": 4,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
  "tensor_parallel": {
    "autotp_size": 2,
    "partition_config": {
      "layer_specs": [
        {"patterns": [".*\\\\.feed_forward\\\\.key\\\\.weight$"], "partition_type": "column"},
        {"patterns": [".*\\\\.feed_forward\\\\.value\\\\.weight$"], "partition_type": "row"},
        {
          "patterns": [
            ".*\\\\.attention\\\\.(key|value|receptance|output)\\\\.weight$",
            ".*\\\\.feed_forward\\\\.receptance\\\\.weight$"
          ],
          "partition_type": "column",
          "gather_output": true
        }
      ]
    }
  }
}"""


def read_verdicts() -> list[Verdict]:
    with VERDICTS.open(newline="") as file:
        return [Verdict(**row) for row in csv.DictReader(file, delimiter="\t")]


@cache
def shared_verdicts() -> dict[str, str]:
    """Return type -> verdict with sharded sequences, as written by tests/sequence/zoo.py."""
    return dict(line.split("\t") for line in SHARED.read_text().splitlines())


@cache
def spread_verdicts() -> dict[str, str]:
    """Return type -> verdict with sharded experts, as written by tests/experts/zoo.py."""
    return dict(line.split("\t") for line in SPREAD.read_text().splitlines())


def write_verdicts(verdicts: Sequence[Verdict]) -> None:
    with VERDICTS.open("w", newline="") as file:
        table = csv.DictWriter(file, KEYS, delimiter="\t", lineterminator="\n")
        table.writeheader()
        table.writerows(dataclasses.asdict(verdict) for verdict in verdicts)


def page_of(verdicts: Sequence[Verdict]) -> str:
    good = [v for v in verdicts if v.tensor in (WORKS, EXACTLY)]
    ours = sum(v.plan == "ours" for v in good)
    sliced = sum(v.sequence in (WORKS, EXACTLY) for v in verdicts)
    return _INTRODUCTION.format(
        version=KNOWN_AT,
        types=len(verdicts),
        works=len(good),
        refused=len(verdicts) - len(good),
        theirs=len(good) - ours,
        ours=ours,
        sequence=sliced,
        sequence_refused=len(verdicts) - sliced,
        heads=sum(v.head == "split" for v in good),
        stages=sum(v.stages in (WORKS, EXACTLY) for v in verdicts),
        uncut=sum(v.stages == REFUSED for v in verdicts),
        shared=sum(word == WORKS for word in shared_verdicts().values()),
        unshared=sum(word != WORKS for word in shared_verdicts().values()),
        mixtures=len(spread_verdicts()),
        spread=sum(word == WORKS for word in spread_verdicts().values()),
        unspread=sum(word != WORKS for word in spread_verdicts().values()),
        example=EXAMPLE,
        rows="\n".join(
            [_row(v) for v in verdicts]
            + [f"| `{kind}` | not tested: {why} | | | | | | |" for kind, why in UNRUNNABLE.items()]
        ),
    )


def _row(verdict: Verdict) -> str:
    tensor = verdict.tensor
    if tensor == REFUSED:
        tensor, sequence = f"refused: {verdict.reason}", REFUSED
    else:
        sequence = verdict.sequence + (f": {verdict.reason}" if verdict.reason else "")
    notes = [
        f"{word}: {', '.join(f'`{name}`' for name in names.split())}"
        for word, names in (("whole", verdict.whole), ("repeated", verdict.repeated))
        if names
    ]
    cells = [
        f"`{verdict.type}`",
        "; ".join([tensor, *notes]),
        sequence,
        _PLANS[verdict.plan],
        _HEADS[verdict.head],
        verdict.stages + (f": {verdict.uncut}" if verdict.uncut else ""),
        shared_verdicts().get(verdict.type, ""),
        spread_verdicts().get(verdict.type, ""),
    ]
    return f"| {' | '.join(cells)} |"


def unsound(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the types that are neither correct nor refused."""
    known = {WORKS, EXACTLY, REFUSED}
    return [
        f"{v.type}: {v.tensor}; sequence: {v.sequence}; stages: {v.stages}"
        for v in verdicts
        if not {v.tensor, v.sequence, v.stages} <= known
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Test every causal-LM type under tensor and pipeline parallelism."
    )
    parser.add_argument("--write", action="store_true", help="write verdicts.tsv and docs/models.md")
    write: bool = parser.parse_args().write
    pool = WorkerPool()
    verdicts: list[Verdict] = pool.run(judge, 4, CAUSAL_TYPES, timeout=LIMIT_S)[0]
    verdicts = [judged(pool, verdict) for verdict in verdicts]
    pool.close()
    known = {verdict.type: verdict for verdict in read_verdicts()} if VERDICTS.exists() else {}
    verdicts = [remembered(verdict, known.get(verdict.type)) for verdict in verdicts]
    changed = [v.type for v in verdicts if v.type not in known or as_in_fp32(v) != as_in_fp32(known[v.type])]
    if write:
        write_verdicts(verdicts)
        PAGE.write_text(page_of(verdicts))
    wrong = unsound(verdicts)
    print(f"{len(verdicts)} types; another verdict than before: {', '.join(changed) or 'none'}")
    print("\n".join(wrong))
    return int(bool(wrong or (changed and not write)))


def as_in_fp32(verdict: Verdict) -> Verdict:
    """Return the verdict without float64: rounding, and so which types need it, depends on the machine."""
    return dataclasses.replace(
        verdict,
        tensor=verdict.tensor.replace(EXACTLY, WORKS),
        sequence=verdict.sequence.replace(EXACTLY, WORKS),
        stages=verdict.stages.replace(EXACTLY, WORKS),
    )


def remembered(verdict: Verdict, known: Verdict | None) -> Verdict:
    """Return the verdict, with the float64 verdicts of an earlier run: they may be needed again."""
    if known is None:
        return verdict
    words = {
        key: EXACTLY
        for key in ("tensor", "sequence", "stages")
        if (getattr(verdict, key), getattr(known, key)) == (WORKS, EXACTLY)
    }
    return dataclasses.replace(verdict, **words)


if __name__ == "__main__":
    sys.exit(main())
