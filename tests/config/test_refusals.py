"""DeepSpeed sections that stay refused: each error says in one sentence what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config import ConfigProblems, load

ON = {"enabled": True}
REFUSED: list[tuple[str, Any, str, str]] = [  # section, what is written, key that is named, what to do
    ("hybrid_engine", ON, "hybrid_engine.enabled", "engine.module.generate()"),
    ("weight_quantization", {"num_bits": 8}, "weight_quantization.enabled", "zero_optimization.stage 3"),
    ("autotuning", {**ON, "fast": False}, "autotuning.enabled", "tokens_per_s in metrics.jsonl"),
    ("datastates_ckpt", {"host_cache_size": 16}, "datastates_ckpt", '"decoupled": true'),
    ("nebula", {**ON, "nebula_load_path": "/x"}, "nebula.enabled", '"decoupled": true'),
    ("progressive_layer_drop", {**ON, "theta": 0.5}, "progressive_layer_drop.enabled", "every layer runs"),
    ("quantize_training", ON, "quantize_training", "save_16bit_model()"),
    ("eigenvalue", {**ON, "tol": 0.01}, "eigenvalue", "delete it"),
    ("graph_harvesting", True, "graph_harvesting", '"compile": {"enabled": true}'),
    ("sparse_attention", {"mode": "fixed", "block": 16}, "sparse_attention", "sliding_window"),
    ("compression_training", {"layer_reduction": {"enabled": True}}, "compression_training", "save_16bit_model()"),
]  # fmt: skip


@pytest.mark.key(*sorted({section for section, *_ in REFUSED} | {key for _, _, key, _ in REFUSED}))
@pytest.mark.parametrize(("section", "written", "key", "instead"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_refusal_says_what_to_do_instead(section: str, written: Any, key: str, instead: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load({section: written})
    (problem,) = caught.value.problems
    assert ".".join(map(str, problem.path)).startswith(key)
    assert problem.fix is not None and instead in problem.fix


NO_SWITCH = {"datastates_ckpt", "sparse_attention", "compression_training", "graph_harvesting"}


@pytest.mark.parametrize("section", sorted({section for section, *_ in REFUSED} - NO_SWITCH))
def test_off_asks_for_nothing(section: str) -> None:
    for off in ({"enabled": False}, False, None):
        assert load({section: off}) == load({})


@pytest.mark.parametrize("row", [row for row in REFUSED if '": true' in row[3]], ids=lambda row: row[0])
def test_what_is_written_instead_is_taken(row: tuple[str, Any, str, str]) -> None:
    instead = {"compile": ON} if "compile" in row[3] else {"checkpoint": {"writer": {"decoupled": True}}}
    assert load(instead)
