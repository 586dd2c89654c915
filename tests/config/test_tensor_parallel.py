"""`tensor_parallel`: the degree and its alternative keys, custom rules, and conflicting keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.config import Config, ConfigProblems, load
from launcher.errors import ConfigError

KEY = "tensor_parallel"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "tensor_parallelism.md"


def tensor(**written: Any) -> Config:
    return load({KEY: {"autotp_size": 2, **written}})


def problems(tree: dict[str, Any]) -> dict[str, str]:
    """Return dotted key -> the error and the fix."""
    with pytest.raises(ConfigProblems) as caught:
        load(tree)
    return {
        ".".join(map(str, problem.path)): f"{problem.what}; {problem.fix}"
        for problem in caught.value.problems
    }


def wrong(**written: Any) -> str:
    """Return the only error of a tensor_parallel section."""
    (what,) = problems({KEY: written}).values()
    return what


def notes(config: Config) -> dict[str, str]:
    return {".".join(map(str, note.path)): note.what for note in config.notes if note.path[0] == KEY}


@pytest.mark.key(f"{KEY}.autotp_size")
def test_the_degree() -> None:
    degrees = [load({KEY: {"autotp_size": size}}).tensor_parallel.degree for size in (0, 1, 2, 8.0, "auto")]
    assert degrees == [1, 1, 2, 8, 1]
    for nothing in ({}, {KEY: {}}, {KEY: None}, {KEY: False}):
        assert load(nothing).tensor_parallel.degree == 1
    assert "at least 0" in wrong(autotp_size=-1)


@pytest.mark.key(f"{KEY}.autotp_size")
def test_the_degree_divides_the_ranks() -> None:
    config = load('{"tensor_parallel":\n  {"autotp_size": 4}}', where="ds.json")
    assert [config.dp_degree(ranks) for ranks in (4, 8, 12)] == [1, 2, 3]
    assert load({}).dp_degree(7) == 7
    with pytest.raises(ConfigError) as caught:
        config.dp_degree(6)
    text = str(caught.value)
    assert "autotp_size 4 does not divide the number of ranks, 6" in text
    assert "ds.json:2:4" in text and "write 1, 2, 3 or 6, or start 4 ranks" in text


@pytest.mark.key(f"{KEY}.tp.tp_size", f"{KEY}.partition_config.tp_size")
@pytest.mark.parametrize("place", ["tp", "tensor_parallel", "partition_config"])
def test_a_second_degree_is_the_same_or_an_error(place: str) -> None:
    for size in (1, 2):
        assert tensor(**{place: {"tp_size": size}}).tensor_parallel.degree == 2
    assert "tp_size 4 contradicts autotp_size 2" in wrong(autotp_size=2, **{place: {"tp_size": 4}})
    alone = wrong(**{place: {"tp_size": 4}})
    assert "tp_size 4 alone has no effect" in alone and 'write "autotp_size": 4' in alone


@pytest.mark.key(f"{KEY}.tp.tp_group", f"{KEY}.tp.mpu", f"{KEY}.injection_policy_tuple")
def test_what_only_python_can_say_is_refused() -> None:
    for key in ("mpu", "tp_group"):
        assert "which JSON cannot hold" in wrong(autotp_size=2, tp={key: "x"})
    assert "write `partition_config`" in wrong(autotp_size=2, injection_policy_tuple=["mlp.down"])


@pytest.mark.key(f"{KEY}.dtype")
def test_the_dtype_is_that_of_the_model() -> None:
    for written in ("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16):
        config = load({KEY: {"autotp_size": 2, "dtype": written}, "bf16": {"enabled": True}})
        assert config.tensor_parallel.dtype == "bf16"
    assert "contradicts fp16.enabled and bf16.enabled" in wrong(autotp_size=2, dtype="bf16")
    open_ = load(
        {KEY: {"autotp_size": 2, "dtype": "bf16"}, "bf16": {"enabled": "auto"}, "train_batch_size": 1}
    )
    assert open_.resolve(dp_degree=1, auto={"bf16.enabled": True})
    with pytest.raises(ConfigProblems, match=r"tensor_parallel\.dtype contradicts"):
        open_.resolve(dp_degree=1, auto={"bf16.enabled": False})


@pytest.mark.key(f"{KEY}.vocab_parallel_lm_head", f"{KEY}.vocab_parallel_ce_backend")
def test_the_head() -> None:
    for head in (None, True, False):
        assert tensor(vocab_parallel_lm_head=head).tensor_parallel.vocab_parallel_lm_head is head
    assert tensor(vocab_parallel_ce_backend="torch") == tensor()
    assert '"liger" is not implemented' in wrong(autotp_size=2, vocab_parallel_ce_backend="liger")


@pytest.mark.key(f"{KEY}.tp_overlap_comm")
def test_communication_overlaps_unless_it_is_written_false() -> None:
    overlaps = [
        tensor(tp_overlap_comm=value).tensor_parallel.tp_overlap_comm for value in (None, True, False)
    ]
    assert overlaps == [True, True, False]


@pytest.mark.key(f"{KEY}.preset_model", f"{KEY}.keep_module_on_host", f"{KEY}.replace_with_kernel_inject")
def test_keys_without_effect_say_so() -> None:
    written = {
        "preset_model": "Llama",
        "keep_module_on_host": True,
        "kernel_inject": True,
        "tp": {"tp_grain_size": 64},
    }
    config = tensor(**written, partition_config={"lm_head_patterns": ["head"], "embedding_partition_dim": 0})
    keys = ("preset_model", "keep_module_on_host", "replace_with_kernel_inject", "tp.tp_grain_size")
    keys += ("partition_config.lm_head_patterns", "partition_config.embedding_partition_dim")
    assert set(notes(config)) == {f"{KEY}.{key}" for key in keys}
    assert 'did you mean "mixtral"' in wrong(preset_model="mixtrl")


RULE = {"patterns": [".*"]}
BAD_RULES: list[tuple[Any, str, str]] = [  # the rule, the key that is named, what is wrong
    ({}, "[0].patterns", "required key is missing"),
    ({"patterns": []}, "[0].patterns", "must be a list of regular expressions"),
    ({"patterns": ".*"}, "[0].patterns", "must be a list of regular expressions"),
    ({"patterns": [".*", "(a"]}, "[0].patterns[1]", '"(a" is not a regular expression: missing )'),
    ({**RULE, "partition_typ": "row"}, "[0].partition_typ", "did you mean"),
    ({**RULE, "partition_type": "rwo"}, "[0].partition_type", "must be one of"),
    ({**RULE, "shape": []}, "[0].shape", "must be a list of sizes"),
    ({**RULE, "shape": [0, -1]}, "[0].shape", "must be a list of sizes"),
    ({**RULE, "shape": [[2, -1], -1]}, "[0].shape", "must be a list of sizes"),
    ({**RULE, "shape": [True, -1]}, "[0].shape", "must be a list of sizes"),
    ({**RULE, "shape": [-1, [2, 2]]}, "[0].shape", "dim 0 is split, but the list of sizes is at dim 1"),
    ({**RULE, "shape": [3], "partition_dim": 1}, "[0].shape", "dim 1 is split, but shape has dims 0 to 0"),
    ({**RULE, "partition_type": "row", "gather_output": True}, "[0].gather_output", 'requires partition_type "column"'),
    ({**RULE, "grad_allreduce": True}, "[0].grad_allreduce", 'requires partition_type "skip"'),
    ({**RULE, "partition_dim": "auto"}, "[0].partition_dim", '"auto" is not supported in a rule'),
    ("column", "", "must be a list of objects"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "key", "what"), BAD_RULES)
def test_a_wrong_rule_is_told_at_its_place(rule: Any, key: str, what: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        tensor(partition_config={"layer_specs": [rule]})
    (problem,) = caught.value.problems
    assert f"{KEY}.partition_config.layer_specs{key}: " in str(caught.value)
    assert what in f"{problem.what}; {problem.fix}"


@pytest.mark.key(f"{KEY}.partition_config.layer_specs")
def test_all_rules_are_checked_with_their_lines() -> None:
    text = """{"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [
      {"patterns": [".*"], "note": "fine"},
      {"patterns": ["*"]},
      {"patterns": [".*"], "shape": 3}
    ]}}}"""
    with pytest.raises(ConfigProblems) as caught:
        load(text, where="ds.json")
    told = str(caught.value)
    assert "ds.json:3:21" in told and "ds.json:4:28" in told and "2 problems" in told


def test_rules_survive_being_written_out() -> None:
    rules = [{"patterns": [".*q"], "shape": [[4, 2, 2], -1]}, {"patterns": ["b"], "partition_type": "Row"}]
    written = {"autotp_size": 2, "partition_config": {"layer_specs": rules}}
    config = load({KEY: written, "train_batch_size": 2})
    assert load(config.to_dict()) == config
    solved = config.resolve(dp_degree=1)
    found = solved.tensor_parallel.partition_config
    assert found is not None and [spec.partition_type for spec in found.layer_specs] == ["column", "row"]
    assert config.given()[KEY]["partition_config"]["layer_specs"][0] == rules[0]


BESIDE: list[tuple[dict[str, Any], str]] = [  # other keys, the key that is named
    ({"optimizer": {"type": "lamb"}}, "optimizer.type"),
    ({"optimizer": {"type": "Muon"}}, "optimizer.type"),
    ({"compile": {"enabled": True}}, "compile"),
    ({KEY: {"autotp_size": 2, "sequence_parallel": True}, "activation_checkpointing": {"partition_activations": True}},
     f"{KEY}.sequence_parallel"),
]  # fmt: skip


@pytest.mark.parametrize(("others", "key"), BESIDE)
def test_what_cannot_stand_beside_it(others: dict[str, Any], key: str) -> None:
    assert list(problems({KEY: {"autotp_size": 2}, **others})) == [key]
    others.get(KEY, {}).pop("autotp_size", None)
    assert load({KEY: {"autotp_size": 1}, **others})


@pytest.mark.key(f"{KEY}.sequence_parallel")
def test_sequence_parallel() -> None:
    assert not tensor().tensor_parallel.sequence_parallel
    assert tensor(sequence_parallel=True).tensor_parallel.sequence_parallel
    assert notes(tensor(sequence_parallel=True)) == {}
    assert "has no effect" in notes(load({KEY: {"sequence_parallel": True}}))[f"{KEY}.sequence_parallel"]


def test_partition_activations_acts_over_tensor_parallel_ranks() -> None:
    keep = {"activation_checkpointing": {"partition_activations": True}}

    def told(config: Config) -> bool:
        return any(note.path[-1] == "partition_activations" for note in config.notes)

    assert told(load(keep)) and not told(load({**keep, KEY: {"autotp_size": 2}}))


def test_the_examples_of_the_guide_are_taken() -> None:
    examples = re.findall("```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(examples) == 2
    for text in examples:
        config = load(text if text.startswith("{") else f"{{{text}}}")
        assert config.tensor_parallel.degree == 2 and not notes(config)
    rules = config.tensor_parallel.partition_config
    assert rules is not None and re.match(
        rules.layer_specs[1].patterns[0], "model.layers.0.self_attn.o_proj.weight"
    )
