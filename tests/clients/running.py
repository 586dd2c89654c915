"""One client on one engine: two ranks on a CPU, and the losses of both."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.table import Client, json_of
from tests.parity_deepspeed import operators
from tests.parity_deepspeed.conftest import _free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANKS, LIMIT_S = 2, 200.0
OURS, THEIRS = "ours", "deepspeed"


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        error: the last words of a run that failed; empty where it ended well.
        losses: by rank, of every backward.
    """

    error: str = ""
    losses: list[list[float]] = field(default_factory=list)


def run(client: Client, engine: str, work: Path, examples: Path | None) -> Outcome:
    """Run a client to its end, in a directory of its own below `work`, where its log is, too."""
    directory = work / re.sub(r"\W+", "-", client.key) / engine
    out = directory / "out"
    shutil.rmtree(directory, ignore_errors=True)
    out.mkdir(parents=True)
    config = directory / "ds_config.json"
    config.write_text(json.dumps(json_of(client), indent=2))
    places = {
        "out": out, "json": config, "models": work / "models", "programs": HERE / "programs",
        "examples": examples or "",
    }  # fmt: skip
    arguments = [argument.format(**places) for argument in client.arguments]
    program = client.program
    if not client.module:
        own = HERE / "programs" / client.program
        program = str(own if own.exists() else Path(examples or "") / client.program)
    cwd = Path(program).parent if examples and Path(program).is_relative_to(examples) else directory
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [*_starter(client, engine), program, *arguments],
            cwd=_copied(cwd, directory) if cwd != directory else cwd,
            env=_environment(client, engine, directory, work),
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # so that it ends its ranks; killed, it would leave them behind
            process.wait(LIMIT_S)
            return Outcome(f"has not ended in {LIMIT_S:g} s")
    if code:
        return Outcome(_last_words((directory / "log").read_text(errors="replace")))
    return _found(directory, engine)


def _copied(source: Path, directory: Path) -> Path:
    """Where a program of others runs: what it writes beside itself is not to land in their repository."""
    shutil.copytree(source, directory / "cwd", symlinks=True, ignore=shutil.ignore_patterns(".git"))
    return directory / "cwd"


def _starter(client: Client, engine: str) -> list[str]:
    if engine == OURS:
        start = ["-m", "launcher.cli.main", "--num_gpus", str(RANKS), "--device", "cpu"]
        if not client.local_rank:
            start.append("--no_local_rank")
        return [sys.executable, *start, *(["--module"] if client.module else [])]
    start = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(RANKS),
        "--master-port",
        str(_free_port()),
    ]
    return [sys.executable, *start, *(["-m"] if client.module else [])]


def _environment(client: Client, engine: str, directory: Path, work: Path) -> dict[str, str]:
    path = [*([str(ROOT)] if engine == OURS else []), str(HERE / "stand_ins")]
    return {
        **os.environ, **operators.environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path),
        "CLIENT_LOSSES": str(directory / "losses"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf"),
        "TOKENIZERS_PARALLELISM": "false", "CLIENT_MODELS": str(work / "models"),
        **client.environment,
    }  # fmt: skip


def _last_words(log: str) -> str:
    """The error of a log: that of the first Python exception, else its last line."""
    told = re.findall(
        r"^(?:\[rank\d+\]: |error: rank \d+ .*failed: )?(\w*[\w.]*(?:Error|Exception): .*)$",
        log,
        re.MULTILINE,
    )
    ours = re.findall(r"^error: (.*)$", log, re.MULTILINE)
    lines = ours or [one for one in told if "ChildFailed" not in one] or log.strip().splitlines()[-1:]
    return (lines[0] if lines else "no output")[:300]


def _found(directory: Path, engine: str) -> Outcome:
    files = sorted(directory.glob("losses*"))
    records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    home = "launcher." if engine == OURS else "deepspeed."
    other = {kind for record in records for kind, _ in record if not kind.startswith(home)}
    if other:
        return Outcome(f"it trained with {', '.join(sorted(other))}")
    if not records or not all(records):
        return Outcome("it ended well, and no engine saw a loss")
    return Outcome(losses=[[loss for _, loss in record] for record in records])
