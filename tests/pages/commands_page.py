"""Generates docs/reference/cli.md from the parsers: all flags of `launch`, its subcommands and its recipes."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

from launcher.cli.bench import bench_parser
from launcher.cli.calibrate import calibrate_parser
from launcher.cli.check import check_parser
from launcher.cli.checkpoint import export_parser, import_parser, inspect_parser
from launcher.cli.flags import FlagParser
from launcher.cli.hosts import REPORT_HELP, SSH_HELP
from launcher.cli.launch_flags import launch_parser
from launcher.cli.manifest import OWN, manifest_parser
from launcher.cli.memory_estimate import estimate_parser
from launcher.cli.plan import plan_parser
from launcher.cli.recipes import _serves_flags, find_recipe, recipe_names
from launcher.cli.schedule import schedule_parser
from launcher.cli.shim import shim_parser
from launcher.cli.top import top_parser

HEAD = """\
# Commands

All commands and their flags, generated from the argument parsers by `python -m tests.pages`.

Dashes and underscores are interchangeable: `--num-gpus` is `--num_gpus`. [Runs and recipes](../guides/running.md) and
[Clusters](../guides/clusters.md) explain the flags of `launch`.
"""


def commands_page() -> str:
    """Return the text of docs/reference/cli.md."""
    parts = [HEAD, *_section("launch", launch_parser())]
    for name in recipe_names():
        path, has_flags = find_recipe(name)
        if has_flags:
            parts += _section(f"launch ... {name}", _recipe_parser(path))
    for parser in (check_parser(), estimate_parser(), plan_parser(), calibrate_parser(), schedule_parser()):
        parts += _section(parser.prog, parser)
    for parser in (bench_parser(), top_parser(), inspect_parser(), export_parser(), import_parser()):
        parts += _section(parser.prog, parser)
    parts += _section("launch shim", shim_parser())
    parts += _section("launch manifest", manifest_parser(), only=OWN)
    for name, text in (("report", REPORT_HELP), ("ssh", SSH_HELP)):
        parts += [f"## launch {name}", "", "```", text, "```", ""]
    return "\n".join(parts).rstrip() + "\n"


def _recipe_parser(path: Path) -> FlagParser:
    """Return the parser from the recipe's `flags()`, without the imports that only training needs."""
    tree = ast.parse(path.read_text())
    tree.body = [statement for statement in tree.body if _serves_flags(statement)]
    scope: dict[str, Any] = {}
    exec(compile(tree, str(path), "exec"), scope)
    parser = scope["flags"]()
    assert isinstance(parser, FlagParser)
    return parser


def _section(title: str, parser: FlagParser, only: tuple[str, ...] = ()) -> list[str]:
    """Return a heading, the help text, and a table for each group of flags."""
    lines = [f"## {title}", "", "```"]
    lines += [f"usage: {parser.usage}", ""] if parser.usage else []
    lines += [text.strip() + "\n" for text in (parser.description, parser.epilog) if text]
    lines[-1] = lines[-1].rstrip()
    lines += ["```", ""]
    for group in parser._action_groups:
        rows = [_row(action) for action in group._group_actions if _shown(action, only)]
        if rows:
            lines += [f"**{_title(group)}**", "", "| flag | meaning |", "|---|---|", *rows, ""]
    return lines


def _title(group: argparse._ArgumentGroup) -> str:
    title = {"positional arguments": "arguments", "options": "flags"}.get(
        group.title or "", group.title or ""
    )
    return title[0].upper() + title[1:] + (f" ({group.description})" if group.description else "")


def _shown(action: argparse.Action, only: tuple[str, ...]) -> bool:
    wanted = not only or bool({*only} & {*action.option_strings})
    return wanted and action.help != argparse.SUPPRESS and action.dest != "help"


def _row(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else None
    if action.choices is not None:
        metavar = metavar or f"{{{','.join(map(str, action.choices))}}}"
    takes = action.nargs != 0 and action.option_strings
    value = f" {metavar or action.dest.upper()}" if takes else ""
    value = f" [{value.strip()}]" if takes and action.nargs == "?" else value
    names = action.option_strings or [metavar or action.dest]
    shown = ", ".join(f"`{name}`" for name in names[:-1])
    last = f"`{names[-1]}{value.replace('|', ' or ')}`"
    text = (
        " ".join((action.help or "").split()).replace("%(default)s", str(action.default)).replace("|", "\\|")
    )
    return f"| {shown + ', ' if shown else ''}{last} | {text} |"
