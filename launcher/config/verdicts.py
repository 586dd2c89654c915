"""The verdict on each key of a file, and the resolved value of every "auto" and every default."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from launcher.config.check import Examined
from launcher.config.document import Document
from launcher.config.problems import ConfigProblems, Note, Path, dotted
from launcher.config.ranks import BATCH_KEYS
from launcher.config.resolve import ResolvedAuto, defaults_at
from launcher.config.root import Config
from launcher.config.schema import differs_at, idle_at, keys_written, known_at
from launcher.config.section import AUTO, Section

Verdict: TypeAlias = Literal[
    "used", "used differently", "obsolete", "no effect", "comment", "foreign", "refused", "default"
]
_WHOLE = ("refused", "obsolete", "no effect", "comment", "foreign")
OWN = "a key of this launcher"
"""Prefix of the notes on keys that DeepSpeed does not have; these do not count as used differently."""
_OF_NOTE: dict[str, Verdict] = {
    "converted": "obsolete",
    "differs": "used differently",
    "no effect": "no effect",
    "comment": "comment",
    "foreign": "foreign",
}


class KeyVerdict(NamedTuple):
    """The verdict on one key.

    Attributes:
        path: as written; for a key that is not set but has a finding, its current path.
        line, column: where it is written, both from 1; (0, 0) if it is not.
        verdict: how the key is treated.
        words: how it differs, what replaced it, or why; "" for a key that is simply used.
    """

    path: Path
    line: int
    column: int
    verdict: Verdict
    words: str


def verdicts(written: Document, examined: Examined) -> list[KeyVerdict]:
    """Return a verdict for each key of `written`, in file order, then for keys that are not set but have
    findings."""
    reasons = _reasons(examined)
    rows: list[KeyVerdict] = []
    told: set[Path] = set()
    under: dict[Path, list[Path]] = {}
    for path in reasons:
        for end in range(1, len(path) + 1):
            under.setdefault(path[:end], []).append(path)
    carried = set(examined.document.origins.values())
    for path in _leaves(written.tree, ()):
        # A section that was refused or replaced as a whole is one row; one that was only renamed is not.
        around = (path[:end] for end in range(1, len(path)))
        whole = (p for p in around if p in reasons and reasons[p][0][0] in _WHOLE)
        subject = path if path in carried else next(whole, path)
        if subject in told:
            continue
        inside = under.get(subject, [])  # also below the subject: items of a list
        told |= {subject, *inside}
        found = [(other, reason) for other in inside for reason in reasons[other]]
        for at, reason in found or [(subject, _plain(path, examined))]:
            rows.append(KeyVerdict(at, *written.place(at), *reason))
    for path in [path for path in reasons if path not in told]:
        is_written = written.holds(path)
        place = written.place(path) if is_written else (0, 0)
        for verdict, words in reasons[path]:
            rows.append(
                KeyVerdict(path, *place, verdict if is_written or verdict == "refused" else "default", words)
            )
    return sorted(rows, key=lambda row: (row.line or 10**9, row.column))


def count(rows: list[KeyVerdict]) -> dict[str, int]:
    """Count the keys per verdict, "used" first."""
    found = Counter(row.verdict for row in rows)
    return {kind: found[kind] for kind in ("used", *_OF_NOTE.values(), "refused") if found[kind]}


def _reasons(examined: Examined) -> dict[Path, list[tuple[Verdict, str]]]:
    """Map each path as written to the findings of the checks; a refusal takes precedence over notes."""
    document = examined.document
    reasons: dict[Path, list[tuple[Verdict, str]]] = {}
    for problem in examined.problems:
        path = document.written(problem.path)
        now = f"read as {dotted(problem.path)}: " if path != problem.path else ""
        fix = f"; {problem.fix}" if problem.fix else ""
        reasons.setdefault(path, []).append(("refused", f"{now}{problem.what}{fix}"))
    notes: dict[Path, list[Note]] = {}
    for note in examined.notes:
        notes.setdefault(document.written(note.path), []).append(note)
    for path, found in notes.items():
        if path not in reasons:
            reasons[path] = [(_OF_NOTE[found[0].kind], "; ".join(note.what for note in found))]
    return reasons


def _leaves(tree: Mapping[str, Any], path: Path) -> Iterator[Path]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _plain(path: Path, examined: Examined) -> tuple[Verdict, str]:
    """Return the verdict on a key without findings."""
    now = next((new for new, old in examined.document.origins.items() if old == path), path)
    tree = examined.document.tree
    if (how := differs_at(Config, tree, now)) is not None:
        return "used" if how.startswith(OWN) else "used differently", how
    if (why := idle_at(Config, tree, now)) is not None:
        return "no effect", why
    return "used", "enables nothing" if known_at(now) is not None else ""


OF_HIDDEN_SIZE = {
    "zero_optimization.reduce_bucket_size": "hidden size x hidden size",
    "zero_optimization.stage3_prefetch_bucket_size": "0.9 x hidden size x hidden size",
    "zero_optimization.stage3_param_persistence_threshold": "10 x hidden size",
}


class Explained(NamedTuple):
    """A key that has no explicit value in the file.

    Attributes:
        path: dotted.
        value: its resolved value, as text.
        why: "the default", or where the value comes from.
        auto: whether the file sets it to "auto".
    """

    path: str
    value: str
    why: str
    auto: bool


def explain(config: Config, tree: Mapping[str, Any], dp_degree: int | None) -> list[Explained]:
    """Return every key that is "auto" or not set, in the order of the schema.

    Args:
        config: the configuration before `resolve`.
        tree: the converted document that it was built from.
        dp_degree: data-parallel degree, to solve the batch equation; None leaves it open.
    """
    written = keys_written(Config, tree)
    return list(_batch(config, dp_degree)) + list(_section(config, config, (), written, config.to_dict()))


def solved_batch(config: Config, dp_degree: int) -> tuple[ResolvedAuto, ...]:
    """Return the solution of the batch equation for `dp_degree`, ignoring the optimizer and the scheduler.

    Raises:
        ConfigProblems: it has no solution.
    """
    return (
        config.model_copy(update={"optimizer": None, "scheduler": None})
        .resolve(dp_degree=dp_degree)
        .resolved_autos
    )


def _batch(config: Config, dp_degree: int | None) -> Iterator[Explained]:
    solved: dict[str, tuple[Any, str]] = {}
    if dp_degree is not None:
        try:
            solved = {entry.path: (entry.value, entry.why) for entry in solved_batch(config, dp_degree)}
        except ConfigProblems:
            solved = {}
    for key in BATCH_KEYS:
        value = getattr(config, key)
        if value is None or value == AUTO:
            open_ = "set by the flags of the run or the batch equation; --num-gpus N solves it"
            answer, why = solved.get(key, ("open", open_))
            yield Explained(key, str(answer), why, value == AUTO)


def _section(
    root: Config, section: Section, path: Path, written: set[Path], shown: Mapping[str, Any]
) -> Iterator[Explained]:
    """Explain a section; `shown` contains its relevant keys (only those of its type for an optimizer)."""
    for key in type(section).model_fields:
        here = (*path, key)
        value = getattr(section, key)
        if here[0] in BATCH_KEYS or key not in shown:
            continue
        if isinstance(value, Section):
            if here not in written and getattr(value, "enabled", None) is False:
                yield Explained(dotted(here), "off", "the default", False)
            else:
                yield from _section(root, value, here, written, shown[key])
        elif isinstance(value, str) and value == AUTO:
            yield _auto(root, section, here)
        elif here not in written:
            found, why = _of_shared_sequences(root).get(dotted(here), (_json(value), "the default"))
            yield Explained(dotted(here), found, why, False)


def _of_shared_sequences(root: Config) -> dict[str, tuple[str, str]]:
    """Return the values of keys if ranks share sequences: path -> (value, why)."""
    if root.cp_degree == 1:
        return {}
    ulysses, ring = root.context_parallel.sizes
    exchange = str(root.cp_degree // ring) if ring else "as many as the heads allow"
    sending = str(root.cp_degree // ulysses) if ulysses else "the rest"
    shares = f"of the {root.cp_degree} ranks that share a sequence"
    return {
        "sequence_parallel_size": (str(root.cp_degree), "context_parallel: ulysses x ring"),
        "context_parallel.ulysses": (exchange, shares),
        "context_parallel.ring": (sending, shares),
        "tiled_loss": ("true if the model supports it", "because ranks share sequences"),
    }


def _auto(root: Config, section: Section, path: Path) -> Explained:
    name, key = dotted(path), str(path[-1])
    if name in (shared := _of_shared_sequences(root)):
        return Explained(name, *shared[name], True)
    if name in OF_HIDDEN_SIZE:
        return Explained(name, OF_HIDDEN_SIZE[name], "from the model, as in Hugging Face's Trainer", True)
    if name == "scheduler.params.warmup_max_lr" and root.optimizer is not None:
        return Explained(name, _json(root.optimizer.params.lr), "the optimizer's learning rate", True)
    field = type(section).model_fields[key]
    if key in section.auto_needs_value or field.is_required():
        return Explained(name, "open", "the run must set it: there is no safe default", True)
    default = defaults_at(root, path).get(key, field.get_default())
    return Explained(name, _json(default), "the default, unless the run sets another value", True)


def _json(value: Any) -> str:
    """Format a value as in the file, but strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value)
