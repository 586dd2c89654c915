"""Validates a document into sections; finds unknown keys, wrong values and contradictions in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from launcher.config.conflicts import contradictions
from launcher.config.document import Document
from launcher.config.known_keys import Known, known_keys
from launcher.config.problems import (
    MOST,
    ConfigProblems,
    Note,
    Path,
    Problem,
    dotted,
    in_words,
    is_comment,
    nearest,
    show,
)
from launcher.config.rules import remarks
from launcher.config.schema import not_written, stranger, unknown_key
from launcher.config.section import AUTO, Section, as_switch, readings

if TYPE_CHECKING:
    from launcher.config.root import Config

S = TypeVar("S", bound=Section)
BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
"""Pydantic error types for a number of the right type that is out of bounds."""
MOST_STRANGERS = 100  # top-level keys that are matched against known ones; each takes milliseconds


class Checker:
    """Builds the sections of one document, inner ones first, and collects their problems."""

    def __init__(self, root: type[Section], document: Document) -> None:
        self.root, self.document = root, document
        self.problems = list(document.problems)
        self.notes: list[Note] = []
        self.strangers = 0
        self.off = False  # inside a section whose `enabled` is false, which requests nothing

    def build(self, cls: type[S], known: Known | None, written: dict[str, Any], path: Path) -> S:
        """Build the section at `path`; wrong keys are reported and left out."""
        around, self.off = self.off, self.off or _is_off(cls, written)
        values = self.own_keys(cls, known, written, path)
        for key in cls.model_fields:
            self.build_member(cls, key, known, values, path)
        self.off = around
        section = self.validate(cls, values, path)
        for key in section.idle_keys():
            what = f"has no effect here: {section.without_effect[key]}"
            self.notes.append(Note((*path, key), "no effect", what))
        return section

    def own_keys(
        self, cls: type[Section], known: Known | None, written: dict[str, Any], path: Path
    ) -> dict[str, Any]:
        """Return the members that are fields of `cls`, under their canonical names; report the others."""
        values: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for key, value in written.items():
            here, name = (*path, key), cls.spelling(key)
            if is_comment(key, value) and name not in cls.model_fields:
                self.notes.append(Note(here, "comment", "is treated as a comment"))
                continue
            child = known.child(key) if known else None
            if name in values:
                both = f"`{key}` and `{spelled[name]}` are two names of the same key"
                self.problems.append(Problem(here, both, f"keep `{name}`"))
            elif name in cls.model_fields:
                values[name], spelled[name] = value, key
            elif (
                known and child is not None and (key in known.children or not nearest(key, cls.model_fields))
            ):
                self.problems += self.unimplemented(child, value, here)
            elif not path:
                self.stranger(key, value, written)
            else:
                self.problems.append(self.unknown(cls, known, here))
        return values

    def stranger(self, key: str, value: Any, beside: Mapping[str, Any]) -> None:
        """Report an unknown top-level key as a problem or as a note."""
        self.strangers += 1
        if self.strangers > MOST_STRANGERS:
            self.problems.append(Problem((key,), "unknown key"))
            return
        told = stranger(self.root, key, value, beside)
        if isinstance(told, Problem):
            self.problems.append(told)
        else:
            self.notes.append(told)

    def unknown(self, cls: type[Section] | None, known: Known | None, path: Path) -> Problem:
        """Return the problem of an unknown key. Similar names are suggested for the first `MOST` keys only:
        the search takes milliseconds."""
        self.strangers += 1
        if self.strangers > MOST:
            return Problem(path, "unknown key")
        return unknown_key(self.root, cls, known, path)

    def build_member(
        self, cls: type[Section], key: str, known: Known | None, values: dict[str, Any], path: Path
    ) -> None:
        """Replace the object at `key` with its section, or a list of objects with their sections."""
        item = cls.items_of(key)
        if item is not None:
            self.build_items(item, key, known, values, (*path, key))
            return
        member = cls.section_of(key, values)
        if member is None:
            if key in cls.member_sections():  # its `type` is wrong and has been reported
                values.pop(key, None)
            return
        defaults = cls.defaults_of(key, values)
        written = values.get(key)
        if written is None or written is False:  # null and false request nothing
            values.pop(key, None)
            if not (defaults or cls.model_fields[key].is_required()):
                return
            written = {}
        here = (*path, key)
        if not isinstance(written, dict):
            stage = written if written in (0, 1, 2, 3) and written is not True else 1
            example = f'{{"stage": {stage}}}' if key == "zero_optimization" else "{...}"
            self.problems.append(
                Problem(here, f"must be an object, not {show(written)}", f'write "{key}": {example}')
            )
            values.pop(key)
            return
        # An explicit null gets the default too.
        filled = {name: value for name, value in defaults.items() if written.get(name) is None}
        values[key] = self.build(member, known.child(key) if known else None, {**written, **filled}, here)

    def build_items(
        self, item: type[Section], key: str, known: Known | None, values: dict[str, Any], path: Path
    ) -> None:
        """Replace the list at `path` with sections; anything but a list is reported and removed."""
        written = values.get(key)
        if written is None:
            values.pop(key, None)
            return
        if not isinstance(written, list | tuple) or not all(isinstance(member, dict) for member in written):
            what = f"must be a list of objects, not {show(written)}"
            self.problems.append(Problem(path, what, f'write "{key}": [{{...}}]'))
            del values[key]
            return
        inner = known.child(key) if known else None
        values[key] = tuple(self.build(item, inner, member, (*path, i)) for i, member in enumerate(written))

    def validate(self, cls: type[S], values: dict[str, Any], path: Path) -> S:
        """Build the section. A wrong value is reported and gets its default, or "auto" if it is required."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            right, unread = dict(values), {}
            for detail in error.errors(include_url=False):
                key = str(detail["loc"][0])
                right.pop(key, None)
                if cls.model_fields[key].is_required():
                    right[key] = AUTO  # the value is unknown
                here = (*path, *detail["loc"])
                told = any(problem.path == here for problem in self.problems)
                if told or (detail["type"] == "missing" and self.excused(here)):
                    continue
                what, fix = in_words(detail)
                if detail["type"] in BOUNDS and cls.is_unused(key, values, self.document.tree):
                    self.notes.append(Note(here, "no effect", f"{what}, but the key is not used here"))
                    unread[key] = values[key]
                else:
                    self.problems.append(Problem(here, what, fix))
        try:
            return cls.model_validate(right).model_copy(update=unread)
        except ValidationError:  # a type is unknown, and so is what depends on it
            return cls.model_construct(**right)

    def excused(self, path: Path) -> bool:
        """Return whether a problem already covers a missing key: it was misspelt, or is invalid inside."""
        name = dotted(path)
        return any(
            problem.suggestion == name or dotted(problem.path).startswith(name) for problem in self.problems
        )

    def unimplemented(self, known: Known, value: Any, path: Path) -> list[Problem]:
        """Return the problems of a key that only DeepSpeed has: its typos, and what it requests."""
        if known.status == "idle":
            if not self.off:
                self.notes.append(Note(path, "no effect", f"has no effect here: {known.words}"))
            return []
        typos = self.typos(known, value, path)
        return typos if self.off else typos + list(self.demands(known, value, path))

    def typos(self, known: Known, value: Any, path: Path) -> list[Problem]:
        if known.free or not isinstance(value, dict):
            return []
        found = []
        for key, member in value.items():
            here = (*path, key)
            if is_comment(key, member):
                continue
            child = known.child(key)
            if child is None:
                found.append(self.unknown(None, known, here))
            else:
                found += self.typos(child, member, here)
        return found

    def demands(self, known: Known, value: Any, path: Path) -> list[Problem]:
        """Return a problem for each thing that a value requests and that is not implemented."""
        if value is None or (value is False and known.children):
            return []
        if not isinstance(value, dict):
            return [] if _is_neutral(known, value) else [not_written(known, value, path)]
        switch = known.switch or ("enabled" if known.free and "enabled" in value else None)
        if switch:
            return self.switched(known, switch, value, path)
        if known.free:
            return [not_written(known, value, path)] if value else []
        found = []
        for key, member in value.items():
            child = known.child(key)
            found += self.demands(child, member, (*path, key)) if child else []
        return [not_written(known, value, path)] if found and known.words else found

    def switched(self, known: Known, switch: str, value: Mapping[str, Any], path: Path) -> list[Problem]:
        """Return the problems of a section with a switch; none unless it is on."""
        child = known.children.get(switch, known)
        default = child.neutral[0] if child.neutral and child is not known else True
        state = value.get(switch, default)
        if state == AUTO:
            self.notes.append(
                Note(
                    (*path, switch),
                    "differs",
                    '"auto" is treated as off: this feature is not implemented here',
                )
            )
            return []
        if as_switch(state) is False or state is None or _is_neutral(child, state):
            return []
        if switch == "enabled" and as_switch(state) is None:
            return [Problem((*path, switch), f"must be true or false, not {show(state)}", None)]
        return [not_written(child, state, (*path, switch))]


def _is_neutral(known: Known, value: Any) -> bool:
    return any(
        meant == plain and isinstance(meant, bool) == isinstance(plain, bool)
        for meant in (value, *readings(value))
        for plain in known.neutral
    )


def _is_off(cls: type[Section], written: Mapping[str, Any]) -> bool:
    """Return whether the section has a switch that is off, explicitly or by default."""
    switch = cls.model_fields.get("enabled")
    state = written.get("enabled")
    if cls.acts_without_switch & {cls.spelling(key) for key, value in written.items() if value}:
        return False
    return switch is not None and as_switch(switch.get_default() if state is None else state) is False


@dataclass(frozen=True)
class Examined:
    """The results of checking a document.

    Attributes:
        config: None if there are problems.
        problems: in the order of the file.
        notes: keys that were converted, differ from DeepSpeed or have no effect.
    """

    document: Document
    config: Config | None
    problems: tuple[Problem, ...]
    notes: tuple[Note, ...]

    def required(self) -> Config:
        """Return the configuration. Raises ConfigProblems, which lists every problem, if there are any."""
        if self.config is None:
            raise ConfigProblems(self.document.name, self.problems, self.document.described)
        return self.config


def examine(root: type[Config], document: Document) -> Examined:
    """Build the whole configuration and collect all of its problems and notes."""
    checker = Checker(root, document)
    config = checker.build(root, known_keys(), document.tree, ())
    found = [*checker.problems, *contradictions(config, checker.problems, document.holds)]
    problems = sorted(found, key=lambda problem: document.place(problem.path))
    notes = (*document.conversions, *checker.notes, *remarks(config))
    return Examined(document, None if problems else config, tuple(problems), notes)
