"""`load`: a path, JSON text or a dict -> Config."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.config import accelerate_yaml
from launcher.config.check import Examined, examine
from launcher.config.conversions import convert
from launcher.config.document import Document
from launcher.config.reader import read_file, read_text
from launcher.config.root import Config
from launcher.errors import ConfigError

LONGEST_NAME = 255  # of a file; a longer text is no path


def load(source: str | Path | Mapping[str, Any], *, where: str | None = None) -> Config:
    """Read and check a configuration.

    Args:
        source: path of a JSON file or of accelerate's YAML, the JSON text itself (it starts with `{`) or that text in
            base64, or a mapping. It may be Hjson: comments, no commas or too many, texts without quotes.
        where: what to call it in messages instead of the path.

    Raises:
        ConfigError: the file is missing or not JSON. ConfigProblems, a ConfigError, lists every unknown
            key, wrong value and contradiction at once, each with file:line:column and path.
    """
    return inspect(source, where=where).required()


def inspect(source: str | Path | Mapping[str, Any] | Document, *, where: str | None = None) -> Examined:
    """Return what `load` would say of a configuration, for `launch check`. Raises ConfigError when it is not JSON."""
    written = source if isinstance(source, Document) else read(source, where)
    examined = examine(Config, convert(written))
    if examined.problems and isinstance(source, Mapping) and (file := _file_of(written.tree)) is not None:
        examined = examine(Config, convert(replace(written, name=file.name, places=file.places)))
    if examined.config is not None:
        examined.config._document, examined.config._notes = examined.document, examined.notes
    return examined


def read(source: str | Path | Mapping[str, Any], where: str | None = None) -> Document:
    """Read the document as it was written, see `load`."""
    if accelerate_yaml.is_one(source):
        return accelerate_yaml.read_yaml(str(source))
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
        f"a config is a path or a dict, not a {type(source).__name__}", fix="give the path of the JSON file"
    )


def _file_of(tree: Mapping[str, Any]) -> Document | None:
    """Return the file on the command line that a dict was read from, so that errors can say where a key is written.

    Scripts read the file of `--deepspeed` themselves, and hand on a dict to which they have added keys.
    """
    for token in sys.argv[1:]:
        path = Path(token.rpartition("=")[2][:LONGEST_NAME])
        if path.suffix in (".json", ".hjson") and path.is_file():
            with suppress(ConfigError):
                file = read_file(path)
                if file.tree and file.tree.keys() <= tree.keys():
                    return file
    return None


def in_base64(tree: Mapping[str, Any]) -> str:
    """Return a configuration as a text that `load` reads, and accelerate: nothing of it has to lie in a file."""
    return base64.urlsafe_b64encode(json.dumps(tree).encode()).decode()


def _decoded(source: str) -> str | None:
    """Decode JSON in base64, which DeepSpeed's launcher takes in place of a path; None when it is no such text."""
    try:
        text = base64.b64decode(
            source.strip(), altchars=b"-_" if {"-", "_"} & set(source) else None, validate=True
        )
        decoded = text.decode("utf-8")
    except ValueError:
        return None
    return decoded if decoded.lstrip("\ufeff \t\r\n").startswith("{") else None


def _plain_dict(source: Mapping[Any, Any]) -> dict[str, Any]:
    """Make a deep copy of plain dicts and lists, so that later changes of the caller's dict do not reach us."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _plain_dict(value)
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    for key in source:
        if not isinstance(key, str):
            raise ConfigError(f"the key {key!r} is not text", fix="use the names of the JSON's keys")
    return {key: plain(value) for key, value in source.items()}
