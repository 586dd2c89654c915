"""What becomes of every key of a file: used, used differently, obsolete, without effect, foreign or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from launcher.config.check import Examined
from launcher.config.problems import Note, Path, dotted
from launcher.config.reader import Document
from launcher.config.root import Config
from launcher.config.schema import differs_at, known_at

Verdict: TypeAlias = Literal[
    "used", "used differently", "obsolete", "no effect", "comment", "foreign", "refused", "left out"
]
_WHOLE = ("refused", "obsolete", "no effect")
_OF_NOTE: dict[str, Verdict] = {
    "converted": "obsolete",
    "differs": "used differently",
    "no effect": "no effect",
    "comment": "comment",
    "foreign": "foreign",
}


class KeyVerdict(NamedTuple):
    """One key.

    Attributes:
        path: as it was written; of a key that is left out and worth a word, its path of today.
        line, column: where it is written, both from 1; (0, 0) where it is not.
        verdict: what becomes of it.
        words: how, by what it was replaced, or why; "" for a key that is simply used.
    """

    path: Path
    line: int
    column: int
    verdict: Verdict
    words: str


def verdicts(written: Document, examined: Examined[Config]) -> list[KeyVerdict]:
    """A verdict for each key of `written`, in its order; then those on keys that are left out."""
    reasons = _reasons(examined)
    rows: list[KeyVerdict] = []
    told: set[Path] = set()
    under: dict[Path, list[Path]] = {}
    for path in reasons:
        for end in range(1, len(path) + 1):
            under.setdefault(path[:end], []).append(path)
    carried = set(examined.document.origins.values())
    for path in _leaves(written.tree, ()):
        # A section that was refused, or replaced by something else, is one row; one that only has another name is not.
        around = (path[:end] for end in range(1, len(path)))
        whole = (p for p in around if p in reasons and reasons[p][0][0] in _WHOLE)
        subject = path if path in carried else next(whole, path)
        if subject in told:
            continue
        inside = under.get(subject, [])  # an item of a list
        told |= {subject, *inside}
        found = [(other, reason) for other in inside for reason in reasons[other]]
        for at, reason in found or [(subject, _plain(path, examined))]:
            rows.append(KeyVerdict(at, *written.place(at), *reason))
    for path in [path for path in reasons if path not in told]:
        is_written = written.holds(path)
        place = written.place(path) if is_written else (0, 0)
        for verdict, words in reasons[path]:
            rows.append(
                KeyVerdict(path, *place, verdict if is_written or verdict == "refused" else "left out", words)
            )
    return sorted(rows, key=lambda row: (row.line or 10**9, row.column))


def count(rows: list[KeyVerdict]) -> dict[str, int]:
    """How many keys have each verdict, the plain ones first."""
    found = Counter(row.verdict for row in rows)
    return {kind: found[kind] for kind in ("used", *_OF_NOTE.values(), "refused") if found[kind]}


def _reasons(examined: Examined[Config]) -> dict[Path, list[tuple[Verdict, str]]]:
    """Path as written -> what the checks said of it; a refusal goes before everything else."""
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


def _plain(path: Path, examined: Examined[Config]) -> tuple[Verdict, str]:
    """A key that nothing was said of."""
    now = next((new for new, old in examined.document.origins.items() if old == path), path)
    how = differs_at(Config, examined.document.tree, now)
    if how is not None:
        return "used differently", how
    return "used", "asks for nothing" if known_at(now) is not None else ""
