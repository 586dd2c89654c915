"""The README for package indexes: its relative links and pictures lead to the repository, or are plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")


def for_an_index(text: str, repository: str | None) -> str:
    """`text` without relative links, which lead nowhere on a package index.

    Args:
        repository: the URL of its files, such as https://example.org/project/blob/main; None where there is none:
            a link is then its text, with the path where the text is not the path.
    """

    def replaced(match: re.Match[str]) -> str:
        mark, shown, target = match.groups()
        if repository:
            return f"{mark}[{shown}]({repository.rstrip('/')}/{target})"
        path = target.partition("#")[0]
        return "" if mark else shown if shown == path else f"{shown} (`{path}`)"

    return LINK.sub(replaced, text)


class ReadmeHook(MetadataHookInterface):
    """Sets the field `readme`; `[project.urls] Files` is where relative links lead."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        urls = metadata.get("urls", {})
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(text, urls.get("Files"))}
