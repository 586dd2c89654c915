"""The schema of keys, and the findings on keys that are unknown, misplaced or not implemented."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from launcher.config.conversions import converted_paths
from launcher.config.known_keys import Known, known_keys
from launcher.config.problems import Note, Path, Problem, dotted, in_json, is_comment, nearest, plain, show
from launcher.config.section import Section, as_switch


@cache
def implemented_paths(root: type[Section]) -> tuple[str, ...]:
    """Return the dotted path of every key that can be written, sections included."""
    return tuple(dict.fromkeys(_paths(root, "")))


def _paths(cls: type[Section], prefix: str) -> Iterator[str]:
    for key in cls.model_fields:
        yield prefix + key
        for member in cls.sections_of(key):
            yield from _paths(member, f"{prefix}{cls.step_of(key)}.")


@cache
def known_paths() -> tuple[str, ...]:
    """Return the dotted path of every DeepSpeed key that is not implemented."""
    return tuple(_known(known_keys(), ""))


def _known(node: Known, prefix: str) -> Iterator[str]:
    for key, child in node.children.items():
        if key != "*":
            yield prefix + key
            yield from _known(child, f"{prefix}{key}.")


def differs_at(root: type[Section], tree: Any, path: Path) -> str | None:
    """Return how the key at `path` of `tree` differs from DeepSpeed; None if it does not or is unknown."""
    cls, section = _section_at(root, tree, path)
    if cls is None or as_switch(section.get("enabled")) is False:
        return None  # a disabled section does not differ
    key = cls.spelling(str(path[-1]))
    shows = cls.differs_where.get(key)
    return None if shows and not shows(section.get(str(path[-1])), tree) else cls.differs.get(key)


def idle_at(root: type[Section], tree: Any, path: Path) -> str | None:
    """Return why the key at `path` of `tree` has no effect, whatever its value is; None if it has one."""
    cls, _ = _section_at(root, tree, path)
    return None if cls is None else cls.without_effect.get(cls.spelling(str(path[-1])))


def _section_at(root: type[Section], tree: Any, path: Path) -> tuple[type[Section] | None, dict[str, Any]]:
    """Return the class and the written members of the section that holds the key at `path`; (None, {}) if none does."""
    cls: type[Section] | None = root
    for part in path[:-1]:
        if cls is None or not isinstance(tree, dict):
            return None, {}
        cls, tree = cls.section_of(cls.spelling(str(part)), tree), tree.get(str(part))
    return (cls, tree) if isinstance(tree, dict) else (None, {})


def keys_written(cls: type[Section], tree: Any, path: Path = ()) -> set[Path]:
    """Return the paths of the keys of `tree` in the schema's own spelling, sections included."""
    found: set[Path] = set()
    for key, value in tree.items():
        name = cls.spelling(key)
        member = cls.section_of(name, tree)
        found.add((*path, name))
        if member is not None and isinstance(value, dict):
            found |= keys_written(member, value, (*path, name))
    return found


def known_at(path: Path) -> Known | None:
    """Return the DeepSpeed key at `path` if it exists and is not implemented."""
    known: Known | None = known_keys()
    for part in path:
        known = known.child(str(part)) if known else None
    return known


_LISTED = 12
"""Sections with at most this many keys are listed in full if no key is similar to the unknown one."""

SYNONYMS = {
    **{"learning_rate": "lr", "epsilon": "eps", "adam_epsilon": "eps", "wd": "weight_decay"},
    **{"cpu_offload_optimizer": "offload_optimizer", "cpu_offload_param": "offload_param"},
    **{"num_warmup_steps": "warmup_num_steps", "warmup_steps": "warmup_num_steps"},
    **{"num_training_steps": "total_num_steps", "total_steps": "total_num_steps"},
}
"""Name of a key in other libraries -> its name in the sections of DeepSpeed that have such a key."""

_ITS_OWN = (
    "zero_optimization",
    "optimizer",
    "fp16",
    "bf16",
    "activation_checkpointing",
    "tensor_parallel",
    "pipeline",
)
"""Sections whose keys have names that occur nowhere else: such a key at the top level is misplaced."""

FOREIGN = "is not a DeepSpeed key, and is ignored"

_STAGES = 'write "pipeline": {"stages": N}'
_SPLITS = 'write "tensor_parallel": {"autotp_size": N}'
_RATES = "write `scheduler`, with a type and its params"
OTHER_NAMES = {
    "learning_rate": "write `optimizer.params.lr`",
    "pipe_parallel_size": _STAGES,
    "pipeline_model_parallel_size": _STAGES,
    "model_parallel_size": _SPLITS,
    "tensor_model_parallel_size": _SPLITS,
    "micro_batch_size": "write `train_micro_batch_size_per_gpu`",
    "global_batch_size": "write `train_batch_size`",
    "checkpoint_activations": 'write "activation_checkpointing": {}',
    "clip_grad": "write `gradient_clipping`",
    "log_interval": "write `steps_per_print`",
    "lr_decay_style": _RATES,
    "lr_decay_iters": _RATES,
    "lr_warmup_iters": _RATES,
    "lr_warmup_fraction": _RATES,
    "min_lr": _RATES,
    "warmup": _RATES,
    "train_iters": "delete it; the recipes of `launch` have --max-steps, and a custom script counts its own steps",
    "seq_length": "delete it; the recipes of `launch` have --seq-length, and a custom script sets its own length",
    "zero_stage": 'write "zero_optimization": {"stage": N}',
}
"""Key of Megatron, GPT-NeoX or Hugging Face, with dashes or underscores -> what to write instead."""


def stranger(root: type[Section], key: str, value: Any, beside: Mapping[str, Any]) -> Problem | Note:
    """Classify a top-level key that is neither ours nor DeepSpeed's.

    Args:
        key, value: as written.
        beside: the whole configuration.

    Returns:
        A problem if the key requests something that would not be done, else a note.
    """
    path: Path = (key,)
    instead = OTHER_NAMES.get(plain(key))
    if instead is not None:
        if value in (0, 1, None, False) and plain(key).endswith("parallel_size"):
            return Note(path, "foreign", f"is a Megatron key, and {show(value)} has no effect")
        return Problem(path, "is a key of another library, which DeepSpeed does not read", instead)
    if isinstance(value, dict):
        inner = next((name for name in value if name in root.model_fields and name not in beside), None)
        if inner is not None:
            what = f"is not a DeepSpeed section, so `{inner}` in it is ignored"
            return Problem(path, what, f"write `{inner}` at the top level")
    problem = unknown_key(root, root, known_keys(), path, value)
    if problem.suggestion is not None or is_comment(key, ""):
        return problem
    old = nearest(key, (name for name, _ in converted_paths() if "." not in name), furthest=1)
    if old is not None:
        return Problem(path, "unknown key", f"did you mean `{old}`?", old)
    return Note(path, "foreign", FOREIGN)


def unknown_key(
    root: type[Section], cls: type[Section] | None, known: Known | None, path: Path, value: Any = None
) -> Problem:
    """Return the problem of a key that is neither in `cls` nor in `known`; at least one of the two is given.

    Args:
        value: the value of the key. An object at the top level is never matched to a plain key.
    """
    key = str(path[-1])
    siblings = list(known.children) if known else []
    siblings = [name for name in siblings if name != "*"]
    if cls is not None:
        siblings = [*cls.model_fields, *cls.aliases, *siblings]
    everywhere = _places(root)
    if len(path) == 1:
        everywhere = _misplaced(root, isinstance(value, dict))
        if isinstance(value, dict):
            siblings = [name for name in siblings if root.sections_of(name) or known_at((name,))]
    if cls is not None and dotted(path) in implemented_paths(root):
        kind = cls.__name__.removesuffix("Params")
        return Problem(path, f"{kind} does not have this key; another type does", _choices(siblings))
    if plain(key).lstrip("_/#").startswith("comment"):
        return Problem(path, "unknown key", "write comments as `// text`")
    if (synonym := SYNONYMS.get(plain(key), "")) in siblings:
        meant = dotted((*path[:-1], synonym))
        return Problem(path, "unknown key", f"did you mean `{meant}`?", meant)
    close = nearest(key, siblings, furthest=1)
    elsewhere = [place for place in everywhere.get(key, []) if not _is_around(place, path)]
    near = close or (None if elsewhere else nearest(key, siblings))
    if near:
        meant = dotted((*path[:-1], near))
        also = f" (`{key}` itself belongs at `{elsewhere[0]}`)" if elsewhere else ""
        return Problem(path, "unknown key", f"did you mean `{meant}`?{also}", meant)
    if elsewhere:
        here = f"in {dotted(path[:-1])}" if len(path) > 1 else "at the top level"
        places = " or ".join(f"`{place}`" for place in elsewhere[:3])
        return Problem(path, f"unknown key {here}", f"it belongs at {places}", elsewhere[0])
    far = nearest(key, everywhere, furthest=max(1, len(key) // 6))
    if far:
        meant = everywhere[far][0]
        return Problem(path, "unknown key", f"did you mean `{meant}`?", meant)
    return Problem(path, "unknown key", _choices(siblings))


def _is_around(place: str, path: Path) -> bool:
    """Return whether `place` encloses `path`: `fp16` encloses `fp16.fp16`, whose inner key is misplaced."""
    return f"{dotted(path)}.".startswith(f"{place}.")


def _choices(siblings: list[str]) -> str:
    if len(siblings) > _LISTED:
        return "delete it"
    return f"delete it; valid keys here: {', '.join(sorted(siblings))}"


def not_written(known: Known, value: Any, path: Path) -> Problem:
    """Return the problem of a DeepSpeed key that requests something this launcher does not implement."""
    words = f" ({known.words})" if known.words else ""
    what = {
        "later": f"{show(value)} is not implemented here yet{words}",
        "old": f"is an old DeepSpeed key that is not supported here{words}",
        "ignored": f"is ignored by DeepSpeed itself{words}",
    }[known.status]
    off = f", or write {in_json(known.neutral[0])}" if known.neutral else ""
    return Problem(path, what, known.fix or f"delete it{off}")


@cache
def _places(root: type[Section]) -> dict[str, list[str]]:
    """Map the last part of each path to the paths that end in it, implemented ones first."""
    return _by_name((*implemented_paths(root), *known_paths()))


@cache
def _misplaced(root: type[Section], section: bool) -> dict[str, list[str]]:
    """Return `_places` of names specific to DeepSpeed: an `epochs` or a `device` may be a script's own key.

    Args:
        section: include only the names of sections.
    """
    paths = implemented_paths(root)
    around = {path.rpartition(".")[0] for path in paths}
    single = {name for name, where in _places(root).items() if len(where) == 1}
    return _by_name(
        path
        for path in paths
        if path.partition(".")[0] in _ITS_OWN
        and path.rpartition(".")[2] in single
        and (not section or path in around)
    )


def _by_name(paths: Iterable[str]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for path in paths:
        where = places.setdefault(path.rpartition(".")[2], [])
        if path not in where:
            where.append(path)
    return places
