from typing import Any

import pytest

from launcher.config import Config, ConfigProblems, load
from launcher.config.known_keys import Known, known_keys
from launcher.config.schema import implemented_paths, known_paths


def nodes(known: Known, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Known]]:
    found = [(path, known)] if path and known.words else []
    for key, child in known.children.items():
        found += nodes(child, (*path, key))
    return found


def written(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the config with one key, with its sections enabled."""
    known, sections = known_keys(), []
    for key in path[:-1]:
        known = known.child(key) or Known()
        sections.append(known)
    tree = {path[-1]: value}
    for key, section in zip(reversed(path[:-1]), reversed(sections), strict=True):
        if section.switch and section.switch not in tree:
            tree = {section.switch: "cpu" if section.switch == "device" else True, **tree}
        tree = {"any": tree} if key == "*" else {key: tree}
    return switched_on(tree, path)


def switched_on(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return the config with the implemented sections around the key enabled as well."""
    inside, cls = tree, Config
    for key in path[:-1]:
        if key not in cls.member_sections():
            break
        inside, cls = inside[key], cls.member_sections()[key]  # type: ignore[assignment]
        if "enabled" in cls.model_fields:
            inside["enabled"] = True
    return tree


LEAVES = [(path, known) for path, known in nodes(known_keys()) if not known.children]
CONVERTED = ("amp", "curriculum_learning", "monitor_config")
SIMPLE = [(path, known) for path, known in LEAVES if path[0] not in CONVERTED]


def test_every_key_that_is_not_implemented_says_so(subtests: pytest.Subtests) -> None:
    for path, known in SIMPLE:
        with subtests.test(".".join(path)):
            check_that_it_says_so(path, known)


def check_that_it_says_so(path: tuple[str, ...], known: Known) -> None:
    if known.status == "idle":
        notes = load({**written(path, "cpu"), "train_micro_batch_size_per_gpu": 1}).notes
        assert any(note.path == path and "has no effect here" in note.what for note in notes)
        return
    asks = {"bool": not known.neutral[0]} if known.neutral and isinstance(known.neutral[0], bool) else {}
    tree = written(tuple("any" if key == "*" else key for key in path), asks.get("bool", "cpu"))
    if path[0] in ("optimizer", "scheduler"):
        tree[path[0]]["type"] = {"optimizer": "AdamW", "scheduler": "WarmupLR"}[path[0]]
    with pytest.raises(ConfigProblems) as caught:
        load(tree)
    assert len(caught.value.problems) >= 1
    for problem in caught.value.problems:
        said = ("not implemented here yet", "old DeepSpeed key", "ignored by DeepSpeed", "true or false")
        assert any(words in problem.what for words in said)
        assert problem.path[0] == path[0]


def test_values_that_ask_for_nothing_are_taken(subtests: pytest.Subtests) -> None:
    for path, known in SIMPLE:
        if known.neutral:
            with subtests.test(".".join(path)):
                check_that_it_is_taken(path)


def check_that_it_is_taken(path: tuple[str, ...]) -> None:
    known = known_keys()
    for key in path:
        known = known.child(key) or Known()
    for neutral in (*known.neutral, None):
        tree: Any = neutral
        for key in reversed(path):
            tree = {key: tree}
        if path[0] == "optimizer":
            tree["optimizer"]["type"] = "AdamW"
        config = load(tree)
        zero = config.zero_optimization.model_copy(update={"offload_optimizer": None})
        assert zero == load({}).zero_optimization


def _can_be_off(known: Known) -> bool:
    return "enabled" in known.children and False in known.children["enabled"].neutral


@pytest.mark.parametrize(
    "section",
    [name for name, known in known_keys().children.items() if _can_be_off(known) and name not in CONVERTED],
)
def test_a_section_that_is_off_asks_for_nothing(section: str) -> None:
    other = next(key for key in known_keys().children[section].children if key != "enabled")
    for off in ({"enabled": False, other: 7}, {"enabled": "auto"}, {}, None, False):
        assert load({section: off}) == load({})
    with pytest.raises(ConfigProblems, match=rf"{section}\.enabled"):
        load({section: {"enabled": True}})
    with pytest.raises(ConfigProblems, match="must be true or false"):
        load({section: {"enabled": "maybe"}})
    with pytest.raises(ConfigProblems, match=rf"did you mean `{section}\.enabled`"):
        load({section: {"enabld": False}})


def test_a_section_without_a_switch_is_one_problem() -> None:
    attention = {"mode": "fixed", "block": 16, "num_local_blocks": 4}
    with pytest.raises(ConfigProblems) as caught:
        load({"sparse_attention": attention})
    assert [problem.path for problem in caught.value.problems] == [("sparse_attention",)]


def test_typos_inside_sections_that_are_not_implemented() -> None:
    with pytest.raises(ConfigProblems) as caught:
        load({"hybrid_engine": {"max_out_token": 8}})
    assert "hybrid_engine.max_out_tokens" in {problem.suggestion for problem in caught.value.problems}
    metrics = {"my_metric": {"dificulty_type": "value"}}
    learning = {"enabled": False, "curriculum_metrics": metrics}
    with pytest.raises(ConfigProblems, match=r"curriculum_metrics\.my_metric\.difficulty_type"):
        load({"data_efficiency": {"data_sampling": {"curriculum_learning": learning}}})


def test_a_key_is_implemented_or_not_never_both() -> None:
    leaves = {".".join(path) for path, known in nodes(known_keys()) if not known.children}
    assert leaves.isdisjoint(implemented_paths(Config))
    assert set(known_paths()) >= {path for path in leaves if "*" not in path}
