"""Run every third-party program on ours and on DeepSpeed, compare losses, and write the table of docs/transformers.md.

python -m tests.clients                        all except those from public repositories
python -m tests.clients --examples DIR         those as well, from checkouts in DIR
python -m tests.clients --only "GRPO"          some programs; the others keep their verdicts
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.clients.client import OURS, THEIRS, Client, Outcome
from tests.clients.judging import judge
from tests.clients.page import Verdict, read, version_of, write
from tests.clients.running import HERE, run
from tests.clients.table import CLIENTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", type=Path, help="directory with checkouts of public repositories")
    parser.add_argument("--only", action="append", help="clients whose name has this in it")
    parser.add_argument("--work", type=Path, default=Path("runs/clients"), help="what the runs write")
    parser.add_argument("--ours", action="store_true", help="without DeepSpeed; nothing is written")
    args = parser.parse_args()
    work = args.work.resolve()
    examples = args.examples and args.examples.resolve()
    make_models(work / "models")
    worst = 0
    for client in CLIENTS:
        if args.only and not any(part.lower() in client.key.lower() for part in args.only):
            continue
        if not client.own and examples is None:
            continue
        ours = run(client, OURS, work, examples)
        theirs = Outcome("not asked") if args.ours else run(client, THEIRS, work, examples)
        verdict = verdict_of(client, ours, theirs, examples)
        print(f"{client.key}: {verdict.text}", flush=True)
        worst |= not verdict.good
        if not args.ours:
            write(read() | {client.key: verdict})
    return worst


def make_models(directory: Path) -> None:
    if not directory.exists():
        paths = {"PYTHONPATH": str(HERE / "stand_ins"), "CLIENT_STAND_INS": ""}
        subprocess.run(
            [sys.executable, str(HERE / "programs" / "models.py"), str(directory)], check=True, env=paths
        )


def verdict_of(client: Client, ours: Outcome, theirs: Outcome, examples: Path | None) -> Verdict:
    stages = "" if client.stage is None else str(client.stage)
    return Verdict(
        client.name, version_of(client, examples), stages, client.setting, *judge(client, ours, theirs)
    )


if __name__ == "__main__":
    sys.exit(main())
