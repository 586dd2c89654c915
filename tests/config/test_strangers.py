"""Top-level keys that are not DeepSpeed's: a script's own keys are reported once, typos of known keys are refused."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config import Config, ConfigProblems, load
from launcher.config.root import inspect
from launcher.config.schema import FOREIGN, OTHER_NAMES
from launcher.config.source import read
from launcher.config.verdicts import verdicts

OWN: list[tuple[str, Any]] = [
    ("model", {"name": "gpt2", "hidden_size": 64}),
    ("data", {"path": "/data", "num_workers": 2}),
    ("training", {"epochs": 3, "output_dir": "out"}),
    ("lora", {"r": 8, "lora_alpha": 16}),
    ("generation", {"max_new_tokens": 8}),
    ("epochs", 3),
    ("output_dir", "runs/1"),
    ("num_layers", 12),
    ("hostnames", ["a", "b"]),
    ("log", {"level": "info"}),
]


@pytest.mark.parametrize(("key", "value"), OWN)
def test_what_a_script_keeps_for_itself_is_told_and_taken(key: str, value: Any) -> None:
    config = load({"train_batch_size": 8, key: value})
    assert config == load({"train_batch_size": 8})
    (note,) = [note for note in config.notes if note.kind == "foreign"]
    assert note.path == (key,) and note.what == FOREIGN


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("zero_optimisation", {"stage": 2}, "`zero_optimization`"),
        ("zero-optimization", {"stage": 2}, "`zero_optimization`"),
        ("optimiser", {"type": "AdamW"}, "`optimizer`"),
        ("fp_16", {"enabled": True}, "`fp16`"),
        ("offload_optimizer", {"device": "cpu"}, "`zero_optimization.offload_optimizer`"),
        ("train_batch_sze", 8, "`train_batch_size`"),
        ("gradient_clip", 0.5, "`gradient_clipping`"),
        ("lr", 1e-3, "`optimizer.params.lr`"),
        ("log", {"steps_per_print": 10}, "`steps_per_print` at the top level"),
        ("deepspeed", {"zero_optimization": {"stage": 3}}, "`zero_optimization` at the top level"),
        ("comms_config", {"comms_logger": {"enabled": True}}, "`comms_logger` at the top level"),
        ("pipe-parallel-size", 2, '"pipeline": {"stages": N}'),
        ("model-parallel-size", 2, '"autotp_size": N'),
        ("train-iters", 100, "--max-steps"),
        ("log-interval", 10, "`steps_per_print`"),
    ],
)
def test_what_was_meant_for_us_is_refused(key: str, value: Any, meant: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load({key: value})
    (problem,) = caught.value.problems
    assert problem.path == (key,) and problem.fix is not None and meant in problem.fix


def test_a_script_may_keep_a_copy_of_a_key() -> None:
    config = load({"train_batch_size": 8, "training": {"train_batch_size": 8, "epochs": 1}})
    assert [note.kind for note in config.notes if note.path == ("training",)] == ["foreign"]


def test_a_size_of_one_of_megatrons_asks_for_nothing() -> None:
    assert load({"pipe-parallel-size": 1, "model-parallel-size": 1, "pipe_parallel_size": 0}) == load({})


def test_inside_a_section_an_unknown_key_stays_an_error() -> None:
    with pytest.raises(ConfigProblems, match="unknown key"):
        load({"zero_optimization": {"epochs": 3}})


def test_check_shows_them_and_so_many_are_too_many() -> None:
    written = read({"epochs": 3, "train_batch_size": 8})
    rows = {row.path: row.verdict for row in verdicts(written, inspect(written))}
    assert rows[("epochs",)] == "foreign"
    with pytest.raises(ConfigProblems):
        load({f"own_{number}_thing": 1 for number in range(300)})


def test_no_other_name_is_ours() -> None:
    assert not set(OTHER_NAMES) & set(Config.model_fields)
