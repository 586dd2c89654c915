"""Run one client on one engine: start its CPU ranks, and collect their losses."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.clients import suites
from tests.clients.client import OURS, Client, Outcome, json_of
from tests.parity_deepspeed import operators
from tests.parity_deepspeed.conftest import _free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 200.0


def run(client: Client, engine: str, work: Path, examples: Path | None) -> Outcome:
    """Run a client to its end in its own directory below `work`, which also contains its log."""
    directory = work / re.sub(r"\W+", "-", client.key) / engine
    out = directory / "out"
    shutil.rmtree(directory, ignore_errors=True)
    out.mkdir(parents=True)
    config = directory / "ds_config.json"
    config.write_text(json.dumps(json_of(client, engine), indent=2))
    places = {
        "out": out, "json": config, "models": work / "models", "programs": HERE / "programs",
        "examples": examples or "", "cwd": directory / "cwd", "older": Path(sys.prefix, "older"),
    }  # fmt: skip
    arguments = [argument.format(**places) for argument in client.arguments]
    program = client.program
    if not client.module:
        own = HERE / "programs" / client.program
        program = str(own if own.exists() else Path(examples or "") / client.program)
    if client.tests:
        cwd = _copied(Path(examples or "") / client.version_of, directory)
    elif examples and Path(program).is_relative_to(examples):
        cwd = _copied(Path(program).parent, directory)
    else:
        cwd = directory
    environment = _environment(client, engine, places)
    command = suites.command(client, engine) if client.tests else [*_starter(client, engine), program]
    code = _code([*command, *arguments], cwd, environment, directory / "log", client.limit_s)
    if code is None:
        return Outcome(f"has not ended in {client.limit_s:g} s")
    if client.tests:
        return Outcome(tests=suites.outcomes(cwd)) if suites.reported(cwd) else Outcome("no test was run")
    found = _found(directory, engine)
    if code:
        return replace(found, error=_last_words((directory / "log").read_text(errors="replace")))
    return found


def _code(
    command: list[str], cwd: Path, environment: dict[str, str], log: Path, limit_s: float
) -> int | None:
    """Return the exit status of a command, or None on a timeout."""
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # ends its ranks; SIGKILL would orphan them
            process.wait(LIMIT_S)
            return None


def _copied(source: Path, directory: Path) -> Path:
    """Return a copy of a third-party checkout to run in, so that output files do not end up in their repository."""
    shutil.copytree(source, directory / "cwd", symlinks=True, ignore=shutil.ignore_patterns(".git"))
    return directory / "cwd"


def _starter(client: Client, engine: str) -> list[str]:
    """Return the command that starts the ranks: `launch`, DeepSpeed's launcher if it must pass `--local_rank`, or
    torchrun.
    """
    if engine == OURS:
        start = ["-m", "launcher.cli.main", "--num_gpus", str(client.ranks), "--device", "cpu"]
        if not client.local_rank:
            start.append("--no_local_rank")
        return [sys.executable, *start, *(["--module"] if client.module else [])]
    port = str(_free_port())
    if client.local_rank:
        slots = json.dumps({"localhost": list(range(client.ranks))}).encode()
        info = base64.urlsafe_b64encode(slots).decode()
        start = ["-m", "deepspeed.launcher.launch", "--world_info", info, "--master_port", port]
        return [sys.executable, *start, *(["--module"] if client.module else [])]
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(client.ranks), "--master-port", port]
    return [sys.executable, *start, *(["-m"] if client.module else [])]


def _environment(client: Client, engine: str, places: dict[str, Any]) -> dict[str, str]:
    """Return the environment: both engines find the same packages, models and stand-ins."""
    own = [*([str(ROOT)] if engine == OURS else []), str(HERE / "stand_ins")]
    theirs = [path.format(**places) for path in client.paths]
    directory = places["out"].parent
    losses = {} if client.tests else {"CLIENT_LOSSES": str(directory / "losses")}
    return {
        **os.environ, **operators.environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(own + theirs),
        "CLIENT_STAND_INS": client.stand_ins, **losses,
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf"), "HF_HUB_CACHE": str(places["models"] / "hub"),
        # Programs that record their commit find no repository around the run's directory.
        "GIT_CEILING_DIRECTORIES": str(directory.resolve()),
        "TOKENIZERS_PARALLELISM": "false", "CLIENT_MODELS": str(places["models"]),
        **{name: value.format(**places) for name, value in client.environment.items()},
    }  # fmt: skip


def _last_words(log: str) -> str:
    """Return the error in a log: that of the first Python exception, else the last line."""
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
