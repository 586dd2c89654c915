"""How every causal-LM type with LoRA adapters behaves under tensor parallelism.

    python -m tests.tensor.adapters_zoo

trains every type with adapters on all linear layers, as tests/tensor/models_table.py does without (takes minutes), and
fails if one computes other values or raises an unexpected error.
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.pool import WorkerPool
from tests.tensor.judging import EXACTLY, REFUSED, UNADAPTED, WORKS, Verdict, judge
from tests.tensor.zoo import CAUSAL_TYPES

LIMIT_S = 3600.0


def main() -> int:
    pool = WorkerPool()
    verdicts: list[Verdict] = pool.run(judge, 4, CAUSAL_TYPES, adapted=True, timeout=LIMIT_S)[0]
    pool.close()
    for name in ("tensor", "sequence"):
        words = Counter(getattr(v, name).replace(EXACTLY, WORKS) for v in verdicts)
        print(f"{name}: {', '.join(f'{number} {word}' for word, number in words.most_common())}")
    known = {WORKS, EXACTLY, REFUSED, UNADAPTED}
    wrong = [f"{v.type}: {v.tensor}; {v.sequence}" for v in verdicts if not {v.tensor, v.sequence} <= known]
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
