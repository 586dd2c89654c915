"""The `launch` command: check everything that can be checked, then start the ranks.

Nothing here imports torch until the flags and the configuration are known to be right, so that `--help`
and every mistake are answered at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher.cli.flags import value_of
from launcher.cli.launch_flags import launch_parser, refuse_unsupported, split_argv
from launcher.cli.recipes import check_flags, find_recipe, shared_directory
from launcher.errors import ConfigError, LauncherError

if TYPE_CHECKING:
    from launcher.cluster.local import LocalRun
    from launcher.config import Config

EXIT_MISTAKE = 2
DEFAULT_RECIPE = "pretrain"
logger = logging.getLogger("launcher")


def command() -> NoReturn:
    """The command `launch`: `main`, and a quick end; taking torch apart takes seconds on a busy machine."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch`.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        0; 2 for a mistake in flags or configuration (`launch check`: 1 when it refuses the JSON); else how the run
        ended (128 + n for signal n).
    """
    try:
        return _launch(list(sys.argv[1:] if argv is None else argv))
    except LauncherError as error:
        print_error(str(error))
        return EXIT_MISTAKE
    except SystemExit as leaving:  # argparse, after --help
        return int(leaving.code or 0)
    except KeyboardInterrupt:
        return 130


def print_error(text: str) -> None:
    """`error: TEXT` on stderr, the first word red on a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("[bold red]error:[/bold red] ", end="")
    console.print(text, markup=False)


def _launch(argv: list[str]) -> int:
    if argv[:1] == ["check"]:
        from launcher.cli.check import check

        return check(argv[1:])
    if argv[:1] == ["schedule"]:
        from launcher.cli.schedule import schedule

        return schedule(argv[1:])
    if argv[:1] == ["bench"]:
        from launcher.cli.bench import bench

        return bench(argv[1:])
    parser = launch_parser()
    own, recipe = split_argv(parser, argv)
    flags = parser.parse_args(own)
    refuse_unsupported(flags)
    _set_up_logging("error" if flags.quiet else flags.log_level)
    run = _Request(flags, recipe)
    if not run.is_ours and run.asks_for_help:
        os.execv(sys.executable, [sys.executable, run.target, *run.arguments])
    if run.is_ours:
        check_flags(Path(run.target), run.arguments)
    config = _checked_config(flags.config, needed=run.is_ours)
    # From here on torch may be imported.
    from launcher.cluster import local

    outcome = local.run(_plan(run, flags, config))
    sys.stdout.flush()
    if outcome.message:
        print_error(outcome.message)
    return outcome.exit_code


class _Request:
    """What is to be run, from the part of the command line that starts with the recipe's name."""

    def __init__(self, flags: argparse.Namespace, recipe: list[str]) -> None:
        name, *self.arguments = recipe or [DEFAULT_RECIPE]
        self.kind, self.target, self.is_ours = "script", name, False
        self.name = Path(name).stem
        if flags.module:
            self.kind = "module"
        elif flags.no_python:
            self.kind = "program"
        else:
            path, self.is_ours = find_recipe(name)
            self.target = str(path)

    @property
    def asks_for_help(self) -> bool:
        """`--help` of a script is answered by one plain process, without ranks."""
        return self.kind == "script" and bool({"-h", "--help"} & set(self.arguments))


def _checked_config(path: str | None, *, needed: bool) -> Config | None:
    """The configuration, read and found right; None when none is named, and none is needed."""
    if path is None:
        if needed:
            raise ConfigError(
                "no configuration is named",
                where="command line",
                fix="launch --config DS.json ...; examples are in " + str(shared_directory("ds_configs")),
            )
        return None
    from launcher.config.load import load

    config = load(path)
    if needed and config.zero_optimization.stage == "auto":
        raise ConfigError(
            'zero_optimization.stage is "auto", and no recipe says which stage that is',
            where=config.where("zero_optimization.stage"),
            fix='write "stage": 0, 1, 2 or 3',
        )
    return config


def _source(path: str) -> str:
    """What the ranks read: the absolute path of the configuration, or its text in base64."""
    from launcher.config.load import LONGEST_NAME

    return str(Path(path).resolve()) if Path(path[:LONGEST_NAME]).exists() else path


def _plan(run: _Request, flags: argparse.Namespace, config: Config | None) -> LocalRun:
    from launcher.cli import hugging_face
    from launcher.cluster import cores, local
    from launcher.config.ranks import places as places_of

    wanted = (run.is_ours and value_of(run.arguments, "--device")) or flags.device
    device, ranks = local.choose_device(wanted, flags.num_gpus)
    places: list[str] = []
    if config is not None:
        dp = config.dp_degree(ranks)  # raises where the degrees do not make the number of ranks
        if run.is_ours or config.pipeline.stages is not None:  # else a script's model may say
            places = places_of(config.pipeline.degree, dp, config.tensor_parallel.degree)
    shares = None
    if flags.bind_cores_to_rank or flags.bind_core_list:
        listed = cores.parse_core_list(flags.bind_core_list) if flags.bind_core_list else cores.usable_cores()
        shares = cores.share_cores(listed, ranks)
    output_dir = _run_directory(value_of(run.arguments, "--output-dir"), run.name)
    environment = {
        "LAUNCHER_DEVICE": device,
        "LAUNCHER_OUTPUT_DIR": str(output_dir),
        "LAUNCHER_LOG_LEVEL": logging.getLevelName(logger.level).lower(),
    }
    if config is not None:
        environment["LAUNCHER_CONFIG"] = _source(flags.config)
    if not (run.is_ours or flags.no_deepspeed_shim):
        environment |= hugging_face.variables(flags.config)
        logger.info(
            "`import deepspeed` in %s is this package's engine (--no_deepspeed_shim: it is not)", run.name
        )
    threads = len(shares[0]) if shares else max(1, len(cores.usable_cores()) // ranks)
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(threads)
    _say_what_starts(ranks, device, environment.get("OMP_NUM_THREADS"))
    logger.info("run directory: %s", output_dir)
    to_files = flags.enable_each_rank_log
    return local.LocalRun(
        kind=run.kind,
        target=run.target,
        arguments=run.arguments,
        ranks=ranks,
        places=places,
        log_dir=Path(to_files).resolve() if to_files else output_dir / "logs",
        log_prefix=time.strftime("%Y%m%d-%H%M%S_") if to_files else "",
        show_rank_0=not to_files,
        append_local_rank=not (run.is_ours or flags.no_local_rank),
        master_addr=flags.master_addr,
        master_port=local.choose_port(flags.master_addr, flags.master_port),
        environment=environment,
        cores=shares,
    )


def _say_what_starts(ranks: int, device: str, threads: str | None) -> None:
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    backend = "nccl" if device == "cuda" else "gloo"
    ours = f", OMP_NUM_THREADS={threads} (cores / ranks)" if threads else ""
    logger.info("%s on %s, backend %s%s", count, device, backend, ours)


def _run_directory(wanted: str | None, recipe: str) -> Path:
    """Create the run's directory: the one asked for, or a new `runs/<recipe>-<date>-<time>`."""
    try:
        if wanted is not None:
            Path(wanted).mkdir(parents=True, exist_ok=True)
            return Path(wanted).resolve()
        base = Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        candidate, number = base, 1
        while candidate.exists():
            number += 1
            candidate = base.with_name(f"{base.name}-{number}")
        candidate.mkdir(parents=True)
        return candidate.resolve()
    except OSError as error:
        raise ConfigError(
            f"the run's directory cannot be made: {error}",
            where="--output-dir",
            fix="name one that can be written",
        ) from None


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("launch: %(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level.upper())
    # Elastic reports each signal it sends; our one message says it better.
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.setLevel(logging.DEBUG if level == "debug" else logging.CRITICAL)


if __name__ == "__main__":
    command()
