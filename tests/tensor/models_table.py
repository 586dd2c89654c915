"""What becomes of every causal-LM type under tensor parallelism, and in pipeline stages.

    python -m tests.tensor.models_table [--write]

trains every type (minutes), and fails when a type computes something else, stops in an error, or has another verdict
than in `verdicts.tsv`. With --write it writes that file and docs/models.md.
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
_PLANS = {"transformers": "transformers", "ours": "ours", "both": "transformers, with rows of ours", "": ""}

_INTRODUCTION = """# Models under tensor and pipeline parallelism

Every causal-LM type of transformers {version}, split over tensor-parallel ranks (`tensor_parallel.autotp_size`), and
cut into pipeline stages (`pipeline.stages`). `make models` trains a tiny model of each, and
fails where one is not as this page says; `make pages` writes it.

| | types | as in one process | refused |
|---|---:|---:|---:|
| split at degrees 2 and 4 | {types} | {works} | {refused} |
| ... with a plan from transformers | {theirs} | {theirs} | 0 |
| ... with a plan of ours alone | {ours} | {ours} | 0 |
| `"sequence_parallel": true`, degree 2 | {types} | {sequence} | {sequence_refused} |
| its logits stay split over the vocabulary in training | {works} | {heads} | |
| cut into 2 stages, and into 4 where it has 4 blocks | {types} | {stages} | {uncut} |
| its sequences shared by a ring of 2 ranks | {types} | {shared} | {unshared} |
| its experts spread over 2 ranks | {mixtures} | {spread} | {unspread} |

**works**: logits, loss, the gradient of every parameter, and all weights after 3 steps are those of one process, within
1e-5 of the largest value of each in fp32 (of a gradient: of its own largest value, or 5 % of the model's largest one).
**works (float64)**: in fp32 it misses that, for its terms cancel, so that rounding is most of what is left; in float64
it is within 1e-6. **refused**: an error says so before anything is trained. No type is silently wrong.

Shared sequences are compared in the loss and every gradient of one step, with a length that the ranks do not divide.
So are spread experts; types whose code has no experts have no word there.
In stages, the same words are about losses, gradient norms and weights over 3 steps of 2 microbatches, schedule 1f1b,
one rank a stage.

What this does not say: a larger degree must divide heads and features, and is refused where it does not; models are
tried without dropout, in eager attention, on the CPU; images and sounds are tried only where a type cannot do without.

"whole" are large parts (5 % of the tiny model) that every rank has and computes: state-space layers, image towers.
"repeated" are parts whose parameters are split, but each rank computes them as a whole. The rest is shared.
Output head: logits stay split over the vocabulary up to the loss, or are gathered before it because the
model's own code looks at all of them (`vocab_parallel_lm_head`).

## A model without a plan

Say it yourself: `partition_config` has rules for the weights of linear layers, by name, in DeepSpeed's form. A pair of
rules shares a feed-forward layer: `"column"` for the projection that makes its features, `"row"` for the one that reads
them. What is between the two must work feature by feature (an activation function does). Where it does not, as
in a recurrence, write `"column"` with `"gather_output": true`: weights, gradients and optimizer states are shared, and
the rest is computed on every rank. What no rule matches stays whole; embedding and head are split without a rule. This
is all that RWKV needs:

```json
{example}
```

Then compare the first losses with those of one process: a wrong rule mostly shows at once, as an error in shapes or as
another loss.

## The types

| type | tensor parallel | sequence parallel | plan | output head | stages | shared sequences | spread experts |
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
    """Type -> what becomes of it where ranks share sequences; tests/sequence/zoo.py writes them."""
    return dict(line.split("\t") for line in SHARED.read_text().splitlines())


@cache
def spread_verdicts() -> dict[str, str]:
    """Type with experts -> what becomes of it where ranks share these; tests/experts/zoo.py writes them."""
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
            + [f"| `{kind}` | not tried: {why} | | | | | | |" for kind, why in UNRUNNABLE.items()]
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
    """What is neither right nor refused."""
    known = {WORKS, EXACTLY, REFUSED}
    return [
        f"{v.type}: {v.tensor}; sequence: {v.sequence}; stages: {v.stages}"
        for v in verdicts
        if not {v.tensor, v.sequence, v.stages} <= known
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="What becomes of every causal-LM type in parallel.")
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
    """Rounding, and so which types need float64, depends on the machine."""
    return dataclasses.replace(
        verdict,
        tensor=verdict.tensor.replace(EXACTLY, WORKS),
        sequence=verdict.sequence.replace(EXACTLY, WORKS),
        stages=verdict.stages.replace(EXACTLY, WORKS),
    )


def remembered(verdict: Verdict, known: Verdict | None) -> Verdict:
    """A type that has needed float64 once may need it again."""
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
