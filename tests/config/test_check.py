import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import Config, ConfigProblems, load
from launcher.config.problems import dotted
from launcher.config.schema import implemented_paths, known_paths
from launcher.errors import ConfigError


def refused(source: Any, **kwargs: Any) -> dict[str, str]:
    """Return path -> the error and its fix."""
    with pytest.raises(ConfigProblems) as caught:
        load(source, **kwargs)
    return {dotted(problem.path): f"{problem.what} | {problem.fix}" for problem in caught.value.problems}


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def test_all_problems_of_a_file_at_once_in_its_order() -> None:
    text = """{
  "train_batch_sze": 8, // typo
  "fp16": {"enabled": true, "hysteresys": 2},
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 4, "offload_optimizer": {"device": "cpu"}},
  "optimizer": {"type": "AdamW", "params": {"lr": "1e-3x", "betas": [0.9]}},
  "flops_profiler": {"enabledd": false}
}"""
    with pytest.raises(ConfigProblems) as caught:
        load(text, where="x.json")
    assert str(caught.value) == (
        """x.json has 7 problems:
  x.json:2:3 train_batch_sze: unknown key
      fix: did you mean `train_batch_size`?
  x.json:3:12 fp16.enabled: fp16.enabled and bf16.enabled are both true, but parameters can have only one dtype
      fix: set one of fp16.enabled and bf16.enabled to false
  x.json:3:29 fp16.hysteresys: unknown key
      fix: did you mean `fp16.hysteresis`?
  x.json:5:25 zero_optimization.stage: must be one of 0, 1, 2 or 3, not 4
  x.json:6:45 optimizer.params.lr: must be a number, not the string "1e-3x"
  x.json:6:60 optimizer.params.betas: must be a list of two numbers, not the list [0.9]
      fix: write [first, second]
  x.json:7:22 flops_profiler.enabledd: unknown key
      fix: did you mean `flops_profiler.enabled`?"""
    )


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("train_batch_size", True, "must be a whole number, not true"),
        ("train_batch_size", "eight", 'must be a whole number, not the string "eight"'),
        ("train_batch_size", "8.5", "must be a whole number, not the string"),
        ("train_batch_size", "-8", "must be at least 1, not -8"),
        ("train_batch_size", 2.5, "must be a whole number, not 2.5"),
        ("train_batch_size", 0, "must be at least 1, not 0"),
        ("wall_clock_breakdown", "truly", 'must be true or false, not the string "truly"'),
        ("wall_clock_breakdown", 2, "must be true or false, not 2"),
        ("gradient_clipping", -1.0, "must be at least 0, not -1.0"),
        ("gradient_clipping", False, "must be a number, not false"),
        ("gradient_clipping", None, "must be a number, not null"),
        ("gradient_clipping", float("inf"), "must be a finite number"),
        ("communication_data_type", "fp61", 'must be one of "fp32", "fp16" or "bf16"'),
        ("communication_data_type", "fp61", 'did you mean "fp16"?'),
        ("zero_optimization.stage", "4", 'must be one of 0, 1, 2 or 3, not the string "4" | None'),
        ("zero_optimization.stage", True, "must be one of 0, 1, 2 or 3, not true"),
        ("zero_optimization.stage", [0, 1], "not the list [0, 1]"),
        ("zero_optimization.reduce_bucket_size", 5e8 + 0.5, "must be a whole number"),
        ("zero_optimization.overlap_comm", "", "must be true or false"),
        ("zero_optimization", 2, 'must be an object, not 2 | write "zero_optimization": {"stage": 2}'),
        ("fp16", 3, "must be an object, not 3"),
        ("gradient_clipping", -1, "must be at least 0"),
        ("fp16.loss_scale", True, "must be a number, not true"),
        ("gradient_accumulation_steps", 0, "must be at least 1"),
        ("data_types.grad_accum_dtype", "float23", 'must be one of "fp32", "fp16" or "bf16"'),
        ("activation_checkpointing.number_checkpoints", 0, "must be at least 1"),
        ("steps_per_print", 0, "must be at least 1"),
    ],
)
def test_wrong_values_in_plain_words(path: str, value: Any, words: str) -> None:
    found = refused(nested(path, value))
    assert list(found) == [path]
    assert words in found[path]


def test_a_misplaced_key_is_told_where_it_belongs() -> None:
    found = refused(
        {
            "stage": 2,
            "offload_optimizer": {"device": "none"},
            "weight-decay": 0.1,
            "optimizer": {"type": "AdamW", "lr": 1e-3, "adam_w_mode": True},
            "zero_optimization": {"enabled": True, "stage": 1, "gradient_clipping": 1.0},
        }
    )
    assert "it belongs at `zero_optimization.stage`" in found["stage"]
    assert "it belongs at `zero_optimization.offload_optimizer`" in found["offload_optimizer"]
    assert "did you mean `optimizer.params.weight_decay`" in found["weight-decay"]
    assert "it belongs at `optimizer.params.lr`" in found["optimizer.lr"]
    assert "it belongs at `optimizer.params.adam_w_mode`" in found["optimizer.adam_w_mode"]
    assert "it belongs at `gradient_clipping`" in found["zero_optimization.gradient_clipping"]


@pytest.mark.parametrize("key", ["_comment", "comment", "//", "# why", "__note2", "description", "_README"])
def test_a_text_under_a_name_for_comments_is_one(key: str) -> None:
    config = load(
        {key: "hello", "zero_optimization": {key: ["two", "lines"]}, "amp": {"enabled": False, key: "x"}}
    )
    assert config == load({})
    assert f"{key}: is treated as a comment" in map(str, config.notes)
    assert refused({key: {"stage": 3}}) and refused({"_stage": "2"})


def test_a_typo_in_a_required_key_is_one_problem() -> None:
    assert list(refused({"optimizer": {"typ": "AdamW"}})) == ["optimizer.typ"]
    assert list(refused({"optimizer": {}})) == ["optimizer.type"]


def test_null_and_false_sections_ask_for_nothing() -> None:
    off = {
        "fp16": False,
        "bf16": None,
        "activation_checkpointing": False,
        "optimizer": None,
        "scheduler": None,
    }
    config = load({**off, "zero_optimization": False})
    assert config == load({})
    assert config.activation_checkpointing is None


def test_presence_turns_activation_checkpointing_on() -> None:
    config = load({"activation_checkpointing": {}})
    assert config.activation_checkpointing is not None
    assert config.activation_checkpointing.number_checkpoints is None
    assert any("all transformer blocks are recomputed" in str(note) for note in config.notes)
    assert load({}).activation_checkpointing is None


def test_both_precisions_is_an_error_that_names_both() -> None:
    found = refused({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}})
    assert "fp16.enabled and bf16.enabled are both true" in found["fp16.enabled"]


def test_a_wrong_key_is_in_no_contradiction_as_well() -> None:
    found = refused('{"fp16": {"enabled": false, "enabled": true}, "bf16": {"enabled": true}}')
    assert found == {"fp16.enabled": "the key is written twice, first at line 1 | keep one `fp16.enabled`"}


def test_the_near_key_goes_before_the_same_name_elsewhere() -> None:
    fix = refused({"zero_optimization": {"stages": 2}})["zero_optimization.stages"]
    assert "did you mean `zero_optimization.stage`? (`stages` itself belongs at `pipeline.stages`)" in fix


def test_defaults_are_deepspeeds() -> None:
    config = load({})
    assert config.gradient_clipping == 1.0
    assert any("gradient_clipping: is not set" in str(note) for note in config.notes)
    assert (config.fp16.initial_scale_power, config.fp16.loss_scale_window, config.fp16.hysteresis) == (
        16,
        1000,
        2,
    )
    assert (config.fp16.loss_scale, config.fp16.min_loss_scale) == (0, 1)
    assert config.fp16.consecutive_hysteresis is False
    assert config.bf16.check_grad_overflow is True
    assert (config.optimizer, config.scheduler, config.steps_per_print) == (None, None, None)
    assert config.dtype == "fp32"


scalars = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.sampled_from(["auto", "x", "cpu"])
keys = st.sampled_from(sorted({path.split(".")[-1] for path in (*implemented_paths(Config), *known_paths())}))
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(keys, anything, max_size=5), st.integers(1, 4))
def test_any_tree_of_known_words_is_a_config_or_problems(tree: dict[str, Any], ranks: int) -> None:
    try:
        config = load(tree)
        solved = config.resolve(dp_degree=ranks)
    except ConfigProblems as error:
        assert error.problems
    else:
        assert load(solved.to_dict()).resolve(dp_degree=ranks) == solved


def test_hostile_trees_end_in_problems_not_in_crashes() -> None:
    found = refused({"optimizer": {"type": 3, "params": 4}, "scheduler": [], "fp16": "on", "aio": 7})
    assert set(found) == {"optimizer.type", "optimizer.params", "scheduler", "fp16", "aio"}
    assert load(json.dumps({"": 1, "ä": {"b": [None]}})) == load({})  # a script's own


@pytest.mark.parametrize(
    ("tree", "meant"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 0.1}}}, "optimizer.params.lr"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
            "scheduler.params.warmup_num_steps",
        ),
    ],
)
def test_a_name_of_other_libraries_is_known(tree: dict[str, Any], meant: str) -> None:
    with pytest.raises(ConfigProblems, match=f"did you mean `{meant}`"):
        load({"train_batch_size": 4, **tree})


def test_a_dict_that_a_script_read_from_a_file_has_the_places_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization":\n  {"stag": 2}}')
    (tmp_path / "other.json").write_text('{"zero_optimization": {"stag": 3}}')
    given = {"zero_optimization": {"stag": 2}, "train_micro_batch_size_per_gpu": 1}
    for words in (["--deepspeed", str(path)], [f"--deepspeed={path}", "x"]):
        monkeypatch.setattr("sys.argv", ["train.py", str(tmp_path / "other.json"), *words])
        with pytest.raises(ConfigError, match=rf"{path}:2:4 zero_optimization.stag"):
            load(given)
    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(ConfigError, match=r"^config has 1 problem"):
        load(given)
