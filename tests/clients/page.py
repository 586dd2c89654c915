"""The client table in docs/transformers.md, and its record."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from tests.clients.client import Client
from tests.clients.table import CLIENTS, NOT_RUN

RECORD = Path(__file__).with_name("verdicts.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- clients: made by `make clients` -->", "<!-- end of clients -->"


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    client: str
    version: str
    stage: str
    setting: str
    text: str
    good: bool = True

    @property
    def line(self) -> str:
        cells = (self.client, self.version, self.stage, self.setting, self.text.replace("|", "/"))
        return f"| {' | '.join(cells)} |"


def version_of(client: Client, examples: Path | None) -> str:
    """Return the version of a package, or the date and commit of a checkout."""
    if client.own or not (examples and (examples / client.version_of / ".git").exists()):
        return metadata.version(client.version_of)
    command = ["git", "-C", str(examples / client.version_of), "log", "-1", "--abbrev=8", "--format=%cs, %h"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def read() -> dict[str, Verdict]:
    if not RECORD.exists():
        return {}
    return {key: Verdict(**value) for key, value in json.loads(RECORD.read_text()).items()}


def write(verdicts: dict[str, Verdict]) -> None:
    """Write the record, and the table between the markers of the page, in the order of the clients."""
    known = {client.key: verdicts[client.key] for client in CLIENTS if client.key in verdicts}
    RECORD.write_text(json.dumps({key: asdict(verdict) for key, verdict in known.items()}, indent=1) + "\n")
    lines = ["| client | version | stage | with | |", "|---|---|---|---|---|"]
    lines += [verdict.line for verdict in known.values()]
    lines += [f"| {name} | | | | not run: {why} |" for name, why in NOT_RUN.items()]
    table = "\n".join([BEGIN, "", *lines, "", END])
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.DOTALL))
