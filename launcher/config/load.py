"""`load`: a path, JSON text or a dict -> Config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config.check import checked
from launcher.config.reader import Document, read_file, read_text
from launcher.config.root import Config
from launcher.errors import ConfigError


def load(source: str | Path | Mapping[str, Any], *, where: str | None = None) -> Config:
    """Reads and checks a configuration.

    Args:
        source: path of a JSON file, the JSON text itself (it starts with `{`), or a mapping.
            `//`, `#` and `/* */` comments and trailing commas are fine.
        where: what to call it in messages instead of the path.

    Raises:
        ConfigError: the file is missing or not JSON. ConfigProblems, a ConfigError, lists every unknown
            key, wrong value and contradiction at once, each with file:line:column and path.
    """
    document = _document(source, where)
    config, notes = checked(Config, document)
    config._document, config._notes = document, notes
    return config


def _document(source: str | Path | Mapping[str, Any], where: str | None) -> Document:
    if isinstance(source, Mapping):
        return Document(where or "config", _plain_dict(source))
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith(("{", "//", "/*", "#")):
        return read_text(source, where or "config")
    if isinstance(source, str | Path):
        return read_file(Path(source), where)
    raise ConfigError(
        f"a config is a path or a dict, not a {type(source).__name__}", fix="give the path of the JSON file"
    )


def _plain_dict(source: Mapping[Any, Any]) -> dict[str, Any]:
    """A deep copy with plain dicts and lists, so that later changes of the caller's dict do not reach us."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _plain_dict(value)
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    for key in source:
        if not isinstance(key, str):
            raise ConfigError(f"the key {key!r} is not text", fix="use the names of the JSON's keys")
    return {key: plain(value) for key, value in source.items()}
