"""`--submit`: submits the command line as a Slurm job. Writes the batch script and passes it to sbatch."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.cli.flags import value_of, without
from launcher.cli.request import RunRequest
from launcher.cluster import environment
from launcher.cluster.secret import masked, secrets_of
from launcher.errors import ConfigError, printable, shortened

TEMPLATE = """\
#!/bin/sh
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --output={output}
#SBATCH --open-mode=append
#SBATCH --requeue
# USR1 is sent a minute before the time limit. The run saves a checkpoint, and the job requeues itself to resume.
# After TERM, as from scancel, the run saves and the job ends; a preempted job is requeued by Slurm.
#SBATCH --signal=B:USR1@60
cd {cwd} || exit
{command} &
run=$! again=
trap 'again=yes; kill -TERM $run 2>/dev/null' USR1
trap 'kill -TERM $run 2>/dev/null' TERM
trap 'kill -INT $run 2>/dev/null' INT
while kill -0 $run 2>/dev/null; do  # a signal ends the wait, not the run
    wait $run
    code=$?
done
if [ "$again" ] && [ $code = {saved} ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit $code
"""
SAVED = 75
"""The exit code of `launch` upon which the job is requeued: EX_TEMPFAIL of sysexits.h."""


def submit(flags: argparse.Namespace, run: RunRequest, argv: Sequence[str]) -> int:
    """Write `launch.sbatch` into the run's directory and submit it; return the exit code of sbatch.

    With `--dry_run`, only print the script and the command.

    Args:
        flags: the launcher's flags.
        run: the recipe or script.
        argv: the whole command line.

    Raises:
        ConfigError: `--num_nodes` is missing, the script cannot be written, or sbatch cannot be run.
    """
    if flags.num_nodes is None:
        raise ConfigError("--submit requires --num_nodes", fix="add --num_nodes N")
    directory = Path(value_of(run.arguments, "--output-dir") or Path("runs") / run.name).absolute()
    if printable(str(directory)) != str(directory) or "\n" in str(directory):
        raise ConfigError(
            f"{str(directory)!r} contains a character that is not allowed in #SBATCH lines",
            where="--output-dir",
            fix="choose a directory without it",
        )
    script = directory / "launch.sbatch"
    secrets = secrets_of(environment.asked_for(flags.export, os.environ))
    own = len(argv) - len(run.arguments) - 1
    text = batch_script(flags, run, [*by_name(argv[:own], secrets), *argv[own:]], directory)
    command = ["sbatch", *shlex.split(flags.submit), str(script)]
    if flags.dry_run:
        print(
            f"Nothing is submitted. The command would be {shlex.join(command)}, "
            f"and {script} would be:\n\n{masked(text)}",
            end="",
        )
        return 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        script.unlink(missing_ok=True)  # an existing file may be readable by others
        with open(
            os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"{shortened(str(script))} cannot be written: {error.strerror}",
            where="--output-dir",
            fix="name a writable directory",
        ) from None
    try:
        # Slurm propagates the environment of sbatch to the job.
        return subprocess.run(command, check=False, env={**os.environ, **secrets}).returncode
    except OSError as error:
        raise ConfigError(
            f"sbatch cannot be run: {error.strerror}; the job script was written to {script}",
            where="--submit",
            fix="submit it on a machine with Slurm",
        ) from None


def by_name(own: Sequence[str], secrets: Mapping[str, str]) -> list[str]:
    """Return the launcher's tokens with `--export NAME`, without a value, for each of the secrets.

    Each name is kept once: a value that a later `--export` overrides may be a secret as well.
    """
    kept: dict[str, tuple[str, ...]] = {}
    tokens = iter(own)
    for position, token in enumerate(tokens):
        flag, equals, value = token.partition("=")
        if flag != "--export":
            kept[f"{position} {token}"] = (token,)
            continue
        name, _, _ = export = (value if equals else next(tokens, "")).partition("=")
        said = name if name in secrets else "".join(export)
        kept.pop(name, None)  # the later `--export` keeps its own position
        kept[name] = (f"--export={said}",) if equals else ("--export", said)
    return [token for pair in kept.values() for token in pair]


def batch_script(flags: argparse.Namespace, run: RunRequest, argv: Sequence[str], directory: Path) -> str:
    """Return the text of the batch script."""
    own = list(argv[: len(argv) - len(run.arguments) - 1])
    inside = without(own, "--submit", "--num_nodes", "--launcher", "--checkpoint_exit_code")
    rest = list(run.arguments)
    if run.is_ours and value_of(rest, "--output-dir") is None:
        rest += ["--output-dir", str(directory)]  # a requeued job must find its checkpoints
    grace = [] if flags.term_grace else ["--term_grace", "45"]
    grace += ["--checkpoint_exit_code", str(SAVED)]
    launch = [sys.executable, "-m", "launcher.cli.main", "--launcher", "slurm", *grace]
    command = [*launch, *inside, argv[len(own)]]
    return TEMPLATE.format(
        name=re.sub(r"[^\w.-]", "_", run.name),
        nodes=flags.num_nodes,
        output=shlex.quote(str(directory).replace("%", "%%") + "/slurm-%j.out"),
        cwd=shlex.quote(os.getcwd()),
        command=shlex.join([*command, *rest]),
        saved=SAVED,
    )
