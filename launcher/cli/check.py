"""`launch check`: reports how every key of a JSON is handled, without GPUs and without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from launcher.cli.flags import FlagParser, positive
from launcher.cli.output import config_of, new_console, write
from launcher.errors import ConfigError, LauncherError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.config.check import Examined
    from launcher.config.root import Config
    from launcher.config.verdicts import KeyVerdict

EXIT_REFUSED = 1
MOST_LINES = 10
WIDTH = 100
COLOURS = {"refused": "bold red", "obsolete": "yellow", "used differently": "cyan", "no effect": "yellow"}
COLOURS |= {"comment": "dim", "foreign": "yellow", "default": "cyan", "used": "green"}

DESCRIPTION = """\
Reports how every key of a DeepSpeed-style JSON is handled: used, used differently (how), obsolete (what replaced it),
without effect (why), foreign (a script's own key), or refused (why, and what to write). All problems are reported at
once. Needs no GPU."""
EPILOG = """\
examples:
  launch check ds_config.json
  launch check ds_config.json --num-gpus 8 --explain       (the values of all "auto" keys and defaults)
  launch check old.json --migrate new.json                 (the same configuration with current keys)

Exits with 0 if the file can be used as it is, else with 1. docs/config.md describes every key.
"""


def check_parser() -> FlagParser:
    """Return the parser of `launch check`."""
    parser = FlagParser(
        prog="launch check",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("config", metavar="DS.json", help="the file, or its text in base64")
    parser.add_argument("--num-gpus", type=positive, metavar="N", help="solve the batch equation for N ranks")
    parser.add_argument(
        "--explain", action="store_true", help='show the values of all "auto" keys and defaults'
    )
    parser.add_argument("--migrate", metavar="OUT.json", help="write the configuration with current keys")
    return parser


def check(argv: Sequence[str]) -> int:
    """Run `launch check`; returns 0, or 1 when something is refused."""
    flags = check_parser().parse_args(argv)

    from launcher.config.root import inspect
    from launcher.config.source import read
    from launcher.config.verdicts import verdicts

    console = new_console()
    try:
        written = read(config_of(flags.config))
    except LauncherError as error:
        console.print(str(error), markup=False)
        return EXIT_REFUSED
    examined = inspect(written)
    rows = verdicts(written, examined)
    unfit, dp_degree = _fit(examined, flags.num_gpus)
    refused = bool(examined.problems) or unfit is not None
    if unfit is not None:
        console.print(unfit, markup=False)
    _show(console, written.name, rows)
    if flags.explain:
        _explain(console, examined, dp_degree)
    if flags.migrate is not None:
        _migrate(console, Path(flags.migrate), examined)
    return EXIT_REFUSED if refused else 0


def _fit(examined: Examined, ranks: int | None) -> tuple[str | None, int | None]:
    """Return (why the configuration does not fit `ranks`, its data-parallel degree); None where unknown."""
    if examined.config is None or ranks is None:
        return None, None
    try:
        dp_degree = examined.config.dp_degree(ranks)
    except ConfigError as error:
        return str(error), None
    return _batch_problem(examined.config, dp_degree), dp_degree


def _batch_problem(config: Config, dp_degree: int) -> str | None:
    """Return why the batch equation does not hold for `dp_degree`; None if it holds or is not yet known."""
    from launcher.config.problems import ConfigProblems
    from launcher.config.ranks import BATCH_KEYS
    from launcher.config.verdicts import solved_batch

    if not config.elasticity.on:
        if any(getattr(config, key) == "auto" for key in BATCH_KEYS):
            return None
        if config.train_batch_size is None and config.train_micro_batch_size_per_gpu is None:
            return None
    try:
        solved_batch(config, dp_degree)
    except ConfigProblems as error:
        return str(error)
    return None


def _show(console: Console, name: str, rows: list[KeyVerdict]) -> None:
    """Print one row for each key that needs an explanation, then the keys that are used as written."""
    from launcher.config.problems import dotted
    from launcher.config.verdicts import count

    counts = count(rows)
    told = ", ".join(f"{many} {verdict}" for verdict, many in counts.items())
    number = sum(counts.values())
    keys = f"{number} key{'s' * (number != 1)}"
    console.print(f"{name}: {keys}: {told or 'none set'}", markup=False)
    width = max((len(f"{row.line}:{row.column}") for row in rows), default=0)
    for row in rows:
        if _is_plain(row):
            continue
        place = f"{row.line}:{row.column}" if row.line else ""
        console.print(f"  {row.verdict:<16}", style=COLOURS[row.verdict], end="")
        words = f": {row.words}" if row.words else ""
        console.print(f"  {place:>{width}}  {dotted(row.path)}{printable(words)}", markup=False)
    if plain := [printable(dotted(row.path)) for row in rows if _is_plain(row)]:
        lines = wrap(
            ", ".join(plain), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        console.print("\n".join(["as written:", *lines]), markup=False)


def _is_plain(row: KeyVerdict) -> bool:
    return row.verdict == "used" and not row.words


def _explain(console: Console, examined: Examined, dp_degree: int | None) -> None:
    from launcher.config.verdicts import explain

    if examined.config is None:
        console.print("\n--explain: fix the refused keys first")
        return
    entries = explain(examined.config, examined.document.tree, dp_degree)
    for auto, title in ((True, '"auto" resolves to'), (False, "not set, default used")):
        chosen = [entry for entry in entries if entry.auto is auto]
        if chosen:
            console.print(f"\n{title}:", markup=False)
        width = max((len(entry.path) for entry in chosen), default=0)
        for entry in chosen:
            why = f"  ({entry.why})" if entry.why != "the default" else ""
            console.print(f"  {entry.path:<{width}}  {entry.value}{why}", markup=False)


def _migrate(console: Console, out: Path, examined: Examined) -> None:
    """Write the converted JSON, unless the file exists or the conversion would lose a key."""
    text = json.dumps(_whole_numbers(examined.document.tree), indent=2, ensure_ascii=False) + "\n"
    lost = _lost(examined, text)
    if lost:
        console.print(f"\nnot written: {out}; fix what would be lost first: {', '.join(lost)}", markup=False)
        return
    write(out, text, "--migrate")
    left = f"; {len(examined.problems)} problems remain to be fixed" if examined.problems else ""
    changes = len(examined.document.conversions)
    console.print(f"\nwritten: {out}, {changes} change{'s' if changes != 1 else ''}{left}", markup=False)
    if lines := examined.document.comments:
        said = ", ".join(map(str, lines[:MOST_LINES])) + (", ..." if len(lines) > MOST_LINES else "")
        console.print(
            f"comments are dropped, because JSON has none: see line {said} of {examined.document.name}",
            markup=False,
        )


def _lost(examined: Examined, text: str) -> list[str]:
    """Return the keys that were not read, and refused keys that would be missing from the new text."""
    from launcher.config.problems import dotted
    from launcher.config.reader import read_text
    from launcher.config.root import inspect

    document = examined.document
    again = inspect(read_text(text, "the new text"))
    refused = {(problem.path, problem.what) for problem in again.problems}
    unread = [problem.path for problem in document.problems]
    gone = [problem.path for problem in examined.problems if (problem.path, problem.what) not in refused]
    if not (unread or gone) and examined.config != again.config:
        return ["the converted configuration would differ"]
    return list(dict.fromkeys(dotted(document.written(path)) for path in [*unread, *gone]))


def _whole_numbers(value: Any) -> Any:
    """Replace floats such as 5e8 by integers, which all readers accept as integers, and infinity by null."""
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1000 else value
