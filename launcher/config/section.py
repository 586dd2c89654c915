"""The base of every section of the JSON: frozen, strict, a docstring per field, `"auto"` until resolved.

To add a key, add one typed field with its docstring to its section, and delete its line in known_keys.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import CoreSchema, core_schema

from launcher.config.values import readings

AUTO = "auto"
NO_NUMBER = ("int_type", "float_type")  # kinds of pydantic's errors


class _Building:
    """A flag that is set while the schema of a section is being made."""

    now = False


class Section(BaseModel):
    """One object of the JSON.

    Attribute names are the JSON keys. An attribute may hold the text "auto" until `Config.resolve`.
    Lists become tuples, and whole floats such as 5e8 become ints where a whole number is asked for. A number or a
    switch may stand in quotes, and 1 and 0 stand for true and false.
    """

    # Only the sections of a file are ever built: an answer about it must not wait for those of all others.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other accepted names of a key -> its name here."""

    auto_needs_value: ClassVar[frozenset[str]] = frozenset()
    """Keys whose default is not a safe answer to "auto": somebody has to give the value."""

    differs: ClassVar[Mapping[str, str]] = {}
    """Keys that do something else here than in DeepSpeed -> how. For `launch check` and docs/config.md."""

    differs_where: ClassVar[Mapping[str, Callable[[Any, Mapping[str, Any]], bool]]] = {}
    """Keys of `differs` -> whether it shows, by the value and the whole file. Always for a key that is left out."""

    without_effect: ClassVar[Mapping[str, str]] = {}
    """Keys that are taken and do nothing, because they only tune DeepSpeed's own code -> why. A value other than the
    default is answered with a warning. A key whose absence would change numbers is never one of these."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make no schema inside another section: there this one is an instance, checked by itself (`check.py`)."""
        if _Building.now:
            return core_schema.is_instance_schema(cls)
        _Building.now = True
        try:
            return handler(source)
        finally:
            _Building.now = False

    @field_validator("*", mode="wrap")
    @classmethod
    def _as_meant(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Return the value if it fits the field, "auto", or what else it may mean that fits (`readings`)."""
        if isinstance(value, str) and value == AUTO:
            return value
        try:
            return handler(value)
        except ValidationError as error:
            refusal = error
        for other in readings(value):
            try:
                return handler(other)
            except ValidationError as error:
                refusal = _nearer(refusal, error)
        raise refusal

    @classmethod
    def spelling(cls, key: str) -> str:
        """Return the field that a JSON key names, through the aliases."""
        return cls.aliases.get(key, key)

    @classmethod
    def section_of(cls, key: str, tree: Mapping[str, Any]) -> type[Section] | None:
        """Return the class of the member section `key`, None for a plain value; `tree` is this section."""
        return cls.member_sections().get(key)

    @classmethod
    def member_sections(cls) -> Mapping[str, type[Section]]:
        """Return the fields that are sections themselves, with the class they are annotated with."""
        return _inner_sections(cls)[0]

    @classmethod
    def sections_of(cls, key: str) -> tuple[type[Section], ...]:
        """Return every class that the section `key`, or an item of the list `key`, may have; () for a plain value."""
        found = cls.member_sections().get(key) or cls.items_of(key)
        return (found,) if found else ()

    @classmethod
    def items_of(cls, key: str) -> type[Section] | None:
        """Return the class of the items of `key`, None where it is no list of sections."""
        return _inner_sections(cls)[1].get(key)

    @classmethod
    def step_of(cls, key: str) -> str:
        """Return `key` as it stands in the paths of its members: `layer_specs[]` for a list of sections."""
        return f"{key}[]" if cls.items_of(key) else key

    @classmethod
    def defaults_of(cls, key: str, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the defaults of the member section `key` that depend on this section (an optimizer's type)."""
        return {}

    def idle_keys(self) -> Iterator[str]:
        """Find keys of `without_effect` that were written with another value than their default."""
        for key in self.without_effect:
            default = type(self).model_fields[key].get_default()
            if key in self.model_fields_set and getattr(self, key) not in (default, AUTO):
                yield key

    def to_dict(self) -> dict[str, Any]:
        """Return a plain JSON-able dict of all keys, those left out included."""
        return {
            name: _as_json(getattr(self, name), lambda s: s.to_dict()) for name in type(self).model_fields
        }

    def given(self) -> dict[str, Any]:
        """Return a plain dict of the keys that were written."""
        written = [name for name in type(self).model_fields if name in self.model_fields_set]
        return {name: _as_json(getattr(self, name), lambda s: s.given()) for name in written}


def _nearer(refusal: ValidationError, other: ValidationError) -> ValidationError:
    """Return the refusal that says more: a number of the wrong size, rather than a text that is no number."""
    kinds = [error.errors(include_url=False)[0]["type"] for error in (refusal, other)]
    return other if kinds[0] in NO_NUMBER and kinds[1] not in (*NO_NUMBER, "bool_type") else refusal


def _as_json(value: Any, of_section: Callable[[Section], dict[str, Any]]) -> Any:
    if isinstance(value, Section):
        return of_section(value)
    return [_as_json(item, of_section) for item in value] if isinstance(value, tuple | list) else value


@cache
def _inner_sections(cls: type[Section]) -> tuple[dict[str, type[Section]], dict[str, type[Section]]]:
    """Return the fields that are sections, and those that are lists of sections, with their classes."""
    members: dict[str, type[Section]] = {}
    items: dict[str, type[Section]] = {}
    for name, info in cls.model_fields.items():
        inside, is_list = get_args(info.annotation), get_origin(info.annotation) is tuple
        for kind in inside[:1] if is_list else (info.annotation, *inside):
            if isinstance(kind, type) and issubclass(kind, Section):
                (items if is_list else members)[name] = kind
    return members, items


def stage_in(tree: Mapping[str, Any]) -> Any:
    """Return `zero_optimization.stage` of a whole file as it is written; 0 where it is not."""
    zero = tree.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return next((other for other in readings(stage)), stage) if isinstance(stage, str) else stage
