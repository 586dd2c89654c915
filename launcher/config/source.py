"""Reads a configuration from a path, JSON text, the same in base64, accelerate's YAML, or a mapping."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.config.document import Document
from launcher.config.reader import read_file, read_text
from launcher.errors import ConfigError

LONGEST_NAME = 255  # of a file; a longer string is not a path


def read(source: str | Path | Mapping[str, Any], where: str | None = None) -> Document:
    """Read a document as written; see `load`."""
    if is_yaml(source):
        from launcher.config.accelerate_yaml import read_yaml

        return read_yaml(str(source))
    if isinstance(source, Mapping):
        return Document(where or "config", _plain_dict(source))
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith(("{", "//", "/*", "#")):
        return read_text(source, where or "config")
    if isinstance(source, str) and not Path(source[:LONGEST_NAME]).exists():
        text = _decoded(source)
        if text is not None:
            return read_text(text, where or "the base64 config")
    if isinstance(source, str | Path):
        return read_file(Path(source), where)
    raise ConfigError(
        f"a config must be a path or a dict, not a {type(source).__name__}",
        fix="give the path of the JSON file",
    )


def file_of(tree: Mapping[str, Any]) -> Document | None:
    """Return the file on the command line that a dict was read from, so that errors can point to its lines.

    Scripts read the file of `--deepspeed` themselves, and pass on a dict with keys filled in and added.
    """
    for token in sys.argv[1:]:
        path = Path(token.rpartition("=")[2][:LONGEST_NAME])
        if path.suffix in (".json", ".hjson") and path.is_file():
            with suppress(ConfigError):
                file = read_file(path)
                if file.tree and _comes_from(tree, file.tree):
                    return file
    return None


def _comes_from(value: Any, written: Any) -> bool:
    """Return whether a value equals the written one, apart from replaced "auto" values and added keys."""
    if isinstance(written, dict) and isinstance(value, Mapping):
        return all(key in value and _comes_from(value[key], item) for key, item in written.items())
    return bool(written == value) or written == "auto"


def is_yaml(source: object) -> bool:
    """Return whether a source is the path of an accelerate configuration rather than a JSON."""
    return isinstance(source, str | Path) and str(source).endswith((".yaml", ".yml"))


def in_base64(tree: Mapping[str, Any]) -> str:
    """Encode a configuration as text that `load` and accelerate accept, so that no file is needed."""
    return base64.urlsafe_b64encode(json.dumps(tree).encode()).decode()


def _decoded(source: str) -> str | None:
    """Decode base64-encoded JSON, which DeepSpeed's launcher accepts instead of a path; else return None."""
    try:
        text = base64.b64decode(
            source.strip(), altchars=b"-_" if {"-", "_"} & set(source) else None, validate=True
        )
        decoded = text.decode("utf-8")
    except ValueError:
        return None
    return decoded if decoded.lstrip("\ufeff \t\r\n").startswith("{") else None


def _plain_dict(source: Mapping[Any, Any]) -> dict[str, Any]:
    """Copy into plain dicts and lists, so that later changes to the caller's dict have no effect."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _plain_dict(value)
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    for key in source:
        if not isinstance(key, str):
            raise ConfigError(f"the key {key!r} is not a string", fix="use the names of the JSON's keys")
    return {key: plain(value) for key, value in source.items()}
