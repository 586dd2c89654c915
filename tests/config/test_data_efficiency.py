from collections.abc import Iterable
from typing import Any

import pytest

from launcher.config import Config, ConfigProblems, load

PACE = {"total_curriculum_step": 100, "difficulty_step": 8}
SEQLEN: dict[str, Any] = {
    "difficulty_type": "value",
    "clustering_type": "single_cluster",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": PACE,
}
PREFIX = "data_efficiency.data_sampling"
LEARNING = f"{PREFIX}.curriculum_learning"
METRIC = f"{LEARNING}.curriculum_metrics.seqlen"


def both_names(keys: Iterable[str]) -> list[str]:
    """Return the paths of a metric's keys, as used here and as documented by DeepSpeed, for any metric."""
    return [f"{LEARNING}.curriculum_metrics.{name}.{key}" for key in keys for name in ("seqlen", "*")]


def sections(
    seqlen: Any = None, *, outer: bool = True, sampling: bool = True, inner: bool = True, **more: Any
) -> dict[str, Any]:
    metrics = {"seqlen": SEQLEN if seqlen is None else seqlen}
    learning = {"enabled": inner, "curriculum_metrics": metrics}
    data = {"enabled": sampling, "curriculum_learning": learning, **more}
    return {"data_efficiency": {"enabled": outer, "data_sampling": data}}


def problems(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigProblems) as caught:
        load(tree).resolve(dp_degree=1, auto={"train_batch_size": 1})
    return str(caught.value)


def notes(config: Config) -> str:
    return "\n".join(map(str, config.notes))


def test_a_curriculum_by_length_is_taken() -> None:
    config = load(sections())
    assert config.data_efficiency.curriculum is not None
    assert config.data_efficiency.curriculum.max_difficulty == 64
    assert config == load(config.to_dict())
    assert "data_efficiency" not in notes(config)


@pytest.mark.key("data_efficiency.enabled", f"{PREFIX}.enabled", f"{LEARNING}.enabled")
@pytest.mark.parametrize("switch", ["outer", "sampling", "inner"])
def test_each_switch_turns_everything_inside_off(switch: str) -> None:
    anything = {
        "schedule_type": "custom",
        "index_to_sample_path": "f",
        "min_difficulty": 9,
        "max_difficulty": 8,
    }
    tree = sections(anything, **{switch: False})
    tree["data_efficiency"]["data_sampling"]["curriculum_learning"]["curriculum_metrics"]["rarity"] = {
        "index_to_sample_path": "f"
    }
    config = load(tree)
    assert config.data_efficiency.curriculum is None
    assert ("is disabled, because data_efficiency" in notes(config)) == (switch != "inner")


@pytest.mark.key(
    "data_efficiency.data_routing.enabled",
    "data_efficiency.data_routing.random_ltd.enabled",
    f"{PREFIX}.dynamic_batching.enabled",
)
def test_routing_and_batches_by_tokens_are_refused_when_on() -> None:
    routing = {"enabled": True, "random_ltd": {"enabled": True, "total_layer_num": 12}}
    said = problems({"data_efficiency": {"enabled": True, "data_routing": routing}})
    assert "data_efficiency.data_routing.enabled" in said and "another forward for every block" in said
    assert load({"data_efficiency": {"enabled": False, "data_routing": routing}}) == load({})
    batching = {"enabled": True, "max_tokens": 4096}
    said = problems(sections(dynamic_batching=batching))
    assert "dynamic_batching.enabled" in said and "file of lengths" in said
    load(sections(dynamic_batching={"enabled": False, "max_tokens": 4096}))


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"index_to_sample_path": "a"}, "index_to_sample_path", "needs DeepSpeed's index files"),
        ({"index_to_metric_path": "a"}, "index_to_metric_path", "needs DeepSpeed's index files"),
        ({"difficulty_type": "percentile"}, "difficulty_type", 'write "value"'),
        ({"clustering_type": "schedule_based"}, "clustering_type", 'write "single_cluster"'),
        ({"schedule_type": "custom"}, "schedule_type", "needs a Python function"),
        ({"schedule_type": "fixed_lin"}, "schedule_type", 'did you mean "fixed_linear"?'),
        ({"min_difficulty": 128}, "max_difficulty", "64 is below min_difficulty 128"),
        ({"min_difficulty": None}, "min_difficulty", "is required"),
        ({"max_difficulty": None}, "max_difficulty", "is required"),
        ({"schedule_type": None}, "schedule_type", "is required"),
        ({"schedule_config": {}}, "schedule_config.total_curriculum_step", "is required"),
        ({"schedule_type": "fixed_root"}, "schedule_config.root_degree", "is required"),
        ({"schedule_type": "fixed_discrete"}, "schedule_config.difficulty", "is required"),
        ({"schedule_type": "fixed_discrete"}, "schedule_config.max_step", "is required"),
        (
            {"schedule_config": {**PACE, "difficulty_steps": 8}},
            "schedule_config.difficulty_steps",
            "did you mean",
        ),
        (
            {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [8, 16], "max_step": [1, 2]},
            },
            "schedule_config.max_step",
            "has 2 entries, but difficulty has 2",
        ),
        (
            {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [8, 16, 9], "max_step": [2, 2]},
            },
            "schedule_config.max_step",
            "must be strictly increasing",
        ),
        (
            {"schedule_config": {"difficulty": 8}},
            "schedule_config.difficulty",
            "must be a list of positive whole numbers",
        ),
    ],
)
def test_refusals_name_the_key(change: dict[str, Any], key: str, words: str) -> None:
    said = problems(sections(SEQLEN | change))
    assert f"{METRIC}.{key}:" in said and words in said


CHOOSING = ("index_to_sample_path", "index_to_metric_path", "difficulty_type", "clustering_type")


@pytest.mark.key(*both_names(CHOOSING))
def test_what_chooses_sequences_is_refused_with_a_reason() -> None:
    values = ("samples", "metrics", "percentile", "schedule_based")
    said = problems(sections(SEQLEN | dict(zip(CHOOSING, values, strict=True))))
    assert said.count("here sequences are truncated to a length, not selected by length") == 4


@pytest.mark.key(f"{LEARNING}.curriculum_metrics")
def test_other_metrics_are_refused() -> None:
    tree = sections()
    metrics = tree["data_efficiency"]["data_sampling"]["curriculum_learning"]["curriculum_metrics"]
    metrics["vocabularyrarity"] = metrics.pop("seqlen")
    said = problems(tree)
    assert "has 1 problem" in said and "vocabularyrarity" in said and "use the metric `seqlen`" in said
    metrics["seqlne"] = metrics.pop("vocabularyrarity")
    assert f"did you mean `{METRIC}`" in problems(tree)
    metrics.clear()
    assert f"{LEARNING}.curriculum_metrics: is required" in problems(tree)


@pytest.mark.key(f"{LEARNING}.data_cluster_path")
def test_what_has_no_effect_is_told() -> None:
    tree = sections()
    tree["data_efficiency"]["data_sampling"]["curriculum_learning"]["data_cluster_path"] = "clusters"
    assert "there are no clusters to write" in notes(load(tree))
    odd = sections(SEQLEN | {"schedule_config": {**PACE, "difficulty_step": 5}})
    assert "5 is not a multiple of 8" in notes(load(odd))


@pytest.mark.key("vocabulary_size")
def test_vocabulary_size_is_told_to_do_nothing() -> None:
    assert "vocabulary_size: has no effect here" in notes(load({"vocabulary_size": 50257}))
