"""What becomes of every causal-LM type with experts where two ranks share these:

    python -m tests.experts.zoo [TYPE ...] [--write]

takes one step of a tiny model of each and compares the loss and every gradient with those of one process. Fails where
one differs, stops in an error that is no refusal, or has another verdict than in `verdicts.tsv`; with --write it writes
that file.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.sequence.zoo import main
from tests.tensor.zoo import CAUSAL_TYPES
from tests.tensor.zoo_tables import UNRUNNABLE

VERDICTS = Path(__file__).with_name("verdicts.tsv")
CONFIG = {"expert_parallel": {"size": 2}, "zero_optimization": {"stage": 1}}


def has_experts(kind: str) -> bool:
    """Return whether the code of the type knows experts by any name."""
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    return "expert" in inspect.getsource(sys.modules[model.__module__]).lower()


TYPES = [kind for kind in CAUSAL_TYPES if kind not in UNRUNNABLE and has_experts(kind)]

if __name__ == "__main__":
    main(__doc__, VERDICTS, CONFIG, TYPES)
