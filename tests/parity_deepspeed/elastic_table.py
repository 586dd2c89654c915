"""Generate the table of DeepSpeed's elasticity results.

    python -m tests.parity_deepspeed.elastic_table > tests/config/elastic.tsv

DeepSpeed 0.19.6 was the last version with elasticity. Run this with that version; tests read the table.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

GRID = {
    "max_train_batch_size": (6, 100, 720, 2000, 10_000),
    "micro_batch_sizes": ([2, 4, 6], [1], [3, 5], [8, 12, 16, 17]),
}
BOUNDS: list[dict[str, Any]] = [
    {},
    {"version": 0.1},
    {"version": 0.1, "min_gpus": 4, "max_gpus": 50},
    {"version": 0.1, "prefer_larger_batch": False},
    {"num_gpus_per_node": 4, "max_gpus": 64},
    {"num_gpus_per_node": 8, "model_parallel_size": 2, "min_gpus": 16, "max_gpus": 200},
]


def sections() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*GRID.values(), BOUNDS):
        largest, sizes, bounds = values
        share = bounds.get("num_gpus_per_node", 1) // bounds.get("model_parallel_size", 1)
        if max(sizes) <= largest // share:
            yield {"enabled": True, "max_train_batch_size": largest, "micro_batch_sizes": sizes, **bounds}


def answer(section: dict[str, Any]) -> tuple[int, list[int]] | None:
    """Return the batch size and the data-parallel degrees; None if there are none."""
    from deepspeed.elasticity import compute_elastic_config

    per_node, found = section.get("num_gpus_per_node", 1), Counter[tuple[int, tuple[int, ...]]]()
    for nodes in range(1, 61):
        # Version 0.2 checks the number of GPUs, and returns a result for it alone if it is not in the list.
        os.environ["WORLD_SIZE"] = str(nodes * per_node)
        try:
            batch, degrees = compute_elastic_config({"elasticity": section}, "0.19.6")
        except (TypeError, ValueError):
            return None
        found[int(batch), tuple(degrees or ())] += 1
    (batch, several), often = found.most_common(1)[0]
    return (batch, list(several)) if several and often > 1 else None


def micros(section: dict[str, Any], degrees: list[int]) -> list[int]:
    """Return the micro batch for each degree.

    Empty with model parallelism, where DeepSpeed's result means something else.
    """
    from deepspeed.elasticity import compute_elastic_config

    if section.get("model_parallel_size", 1) > 1:
        return []
    return [compute_elastic_config({"elasticity": section}, "0.19.6", degree)[2] for degree in degrees]


def main() -> None:
    print("section\tbatch\tdegrees\tmicro batches")
    for section in sections():
        found = answer(section)
        if found is not None:
            batch, degrees = found
            lists = degrees, micros(section, degrees)
            columns = [json.dumps(section), str(batch), *(" ".join(map(str, numbers)) for numbers in lists)]
            print("\t".join(columns))


if __name__ == "__main__":
    main()
