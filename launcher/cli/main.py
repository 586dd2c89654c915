"""The `launch` command: check everything that can be checked, then start the ranks.

Nothing here imports torch, so that `--help` and errors are printed immediately and ranks start without delay.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher import earlier_run
from launcher.cli.launch_flags import launch_parser, refuse_unsupported, split_argv
from launcher.cli.output import EXIT_MISTAKE, print_error
from launcher.cli.recipes import DEFAULT_RECIPE, SUBCOMMANDS, check_flags, find_config, shared_directory
from launcher.cluster.secret import hide, hide_inherited, masked, secret_arguments, secrets_of
from launcher.errors import ConfigError, LauncherError, printable
from launcher.replica import REPLICA, replica_of

if TYPE_CHECKING:
    from launcher.config import Config

logger = logging.getLogger("launcher")


def command() -> NoReturn:
    """Run `main` and exit without interpreter teardown, which takes seconds if torch has been imported."""
    if _subcommand(sys.argv[1:]):
        gc.disable()  # subcommands are short-lived, and collection is a fifth of the time of large imports
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `launch ... | head` has closed the pipe
        code = 128 + signal.SIGPIPE
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch`.

    Args:
        argv: the arguments; None uses those of the process.

    Returns:
        0; 2 for a mistake in flags or configuration (`launch check`: 1 when it refuses the JSON); else the
        exit code of the run (128 + n for signal n).
    """
    hide_inherited(os.environ)
    try:
        return _launch(list(sys.argv[1:] if argv is None else argv))
    except LauncherError as error:
        print_error(str(error))
        return EXIT_MISTAKE
    except SystemExit as leaving:  # argparse, after --help
        return int(leaving.code or 0)
    except KeyboardInterrupt:
        return 130


def _subcommand(argv: Sequence[str]) -> tuple[str, str] | None:
    return SUBCOMMANDS.get(argv[0].replace("_", "-")) if argv else None


def _launch(argv: list[str]) -> int:
    if found := _subcommand(argv):
        module, function = found
        return int(getattr(importlib.import_module(f"launcher.cli.{module}"), function)(argv[1:]))
    parser = launch_parser()
    own, recipe = split_argv(parser, argv)
    flags = parser.parse_args(own)
    refuse_unsupported(flags)
    _set_up_logging("error" if flags.quiet else flags.log_level)
    from launcher.cli.request import RunRequest

    _find_config(flags)
    if _is_yaml(flags.config):
        from launcher.cli import accelerate_flags

        accelerate_flags.take(flags)
    run = RunRequest(flags, recipe)
    hide(value for _, value in secret_arguments(run.arguments))
    if not run.is_ours and run.asks_for_help:
        os.execv(sys.executable, [sys.executable, run.target, *run.arguments])
    said = check_flags(Path(run.target), run.arguments) if run.is_ours else None
    config = _checked_config(flags.config, needed=run.is_ours)
    if config is not None and config.comet.api_key:
        # A `--config` that is not a file is the JSON in base64, which contains the key as well.
        hide([config.comet.api_key, *([] if os.path.exists(flags.config) else [flags.config])])
    if config is not None and said is not None:
        from launcher.config.resolve import complete, flags_for_json

        complete(config, flags_for_json(said))  # the ranks do this again; here it reports errors early
        if flags.hostfile is None and flags.submit is None:
            _check_trackers(config)
        if said.output_dir and flags.submit is None and not flags.dry_run and REPLICA not in os.environ:
            earlier_run.check(said, Path(said.output_dir))
    if flags.submit is not None:
        from launcher.cli.submit import submit

        return submit(flags, run, argv if recipe else [*argv, DEFAULT_RECIPE])
    if flags.no_ssh and flags.node_rank and not flags.dry_run:
        _join(flags)
    if config is not None and config.fault_tolerance.replicas > 1 and REPLICA not in os.environ:
        from launcher.cli.replicas import run_replicas

        return run_replicas(flags, run, argv if recipe else [*argv, DEFAULT_RECIPE], config.fault_tolerance)
    from launcher.cli.job import Job

    job = Job(run, flags, config, _source(flags.config) if config is not None else None)
    if flags.dry_run:
        from launcher.cli.rehearsal import rehearse

        for line in rehearse(job):
            print(printable(masked(line)))
        return 0
    front_end = job.front_end()
    front_end.status.command = masked(shlex.join(["launch", *argv]))
    outcome = front_end.run()
    sys.stdout.flush()
    if run.is_ours and front_end.status.file is not None and replica_of()[0] == 0:
        from launcher.top.run_report import write_report

        try:
            if (page := write_report(front_end.status.file)) is not None:
                logger.info("report of this run: %s", page)
        except (ConfigError, OSError) as error:
            logger.warning("the report of this run could not be written: %s", error)
    if outcome.saved:  # stopped on request: not an error
        print(printable(masked(f"launch: {outcome.message}")), file=sys.stderr)
    elif outcome.message:
        print_error(outcome.message)
    return outcome.exit_code


def _check_trackers(config: Config) -> None:
    """Check before ranks start that the packages of all enabled trackers are installed.

    Raises:
        ConfigError: some are not installed; the message names all of them.
    """
    from launcher.config.monitor import PACKAGES, is_installed

    on = [section for section in PACKAGES if getattr(config, section).enabled]
    missing = [section for section in on if not is_installed(PACKAGES[section][0])]
    if missing:
        packages = " ".join(PACKAGES[section][1] for section in missing)
        raise ConfigError(
            f"tracker packages are not installed: {packages}",
            where=", ".join(f"{section}.enabled" for section in missing),
            fix=f"pip install {packages}, or set enabled to false",
        )


def _join(flags: argparse.Namespace) -> NoReturn:
    """Serve as a node of a run whose front end is on node 0."""
    from launcher.cli.job import JOIN_S
    from launcher.cli.request import joining_place, joining_token
    from launcher.cluster import environment, handshake, join

    addr, port = joining_place(flags)
    token = joining_token(flags)
    os.environ.update(secrets_of(environment.asked_for(flags.export, os.environ)))
    handshake.serve_at(*join.connect(addr, port, flags.node_rank, token, JOIN_S))


def _checked_config(path: str | None, *, needed: bool) -> Config | None:
    """Return the validated configuration; None if none is given and none is needed."""
    if path is None:
        if needed:
            raise ConfigError(
                "--config is missing",
                fix="launch --config DS.json ...; examples are in " + str(shared_directory("ds_configs")),
            )
        return None
    from launcher.config.root import load

    config = load(path)
    if needed and config.zero_optimization.stage == "auto":
        raise ConfigError(
            'zero_optimization.stage is "auto", but recipes cannot choose a stage',
            where=config.where("zero_optimization.stage"),
            fix='write "stage": 0, 1, 2 or 3',
        )
    return config


def _find_config(flags: argparse.Namespace) -> None:
    """Replace the name of an example configuration by its path, and log it."""
    if flags.config is not None:
        flags.config, found = find_config(flags.config)
        if found:
            logger.info(found)


def _is_yaml(path: str | None) -> bool:
    """Return whether the configuration is accelerate's YAML rather than a JSON."""
    if path is None:
        return False
    from launcher.config.source import is_yaml

    return is_yaml(path)


def _source(path: str) -> str:
    """Return the configuration for the ranks: its absolute path, or its text in base64."""
    from launcher.config.source import LONGEST_NAME, in_base64, read

    if _is_yaml(path):
        return in_base64(read(path).tree)  # so that other nodes do not need the file
    return str(Path(path).resolve()) if Path(path[:LONGEST_NAME]).exists() else path


class _MaskingStream(logging.Formatter):
    """Masks secrets and escapes control characters, which host names from other machines may contain."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(masked(super().format(record)))


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_MaskingStream("launch: %(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level.upper())


if __name__ == "__main__":
    command()
