"""Compare a client's two runs, and describe the result for its table row."""

from __future__ import annotations

import re

from tests.clients.client import Client, Outcome
from tests.clients.suites import compared

LONGEST = 160
"""Maximum length of an error in the table."""


def judge(client: Client, ours: Outcome, theirs: Outcome) -> tuple[str, bool]:
    """Return the text of the row, and whether this engine behaved as expected."""
    if client.tests and not (ours.error or theirs.error):
        return compared(client, ours.tests, theirs.tests)
    if ours.error and not theirs.error:
        return f"fails: {plain(ours.error)}", False
    if not all(loss == loss and abs(loss) < 1e9 for record in ours.losses for loss in record):
        return "fails: losses are not finite", False
    if theirs.error and not ours.error:
        why = client.alone or plain(theirs.error)
        return f"trains, {_count(ours.losses)}; DeepSpeed does not here: {why}", True
    if ours.error:
        return _both_end(client, ours, theirs)
    return _same_losses(client, ours.losses, theirs.losses)


def _both_end(client: Client, ours: Outcome, theirs: Outcome) -> tuple[str, bool]:
    """Judge two failed runs. This is expected only if the client table gives the reason."""
    here, there = plain(ours.error), client.alone or plain(theirs.error)
    why = client.ends or (here if here == there else f"{here} (DeepSpeed: {there})")
    if not ours.losses and not theirs.losses:
        return f"fails on both: {why}", bool(client.ends)
    words, same = _same_losses(client, ours.losses, theirs.losses)
    return f"{words}; then both end: {why}", same and bool(client.ends)


def _same_losses(client: Client, ours: list[list[float]], theirs: list[list[float]]) -> tuple[str, bool]:
    if [len(record) for record in ours] != [len(record) for record in theirs]:
        return f"differs: {_count(ours)}, and {_count(theirs)} with DeepSpeed", False
    pairs = [pair for two in zip(ours, theirs, strict=True) for pair in zip(*two, strict=True)]
    off = max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)
    if off > client.limit:
        return f"differs: {_count(ours)}, by {off:.0e}", False
    return f"{_count(ours)} as DeepSpeed's, {f'to {off:.0e}' if off else 'every bit'}", True


def _count(losses: list[list[float]]) -> str:
    number = len(losses[0]) if losses else 0
    return f"{number} loss{'' if number == 1 else 'es'}"


def plain(error: str) -> str:
    """Return an error without details of a single run: processes, ports, directories, lines of C++."""
    if re.search(r"Connection (closed|reset) by peer|Broken pipe", error):
        return "a rank waits for one that has ended"
    text = re.sub(r"\brank \d+ \(pid \d+\) failed: ", "", error)
    text = re.sub(r"\[/\S*:\d+\] ?", "", text)  # a line of C++
    text = re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)  # keep the last part of a path
    text = " ".join(text.encode("ascii", "ignore").decode().split())
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " ..."
