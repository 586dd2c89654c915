"""Command-line flags: dashes and underscores are interchangeable, and errors name the nearest flag.

Used by `launch` itself and by recipes. Imports nothing heavy, so that a wrong flag is reported immediately.
"""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from launcher.errors import ConfigError, shortened
from launcher.sizes import bytes_of

LONGEST_COUNT = 18  # digits that always fit in 64 bits


class FlagParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` for which `--max-steps` and `--max_steps` are one flag.

    `--help` shows the spelling given to `add_argument`. Abbreviations are not accepted, and a mistake raises
    `ConfigError` (which `launch` prints without a traceback) instead of exiting the process.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kept = {"formatter_class": argparse.RawDescriptionHelpFormatter}  # keeps line breaks in help texts
        super().__init__(*args, **{**kept, **kwargs, "allow_abbrev": False})
        self.checks: list[Callable[[argparse.Namespace], None]] = []
        """Each raises ConfigError for flags that do not go together."""

    def known_flags(self) -> dict[str, argparse.Action]:
        """Return every option string, such as `--num_gpus`, with its action."""
        return dict(self._option_string_actions)

    def canonical(self, token: str) -> str:
        """Return `--max-steps=3` in this parser's spelling; other tokens than known flags are unchanged."""
        if not token.startswith("--"):
            return token
        name, equals, value = token.partition("=")
        for known in self._option_string_actions:
            if _plain(known) == _plain(name):
                return known + equals + value
        return token

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        tokens = list(sys.argv[1:] if args is None else args)
        tokens = [self.canonical(token) for token in tokens]
        for token in tokens:
            name, _, value = token.partition("=")
            if (
                value == "--" and name in self._option_string_actions
            ):  # argparse would treat it as a missing value
                self.error(f"argument {name}: -- is not a value")
        return super().parse_known_args(tokens, namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse `args`, or raise `ConfigError` naming the first unknown flag and the nearest known one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown[0])
        for check in self.checks:
            check(parsed)
        return parsed

    def refuse(self, token: str, hint: str | None = None) -> NoReturn:
        """Raise the error for a token that this parser does not know.

        Args:
            token: the token as typed.
            hint: what to do instead, if the caller has better advice than "see --help".
        """
        kind = "unknown flag" if token.startswith("-") else "unexpected argument"
        fix = hint or self._nearest(token) or f"see `{self.prog} --help`"
        name = shortened(token.partition("=")[0])
        raise ConfigError(f"{kind} {name}", fix=fix)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's own complaints (a missing value, a wrong type or choice) as a `ConfigError`."""
        raise ConfigError(shortened(message, 300), fix=f"see `{self.prog} --help`")

    def _nearest(self, token: str) -> str | None:
        spelled = {_plain(known): known for known in self._option_string_actions}
        near = difflib.get_close_matches(_plain(token.partition("=")[0]), spelled, n=1, cutoff=0.6)
        return f"did you mean {spelled[near[0]]}?" if near else None


def add_model_and_ranks(parser: FlagParser, *, ranks_needed: bool = False) -> None:
    """Add the flags that `launch memory-estimate` and `launch plan` share: `--model`, and `--num-gpus` or
    `--hostfile`."""
    parser.add_argument("--model", required=True, metavar="MODEL", help="the model to train")
    ranks = parser.add_mutually_exclusive_group(required=ranks_needed)
    default = "" if ranks_needed else " (default: 1)"
    ranks.add_argument(
        "--num-gpus", type=positive, metavar="N", help=f"number of ranks on all nodes{default}"
    )
    ranks.add_argument(
        "-H", "--hostfile", metavar="PATH", help="use one rank for each slot of the hosts in this file"
    )


def slots_of(hostfile: str) -> list[int]:
    """Return the number of slots (ranks) of each host in a hostfile."""
    from launcher.cluster.hostfile import read_hostfile

    return [len(host.slots) for host in read_hostfile(hostfile)]


def value_of(tokens: Sequence[str], flag: str) -> str | None:
    """Return the last value of `flag` among tokens of another parser; None if the flag is absent.

    Args:
        tokens: the recipe's arguments.
        flag: with dashes, e.g. `--output-dir`; underscores and `--flag=value` are found as well.
    """
    found = None
    for position, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        if not name.startswith("--") or _plain(name) != _plain(flag):
            continue
        if equals:
            found = value
        elif position + 1 < len(tokens):
            found = tokens[position + 1]
    return found


def without(tokens: Sequence[str], *flags: str) -> list[str]:
    """Return the tokens without these flags and their values. All of these flags must take a value."""
    kept: list[str] = []
    skip = False
    for token in tokens:
        if skip:
            skip = False
        elif any(_plain(token.partition("=")[0]) == _plain(flag) for flag in flags):
            skip = "=" not in token
        else:
            kept.append(token)
    return kept


def add_expert_load(parser: argparse.ArgumentParser) -> None:
    """Add --expert-load."""
    parser.add_argument(
        "--expert-load",
        type=_load,
        default=1.0,
        metavar="X",
        help="tokens routed to the experts of the most loaded rank, relative to an even share: expert_rank_load in "
        "metrics.jsonl (default: 1)",
    )


def add_adapters(parser: argparse._ActionsContainer) -> None:
    """Add --lora and --lora-targets."""
    parser.add_argument(
        "--lora",
        type=positive,
        metavar="R",
        help="train only LoRA adapters of rank R, as created by PEFT",
    )
    parser.add_argument(
        "--lora-targets",
        metavar="NAMES",
        help="comma-separated layers to adapt (default: all-linear)",
    )


def add_packed(parser: argparse._ActionsContainer) -> None:
    """Add --load-in-4bit."""
    parser.add_argument(
        "--load-in-4bit",
        action="store_true",
        help="quantize the frozen linear layers to 4 bits per weight, as bitsandbytes does (QLoRA)",
    )


def check_adapter_flags(flags: argparse.Namespace) -> None:
    """Check that the flags that describe adapters are used only together with --lora.

    Raises:
        ConfigError: one of them is given and --lora is not.
    """
    fix = "pass the rank of the adapters: --lora 16"
    for flag in ("--lora-targets", "--lora-alpha", "--lora-dropout", "--load-in-4bit"):
        value = getattr(flags, flag.strip("-").replace("-", "_"), None)
        if value is not None and value is not False and not flags.lora:
            raise ConfigError(f"{flag} requires --lora", where=flag, fix=fix)


def add_bill(parser: argparse.ArgumentParser) -> None:
    """Add --tokens, --price and --watts."""
    add = parser.add_argument
    add(
        "--tokens",
        type=_many,
        metavar="N",
        help="tokens of the whole run (15T, 300B), to predict its duration",
    )
    add("--price", type=above_zero, metavar="X", help="price per GPU hour, to predict the run's cost")
    add(
        "--watts",
        type=above_zero,
        metavar="W",
        help="power draw of one GPU and its share of the node, to predict the run's energy",
    )


def add_gpus_per_node(parser: FlagParser) -> None:
    """Add the flag that `launch plan` and `launch calibrate` share."""
    parser.add_argument(
        "--gpus-per-node",
        type=positive,
        metavar="N",
        help="GPUs in a node (default: the usual number for this GPU)",
    )


def add_reserve(parser: argparse.ArgumentParser) -> None:
    """Add --reserve."""
    from launcher.monitor.device_budget import RESERVE

    parser.add_argument(
        "--reserve",
        type=_share,
        default=RESERVE,
        metavar="SHARE",
        help=f"fraction of the device's memory to leave free for fragmentation and workspaces (default: {RESERVE})",
    )


def named(text: str) -> str:
    """Parse a non-empty path; an unset shell variable gives an empty one."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return _whole(text, 1)


def whole(text: str) -> int:
    """Parse an integer of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    # No sensible count has more digits, and Python takes long to parse very long numbers.
    if not (text.isascii() and text.isdecimal() and len(text) <= LONGEST_COUNT and int(text) >= least):
        raise argparse.ArgumentTypeError(f"needs a whole number of at least {least}, not {shown(text)}")
    return int(text)


def number(text: str) -> float:
    """Parse a finite number of at least 0, such as 3e-4."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"needs a number of at least 0, not {shown(text)}")
    return found


def _load(text: str) -> float:
    found = number(text)
    if found < 1:
        raise argparse.ArgumentTypeError(
            "needs a number of at least 1: the most loaded rank has at least an even share"
        )
    return found


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    found = number(text)
    if found <= 0:
        raise argparse.ArgumentTypeError(f"needs a number above 0, not {shown(text)}")
    return found


def _many(text: str) -> float:
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    return above_zero(text if factor is None else text[:-1]) * (factor or 1.0)


def _share(text: str) -> float:
    found = number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= found < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a fraction: write 0.06 or 6%")
    return found


def shown(text: str) -> str:
    """Return the typed text for a message: quoted, escaped and shortened."""
    return repr(text if len(text) <= 60 else f"{text[:50]}...")


def size(text: str) -> int:
    """Parse a number of bytes, such as 512M or 80GiB."""
    try:
        found = bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not found:
        raise argparse.ArgumentTypeError(f"needs a number of bytes, not {shown(text)}")
    return found


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")
