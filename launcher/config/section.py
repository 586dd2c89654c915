"""The base class of the JSON's sections, and the types of their fields.

A section is frozen and strict, and has a docstring per field; `"auto"` is kept until it is resolved.
DeepSpeed's own validation accepts `"true"`, 1, "2" and "1e-3" as booleans and numbers, and so do these
fields.

To add a key, add one typed field with its docstring to its section, and delete its line in known_keys.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from launcher.config.problems import show

MOST_DIGITS = 400  # of a quoted number; a longer one is not meant as a number

TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0"})
"""Case-insensitive. The words that pydantic accepts, with which DeepSpeed checks most sections."""


def readings(value: Any) -> Iterator[Any]:
    """Yield other interpretations of `value`, numbers first. A field takes the first one that is valid."""
    if isinstance(value, list | tuple):
        numbers = [_number(item) for item in value]
        if any(number is not None for number in numbers):
            yield [item if number is None else number for item, number in zip(value, numbers, strict=True)]
        return
    number = _number(value)
    if number is not None:
        yield number
    switch = as_switch(value)
    if switch is not None and not isinstance(value, bool):
        yield switch


def as_switch(value: Any) -> bool | None:
    """Return a value as a boolean, also if it is 0, 1 or a word such as "yes"; None if it is not one."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else None
    word = value.strip().lower() if isinstance(value, str) else ""
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def _number(value: Any) -> int | float | None:
    """Return the finite number in a string; None for anything else."""
    if not isinstance(value, str) or len(value) > MOST_DIGITS:
        return None
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None


def complaint(what: str, fix: str) -> PydanticCustomError:
    """Return the error for a validator to raise: `what` without the key's name, and what to write instead."""
    return PydanticCustomError("complaint", "{what}", {"what": what, "fix": fix})


def whole(value: Any) -> Any:
    """Convert a whole float such as 5e8 to an int; leave anything else for the type check to reject."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def lower(value: Any) -> Any:
    """Convert a string to lower case; leave anything else for the type check to reject."""
    return value.lower() if isinstance(value, str) else value


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise complaint(f"must be a list of two numbers, not {show(value)}", "write [first, second]")
    return tuple(value)


def wholes(least: int, what: str, example: list[int]) -> Callable[[Any], Any]:
    """Return a validator for a list of integers that are at least `least`."""

    def checked(value: Any) -> Any:
        items = [whole(item) for item in value] if isinstance(value, list | tuple) else []
        right = (isinstance(item, int) and not isinstance(item, bool) and item >= least for item in items)
        if not items or not all(right):
            raise complaint(f"must be a list of {what}, not {show(value)}", f"write for example {example}")
        return tuple(items)

    return checked


LARGEST = 2**63 - 1

WholeNumber = Annotated[int, BeforeValidator(whole), Field(ge=0, le=LARGEST)]
"""An integer of at least 0; 5e8 is accepted."""

Count = Annotated[int, BeforeValidator(whole), Field(ge=1, le=LARGEST)]
"""An integer of at least 1; 5e8 is accepted."""

Pair = Annotated[tuple[float, float], BeforeValidator(_pair)]
"""Two numbers, written as a list."""

WholeNumbers = Annotated[tuple[int, ...], BeforeValidator(wholes(1, "positive whole numbers", [64, 128]))]
"""Integers of at least 1, written as a list."""


def null_is_true(value: Any) -> Any:
    """Convert null to true."""
    return True if value is None else value


# torch's own names, which DeepSpeed accepts too
_SHORT = {
    **dict.fromkeys(("torch.float32", "float32", "float"), "fp32"),
    **dict.fromkeys(("torch.float16", "float16", "half"), "fp16"),
    **dict.fromkeys(("torch.bfloat16", "bfloat16"), "bf16"),
}


def short_name(value: Any) -> Any:
    """Convert "torch.bfloat16", or the dtype itself, to "bf16"; leave anything else for the type check."""
    value = str(value) if type(value).__name__ == "dtype" else value  # this package does not import torch
    return _SHORT.get(value, value) if isinstance(value, str) else value


Dtype: TypeAlias = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(short_name)]
"""A dtype by its short name; torch's names are accepted too."""


def _names(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise complaint(f"must be a list of names, not {show(value)}", 'write ["first", "second"]')
    return tuple(value)


Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_names)]
"""A list of names."""


def _rates(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | float) or not 0 <= item < float("inf"):
            what = (
                f"must be a number of at least 0, or a list with one for each param group, not {show(value)}"
            )
            raise complaint(what, "write a number, or a list such as [1e-4, 1e-5]")
    if not items:
        raise complaint("is an empty list", "write a number, or one for each param group")
    return tuple(map(float, items)) if isinstance(value, list | tuple) else float(value)


Rate = Annotated[float, Field(ge=0)]
"""A learning rate."""

Rates = Annotated[float | tuple[float, ...], BeforeValidator(_rates)]
"""A learning rate (or momentum) of all param groups, or a list with one for each."""


AUTO = "auto"
NO_NUMBER = ("int_type", "float_type")  # pydantic error types


class _Building:
    """A flag that is set while the schema of a section is being built."""

    now = False


class Section(BaseModel):
    """One object of the JSON.

    Attribute names are the JSON keys. An attribute may be the string "auto" until `Config.resolve`. Lists
    become tuples, and whole floats such as 5e8 become ints where an integer is expected. Numbers and booleans
    may be quoted, and 1 and 0 are accepted for true and false.
    """

    # defer_build: only the sections of a file are built, so that checking it does not wait for all others.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other accepted names of a key -> its canonical name."""

    acts_without_switch: ClassVar[frozenset[str]] = frozenset()
    """Keys of a section with `enabled` that take effect even if it is false."""

    auto_needs_value: ClassVar[frozenset[str]] = frozenset()
    """Keys whose default is not a safe value for "auto": the run has to provide one."""

    differs: ClassVar[Mapping[str, str]] = {}
    """Keys that behave differently from DeepSpeed -> how. Used by `launch check` and docs/config.md."""

    differs_where: ClassVar[Mapping[str, Callable[[Any, Mapping[str, Any]], bool]]] = {}
    """Keys of `differs` -> whether the difference applies, given the value and the whole file. It always
    applies for keys that are not listed."""

    without_effect: ClassVar[Mapping[str, str]] = {}
    """Keys that are accepted and ignored, because they only tune DeepSpeed's own code -> why. A value other
    than the default triggers a warning. A key that would change numerics if ignored is never listed."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Skip the schema of a nested section: it is an instance that has been checked separately
        (`check.py`)."""
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
        """Return the value if it is valid or "auto", else the first of its `readings` that is valid."""
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
        """Return the field name of a JSON key, resolving aliases."""
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
        """Return the class of the items of `key`; None if it is not a list of sections."""
        return _inner_sections(cls)[1].get(key)

    @classmethod
    def step_of(cls, key: str) -> str:
        """Return `key` as it appears in the paths of its members: `layer_specs[]` for a list of sections."""
        return f"{key}[]" if cls.items_of(key) else key

    @classmethod
    def defaults_of(cls, key: str, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the defaults of the member section `key` that depend on this section (an optimizer's type)."""
        return {}

    @classmethod
    def is_unused(cls, key: str, values: Mapping[str, Any], tree: Mapping[str, Any]) -> bool:
        """Return whether `key` is not read because of other keys; its bounds are not enforced then.

        Args:
            values: The section's values, as written.
            tree: The whole configuration.
        """
        return False

    def idle_keys(self) -> Iterator[str]:
        """Yield the keys of `without_effect` that were set to a value other than their default."""
        for key in self.without_effect:
            default = type(self).model_fields[key].get_default()
            if key in self.model_fields_set and getattr(self, key) not in (default, AUTO):
                yield key

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict of all keys, including those that are not set."""
        return {
            name: _as_json(getattr(self, name), lambda s: s.to_dict()) for name in type(self).model_fields
        }

    def given(self) -> dict[str, Any]:
        """Return a plain dict of the keys that were set."""
        written = [name for name in type(self).model_fields if name in self.model_fields_set]
        return {name: _as_json(getattr(self, name), lambda s: s.given()) for name in written}


def _nearer(refusal: ValidationError, other: ValidationError) -> ValidationError:
    """Return the more specific error: a number out of bounds rather than a string that is not a number."""
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
    """Return `zero_optimization.stage` of a whole file as written; 0 if it is not set."""
    zero = tree.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return next((other for other in readings(stage)), stage) if isinstance(stage, str) else stage
