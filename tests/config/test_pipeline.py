"""`pipeline`: the degree, the partition of layers, schedules, and conflicting keys."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config import Config, ConfigProblems, load
from launcher.errors import ConfigError

KEY = "pipeline"


def pipeline(**written: Any) -> Config:
    return load({KEY: {"stages": 4, **written}})


def problems(tree: dict[str, Any]) -> dict[str, str]:
    """Return dotted key -> the error and the fix."""
    with pytest.raises(ConfigProblems) as caught:
        load(tree)
    return {
        ".".join(map(str, problem.path)): f"{problem.what}; {problem.fix}"
        for problem in caught.value.problems
    }


def wrong(**written: Any) -> str:
    (what,) = problems({KEY: {"stages": 4, **written}, "gradient_clipping": 0}).values()
    return what


def notes(config: Config) -> dict[str, str]:
    return {".".join(map(str, note.path)): note.what for note in config.notes}


@pytest.mark.key(f"{KEY}.stages")
def test_the_degree() -> None:
    for nothing in ({}, {KEY: {}}, {KEY: None}, {KEY: {"stages": "auto"}}, {KEY: {"stages": 1}}):
        assert load(nothing).pipeline.degree == 1
    assert load({KEY: {"stages": 4.0}}).pipeline.degree == 4
    assert "at least 1" in wrong(stages=0)
    solved = load({KEY: {"stages": "auto"}, "train_batch_size": 2}).resolve(dp_degree=1)
    assert solved.pipeline.stages is None and solved.pipeline.degree == 1


@pytest.mark.key(f"{KEY}.stages")
def test_both_degrees_divide_the_ranks() -> None:
    both = load('{"pipeline": {"stages": 2},\n "tensor_parallel": {"autotp_size": 3}}', where="ds.json")
    assert [both.dp_degree(ranks) for ranks in (6, 12, 18)] == [1, 2, 3]
    with pytest.raises(ConfigError) as caught:
        both.dp_degree(8)
    text = str(caught.value)
    assert "pipeline.stages 2 x data-parallel ranks x tensor_parallel.autotp_size 3 = 8 ranks" in text
    assert "ds.json:1:15" in text
    assert "write autotp_size 1, 2 or 4, or start 6 ranks or a multiple" in text
    with pytest.raises(
        ConfigError,
        match=r"pipeline.stages 4 does not divide the number of ranks, 6(?s:.)*write 1, 2, 3 or 6",
    ):
        pipeline().dp_degree(6)
    assert load({KEY: {"stages": 2}, "train_micro_batch_size_per_gpu": 3}).dp_degree(8) == 4


def test_a_model_that_says_its_stages() -> None:
    config = load({"train_batch_size": 8}).with_stages(2)
    assert config.dp_degree(8) == 4 and config.resolve(dp_degree=4).pipeline.degree == 2
    assert pipeline().with_stages(4).pipeline == pipeline().pipeline
    with pytest.raises(
        ConfigError, match=r"pipeline\.stages 4 contradicts the model, which is split into 2 stages"
    ):
        pipeline().with_stages(2)


@pytest.mark.key(f"{KEY}.partition")
def test_methods_of_dealing_out() -> None:
    taken = {"best": "best", "UNIFORM": "uniform", "parameters": "parameters", "profile": "profile",
             "type:(Llama|Qwen)\\w+": "type:(Llama|Qwen)\\w+", "Type:Block": "type:Block"}  # fmt: skip
    for written, name in taken.items():
        assert pipeline(partition=written).pipeline.partition == name
    for bad in ("bset", "type:", 3):
        assert "must be one of" in wrong(partition=bad)
    assert '"(a" is not a regular expression' in wrong(partition="type:(a")


@pytest.mark.key(f"{KEY}.schedule", f"{KEY}.chunks")
def test_schedules_and_their_chunks() -> None:
    chunks = {name: pipeline(schedule=name).pipeline.chunks_of_rank for name in
              ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "ZBV")}  # fmt: skip
    assert chunks == {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "ZBV": 2}
    assert pipeline(schedule="interleaved", chunks=3).pipeline.chunks_of_rank == 3
    assert 'is the same as "1f1b"' in wrong(schedule="interleaved", chunks=1)
    assert "has 2 chunks per rank, not 3" in wrong(schedule="zbv", chunks=3)
    for name in ("1f1b", "gpipe", "zb-h1"):
        assert 'write "schedule": "interleaved"' in wrong(schedule=name, chunks=2)
        assert pipeline(schedule=name, chunks=1).pipeline.chunks_of_rank == 1
    for name in ("pipedream", "2bw"):
        assert "has one chunk per rank, not 2" in wrong(schedule=name, chunks=2)
    assert "has no effect" in notes(load({KEY: {"stages": 1, "schedule": "gpipe"}}))[f"{KEY}.schedule"]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [  # schedule, sections, key, words
    ("pipedream", {"gradient_clipping": 1.0}, "gradient_clipping", "needs the norm of all stages"),
    ("pipedream", {"fp16": {"enabled": True}}, "fp16.enabled", "skip an update"),
    ("pipedream", {"bf16": {"enabled": True}}, "bf16.check_grad_overflow", 'write "check_grad_overflow": false'),
    ("pipedream", {"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "torch_autocast.dtype", '"dtype": "bf16"'),
    ("pipedream", {"zero_optimization": {"stage": 3}}, f"{KEY}.schedule", 'write "stage": 2 or less'),
    ("2bw", {"zero_optimization": {"stage": 3}}, f"{KEY}.schedule", 'write "stage": 2 or less'),
    ("2bw", {"gradient_accumulation_steps": 3}, "gradient_accumulation_steps", "as many microbatches"),
    ("2bw", {KEY: {"stages": 1, "schedule": "2bw"}}, f"{KEY}.schedule", "needs at least two stages"),
]  # fmt: skip


@pytest.mark.key(f"{KEY}.schedule")
@pytest.mark.parametrize(("name", "sections", "key", "words"), REFUSED)
def test_what_an_asynchronous_schedule_refuses(
    name: str, sections: dict[str, Any], key: str, words: str
) -> None:
    found = problems({KEY: {"stages": 4, "schedule": name}, "gradient_clipping": 0, **sections})
    assert list(found) == [key] and words in found[key]
    if sections.keys() != {KEY}:
        assert load({KEY: {"stages": 4}, "gradient_clipping": 0, **sections})


@pytest.mark.key(f"{KEY}.schedule")
def test_an_asynchronous_schedule_says_so() -> None:
    for name in ("pipedream", "2bw"):
        config = load({KEY: {"stages": 4, "schedule": name}, "gradient_clipping": 0})
        assert "NOT equal to training in one process" in notes(config)[f"{KEY}.schedule"]
    more = {"gradient_clipping": 0.5, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    assert load({KEY: {"stages": 4, "schedule": "2bw"}, "gradient_accumulation_steps": 4, **more})
    assert f"{KEY}.schedule" not in notes(pipeline())
    solved = {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 2,
    }  # 3 microbatches, once it is resolved
    with pytest.raises(ConfigError, match="as many microbatches"):
        load({KEY: {"stages": 4, "schedule": "2bw"}, **solved}).resolve(dp_degree=1)


BUBBLES: list[tuple[dict[str, Any], int, str | None]] = [  # section, microbatches, what is said
    ({}, 4, "with 4 microbatches, each of 4 pipeline stages is idle for 43% of a step; with 12, for 20%"),
    ({"schedule": "gpipe"}, 1, "with 1 microbatch, each of 4 pipeline stages is idle for 75% of a step; with 12,"),
    ({"schedule": "interleaved", "chunks": 3}, 3, "idle for 36% of a step; with 4, for 20%"),
    ({"schedule": "zb-h1", "stages": 8}, 8, "idle for 23% of a step; with 10, for 19%"),
    ({"schedule": "zb-h1"}, 2, None),
    ({}, 12, None),
    ({"schedule": "zbv"}, 2, None),
    ({"stages": 1}, 1, None),
]  # fmt: skip


@pytest.mark.parametrize(("section", "microbatches", "what"), BUBBLES)
def test_few_microbatches_are_told(section: dict[str, Any], microbatches: int, what: str | None) -> None:
    written = {KEY: {"stages": 4, **section}, "train_micro_batch_size_per_gpu": 1}
    told = notes(load({**written, "gradient_accumulation_steps": microbatches}))
    assert (what or "") in told.get("gradient_accumulation_steps", "")
    assert (what is None) == ("gradient_accumulation_steps" not in told)
    unknown = load(
        {KEY: {"stages": 4, **section}, "train_batch_size": microbatches, "train_micro_batch_size_per_gpu": 1}
    )
    assert "gradient_accumulation_steps" not in notes(unknown)
    assert ("gradient_accumulation_steps" in notes(unknown.resolve(dp_degree=1))) == (what is not None)


@pytest.mark.key(f"{KEY}.pipe_partitioned", f"{KEY}.grad_partitioned")
def test_shares_that_are_not_sent_say_so() -> None:
    shares = {"pipe_partitioned": False, "grad_partitioned": False}
    assert {f"{KEY}.{key}" for key in shares} <= notes(pipeline(**shares)).keys()


@pytest.mark.key(f"{KEY}.reduce_per_microbatch", f"{KEY}.gather_per_microbatch")
def test_keys_that_act_beside_others_say_so() -> None:
    policies = {"reduce_per_microbatch": True, "gather_per_microbatch": True}
    alone = notes(pipeline(**policies))
    assert {key for key in alone if key.startswith(KEY)} == {f"{KEY}.{key}" for key in policies}
    beside = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}}
    told = notes(load({KEY: {"stages": 2, **policies}, **beside}))
    assert not [key for key in told if key.startswith(KEY)]


@pytest.mark.key(f"{KEY}.use_reentrant")
def test_a_flavour_that_is_not_there_says_so() -> None:
    assert f"{KEY}.use_reentrant" in notes(pipeline(use_reentrant=False))
    assert f"{KEY}.use_reentrant" not in notes(pipeline(use_reentrant=True))


@pytest.mark.key(f"{KEY}.activation_checkpoint_interval")
def test_what_is_recomputed_is_said_once() -> None:
    assert pipeline(activation_checkpoint_interval=2).pipeline.activation_checkpoint_interval == 2
    section = {"activation_checkpointing": {"number_checkpoints": 2}}
    assert load({KEY: {"stages": 2}, **section})
    both = problems({KEY: {"activation_checkpoint_interval": 1}, **section})
    assert list(both) == [f"{KEY}.activation_checkpoint_interval"]


def test_what_cannot_stand_beside_it() -> None:
    unmanaged = {"managed_gradient_accumulation": False}
    assert list(problems({KEY: {"stages": 2}, **unmanaged})) == ["managed_gradient_accumulation"]
    assert load({KEY: {"stages": 1}, **unmanaged})


def test_a_typo_is_answered() -> None:
    assert "did you mean `pipeline.chunks`" in wrong(chunk=2)
