"""`deepspeed.runtime.config_utils.DeepSpeedConfigModel`: a pydantic base class with deprecated fields.

Programs derive their own settings from it. The engine's own configuration is in `launcher.config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, field_serializer

from launcher.errors import ArgumentsError
from launcher.integrations.nested import recursive_getattr
from launcher.integrations.processes import logger


class DeepSpeedConfigModel(BaseModel):
    """Settings that are validated by pydantic; unknown keys are errors.

    A field with `json_schema_extra={"deprecated": True, "new_param": NAME, ...}` passes its value on to the
    field NAME and is removed. NAME may be dotted, for a field of a section. Further keys: `new_param_fn`
    converts the old value to the new one, `set_new_param` False only warns, and `deprecated_msg` is appended
    to the warning.

    Args:
        strict: if false, a key with the value "auto" is treated as not given.

    Raises:
        ArgumentsError: a field and its replacement are both given.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = {
            key: value for key, value in data.items() if strict or value != "auto" or key == "replace_method"
        }
        super().__init__(**given)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, Mapping) and extra.get("deprecated") and name in self.model_fields_set:
                self._replace(name, extra)

    def _replace(self, old: str, extra: Mapping[str, Any]) -> None:
        new, more = extra.get("new_param", ""), extra.get("deprecated_msg", "")
        advice = f"; use {new}" if new else ""
        logger.warning(f"{type(self).__name__}: {old} is deprecated{advice}{'. ' * bool(more)}{more}")
        if not new or not extra.get("set_new_param", True):
            return
        section, _, name = new.rpartition(".")
        owner = recursive_getattr(self, section) if section else self
        if name in owner.model_fields_set:
            raise ArgumentsError(
                f"both {old} and its replacement {new} are given",
                where=type(self).__name__,
                fix=f"keep {new}",
            )
        setattr(owner, name, extra.get("new_param_fn", lambda value: value)(getattr(self, old)))
        delattr(self, old)

    @field_serializer("dtype", check_fields=False)
    @staticmethod
    def serialize_torch_dtype(dtype: torch.dtype) -> str:
        """Serialize a dtype as its name."""
        return str(dtype)
