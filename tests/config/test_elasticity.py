"""`elasticity`: the batch size, the world sizes, and the resulting batch keys."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import Config, ConfigProblems, load
from launcher.config.elasticity import elastic_batch, micro_batch
from launcher.errors import ConfigError

KEY = "elasticity"
PLAIN: dict[str, Any] = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 4, 6]}
with (Path(__file__).parent / "elastic.tsv").open() as file:
    TABLE = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def elastic(**written: Any) -> Config:
    return load({KEY: PLAIN | written})


def wrong(tree: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigProblems) as caught:
        load(tree)
    return {".".join(map(str, p.path)): f"{p.what}; {p.fix}" for p in caught.value.problems}


def triple(config: Config, dp_degree: int) -> tuple[Any, ...]:
    solved = config.resolve(dp_degree=dp_degree)
    return (
        solved.train_batch_size,
        solved.train_micro_batch_size_per_gpu,
        solved.gradient_accumulation_steps,
    )


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["section"])
def test_the_answers_are_deepspeeds(row: dict[str, str]) -> None:
    section = load({KEY: json.loads(row["section"])}).elasticity
    batch = section.batch
    assert batch is not None and section.micro_batch_sizes is not None
    assert (batch.train, " ".join(map(str, batch.dp_degrees))) == (int(row["batch"]), row["degrees"])
    found = [micro_batch(batch.train, section.micro_batch_sizes, degree) for degree in batch.dp_degrees]
    assert row["micro batches"] in ("", " ".join(map(str, found)))


@given(st.integers(1, 3000), st.lists(st.integers(1, 20), min_size=1, max_size=4), st.booleans())
def test_every_degree_takes_the_batch_in_whole_microbatches(
    largest: int, sizes: list[int], larger: bool
) -> None:
    batch = elastic_batch(largest, sizes, prefers_larger=larger)
    if batch is None:
        assert largest < min(sizes)
        return
    assert batch.train <= largest and list(batch.dp_degrees) == sorted(set(batch.dp_degrees))
    for degree in batch.dp_degrees:
        assert batch.train % (micro_batch(batch.train, sizes, degree) * degree) == 0


@pytest.mark.key(f"{KEY}.enabled", f"{KEY}.max_train_batch_size", f"{KEY}.micro_batch_sizes")
def test_the_batch_keys_follow_from_the_number_of_ranks() -> None:
    config = elastic()
    assert [triple(config, dp) for dp in (1, 2, 12)] == [(96, 6, 16), (96, 6, 8), (96, 4, 2)]
    told = {entry.path: entry for entry in config.resolve(dp_degree=2).resolved_autos}
    assert told["train_batch_size"].why == "from elasticity"
    larger = elastic(max_train_batch_size=1000).elasticity.batch
    other = elastic(micro_batch_sizes=[5, 7]).elasticity.batch
    assert larger is not None and 500 < larger.train <= 1000
    assert other is not None and other.train == 84
    off = load({KEY: PLAIN | {"enabled": False}, "train_batch_size": 8})
    assert off.resolve(dp_degree=1).train_batch_size == 8 and off.elasticity.world_sizes is None


def test_other_numbers_of_ranks_are_refused_with_those_that_are_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        elastic().resolve(dp_degree=7)
    text = str(caught.value)
    assert "7 ranks are not allowed" in text and "start 6 or 8 ranks" in text
    assert "1, 2, 3, 4, " in text


@pytest.mark.key(f"{KEY}.min_gpus", f"{KEY}.max_gpus")
def test_bounds_of_the_run() -> None:
    sizes = elastic(min_gpus=3, max_gpus=12).elasticity.world_sizes
    assert sizes is not None and sizes[0] == 3 and sizes[-1] == 12
    assert "is below min_gpus 9" in wrong({KEY: PLAIN | {"min_gpus": 9, "max_gpus": 8}})[f"{KEY}.max_gpus"]
    nothing = wrong({KEY: PLAIN | {"min_gpus": 99, "max_gpus": 100}})[f"{KEY}.max_train_batch_size"]
    assert "99 to 100 GPUs" in nothing


@pytest.mark.key(f"{KEY}.prefer_larger_batch")
def test_which_of_two_batch_sizes() -> None:
    written: dict[str, Any] = {"max_train_batch_size": 50, "micro_batch_sizes": [2, 3], "max_gpus": 3}
    larger, smaller = (
        elastic(**written, prefer_larger_batch=which).elasticity.batch for which in (True, False)
    )
    assert larger is not None and smaller is not None
    assert larger.dp_degrees == smaller.dp_degrees and larger.train > smaller.train


@pytest.mark.key(f"{KEY}.version", f"{KEY}.num_gpus_per_node", f"{KEY}.model_parallel_size")
def test_whole_nodes_and_copies_of_the_model() -> None:
    nodes = elastic(num_gpus_per_node=4).elasticity
    assert nodes.world_sizes is not None and all(size % 4 == 0 for size in nodes.world_sizes)
    plain = elastic(num_gpus_per_node=4, version=0.1)
    assert plain.elasticity.world_sizes is not None and plain.elasticity.world_sizes[0] == 1
    assert any("version 0.1 counts GPUs" in str(note) for note in plain.notes)
    split = {"tensor_parallel": {"autotp_size": 2}}
    both = load({KEY: PLAIN | {"num_gpus_per_node": 4, "model_parallel_size": 2}, **split})
    assert both.elasticity.world_sizes is not None and both.elasticity.world_sizes[0] == 4
    assert both.dp_degree(4) == 2 and triple(both, 2)[0] == both.elasticity.batch.train
    needs = wrong({KEY: PLAIN | {"version": 0.1, "model_parallel_size": 2}})
    assert "requires version 0.2" in needs[f"{KEY}.model_parallel_size"]
    assert "does not divide" in wrong({KEY: PLAIN | {"model_parallel_size": 2}})[f"{KEY}.model_parallel_size"]
    assert f"{KEY}.model_parallel_size" in wrong({KEY: PLAIN, **split})
    assert "0.1 or 0.2" in wrong({KEY: PLAIN | {"version": 0.3}})[f"{KEY}.version"]


def test_pipeline_stages_of_the_model_itself_count() -> None:
    config = load({KEY: PLAIN | {"num_gpus_per_node": 4, "model_parallel_size": 4}})
    assert triple(config.with_stages(4), 1)[0] == config.elasticity.batch.train
    with pytest.raises(ConfigError, match="4 is not pipeline stages x tensor-parallel degree, 1"):
        config.resolve(dp_degree=1)


@pytest.mark.key(f"{KEY}.ignore_non_elastic_batch_info")
def test_batch_keys_beside_it() -> None:
    beside = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3}
    found = wrong({KEY: PLAIN, **beside})
    assert set(found) == set(beside) and "sets a different one" in found["train_batch_size"]
    ignored = load({KEY: PLAIN | {"ignore_non_elastic_batch_info": True}, **beside})
    assert triple(ignored, 2) == triple(elastic(), 2)
    assert {note.path[0] for note in ignored.notes if note.kind == "no effect"} == set(beside)
    auto = load({KEY: PLAIN, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 50})
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: 50"):
        auto.resolve(dp_degree=2)


def test_what_is_missing() -> None:
    found = wrong({KEY: {"enabled": True}})
    assert set(found) == {f"{KEY}.max_train_batch_size", f"{KEY}.micro_batch_sizes"}
    assert (
        "contains 200, which exceeds"
        in wrong({KEY: PLAIN | {"micro_batch_sizes": [2, 200]}})[f"{KEY}.micro_batch_sizes"]
    )
