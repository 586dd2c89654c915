"""Rendering of a run for a terminal of 80 or more columns."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launcher.errors import printable
from launcher.monitor.metrics import is_number
from launcher.monitor.progress import duration, short_number
from launcher.pipeline.timeline.simulate import Timeline
from launcher.sizes import gib, in_words
from launcher.top.run_view import GOES_ON, SHARES, RankView, RunView, estimated, sparkline

MARKS = {
    "compute": ("█", "green"),
    "wait": ("▒", "yellow"),
    "checkpoint": ("▓", "blue"),
    "other": ("·", "dim"),
}
COLOURS = {"running": "green", "completed": "green", "silent": "red", "failed": "red"}
"""Colours of states; all other states are yellow."""
MESSAGES = 4
ACTIONS = {"F": "blue", "B": "green", "I": "green", "W": "yellow"}
"""Forward, full backward, and its two halves: gradients of inputs and of weights."""
MOST_STAGES = 8
HEAD = 5
"""Lines above the rows of the table, including its header."""
ORDERS: dict[str, Callable[[RankView], float]] = {
    "r": lambda rank: rank.rank,
    "t": lambda rank: -(rank.seconds or 0.0) * rank.shares["compute"],
    "w": lambda rank: -rank.shares["wait"],
    "m": lambda rank: -rank.memory,
}
"""Key -> the sort key for ranks."""


def render(
    view: RunView, width: int, height: int | None = None, order: str = "r", chosen: int = -1, keys: str = ""
) -> RenderableType:
    """Return the screen.

    Args:
        width, height: size of the terminal; without a height all ranks are shown.
        order: a key of `ORDERS`.
        chosen: the rank that is highlighted and scrolled into view.
        keys: a line of help about the keys.
    """
    ranks = in_order(view, order)
    stages = _stages(view.timeline, width) if view.timeline is not None else []
    room = len(ranks) if height is None else max(1, height - HEAD - MESSAGES - 3 - len(stages))
    at = next((i for i, rank in enumerate(ranks) if rank.rank == chosen), 0)
    first = max(0, at - room + 1)
    table = _table(view, ranks[first : first + room], width, chosen)
    hidden = [*ranks[:first], *ranks[first + room :]]
    parts: list[RenderableType] = [_title(view, width), _progress(view, width), table]
    if hidden:
        slow = sum(rank.slow is not None for rank in hidden)
        parts.append(
            Text(
                f"and {len(hidden)} more rank{'s' * (len(hidden) != 1)}{f', {slow} of them slow' if slow else ''}",
                style="dim",
            )
        )
    parts += stages
    parts += [_message(when, text, width) for when, text in view.messages[-MESSAGES:]]
    if keys:
        parts.append(Text(keys, style="dim", no_wrap=True, overflow="crop"))
    return Group(*parts)


def in_order(view: RunView, order: str) -> list[RankView]:
    """Return the ranks in display order."""
    return sorted(view.ranks, key=ORDERS[order])


def _title(view: RunView, width: int) -> Text:
    ends = time.time() if view.state in GOES_ON else view.written_at
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(view.state, style=f"bold {COLOURS.get(view.state, 'yellow')}")
    if view.state == "silent":
        line.append(f" for {duration(time.time() - view.written_at)}")
    line.append(f"  {duration(ends - view.started_at)}  {len(view.ranks)} rank{'s' * (len(view.ranks) != 1)}")
    if view.restarts:
        line.append(f"  {view.restarts} restart{'s' * (view.restarts > 1)}", style="yellow")
    line.append(f"  {printable(view.called or str(view.directory))}", style="dim")
    line.truncate(width)
    return line


def _progress(view: RunView, width: int) -> Text:
    """Return the lines about training: step, loss, throughput, last checkpoint, and the loss curve."""
    steps = [rank.step for rank in view.ranks if rank.step is not None]
    parts = [f"step {max(steps)}"] if steps else ["no step yet"]
    losses = [record["loss"] for record in view.records if is_number(record.get("loss"))]
    if losses:
        parts.append(f"loss {losses[-1]:.4f}")
    last = view.records[-1] if view.records else {}
    if is_number(last.get("tokens_per_s")):
        parts.append(f"{short_number(last['tokens_per_s'])} tokens/s")
    elif view.samples:
        parts.append(f"{view.samples:.3g} sequences/s")
    if is_number(last.get("lr")):
        parts.append(f"lr {last['lr']:.3g}")
    if is_number(last.get("mfu")):
        parts.append(f"MFU {last['mfu']:.1%}")
    if is_number(last.get("expert_load")):
        parts.append(f"max expert load {last['expert_load']:.2g}x uniform")
    if view.saved is not None:
        parts.append(f"checkpoint of step {view.saved[0]}, {_ago(view.saved[1])}")
    text = Text("  ".join(parts), no_wrap=True)
    text.truncate(width)
    curve = sparkline(losses, width - 6) if len(losses) > 1 else ""
    return Text("\n", no_wrap=True).join([text, *([Text(f"loss {curve}", style="cyan")] if curve else [])])


def _stages(timeline: Timeline, width: int) -> list[RenderableType]:
    """Return the timeline of one step: a line per pipeline stage, with a letter for each action."""
    shown = timeline.spans[:MOST_STAGES]
    left = len(f"stage {len(shown) - 1} ")
    columns = max(10, width - left)
    more = f", and {timeline.stages - len(shown)} more stages" if timeline.stages > len(shown) else ""
    head = Text(
        f"{printable(timeline.name)}, {timeline.microbatches} microbatches: {timeline.bubble:.0%} idle{more}",
        style="dim",
    )
    lines: list[RenderableType] = [head]
    for number, spans in enumerate(shown):
        line = Text(f"stage {number}".ljust(left), no_wrap=True)
        for column in range(columns):
            moment = timeline.start + timeline.total * (column + 0.5) / columns
            kind = next((str(span.action.kind) for span in spans if span.start <= moment < span.end), "")
            line.append(kind or "·", style=ACTIONS.get(kind, "dim"))
        lines.append(line)
    return lines


def _table(view: RunView, ranks: list[RankView], width: int, chosen: int) -> Table:
    wide, several = width >= 110, any(rank.place for rank in ranks)
    hosts = wide or len({rank.host for rank in view.ranks}) > 1  # narrow screens omit a single host's name
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for name in (
        "rank",
        *(("host",) if hosts else ()),
        *(("place",) if wide and several else ()),
        "step",
        "s/step",
    ):
        least = {"rank": 4, "step": 5, "s/step": 6}.get(name, 6)
        left = name in ("host", "place")
        table.add_column(
            name,
            justify="left" if left else "right",
            no_wrap=True,
            min_width=least,
            max_width=24 if wide else 16,
        )
    bar = 40 if wide else 20 if width >= 70 else 6
    table.add_column(_legend(bar), no_wrap=True, min_width=bar)
    table.add_column("wait", justify="right", no_wrap=True, min_width=4)
    table.add_column(
        "memory" if view.estimate is None else "peak, of est.",
        justify="right",
        no_wrap=True,
        min_width=8 if view.estimate is None else 13,
    )
    table.add_column("", no_wrap=True, overflow="ellipsis")
    ended = view.state not in (*GOES_ON, "silent")
    for rank in ranks:
        # Text instead of str: rich parses str as markup.
        cells: list[RenderableType] = [str(rank.rank), *([Text(printable(rank.host))] if hosts else [])]
        if wide and several:
            cells.append(Text(printable(rank.place)))
        cells += [
            "" if rank.step is None else str(rank.step),
            "" if rank.seconds is None else f"{rank.seconds:.3g}",
            _bar(rank, bar),
            f"{rank.shares['wait']:.0%}" if rank.seconds else "",
            _memory(rank, estimated(view, rank.rank)),
            _note(rank, ended=ended, wide=wide),
        ]
        table.add_row(*cells, style="reverse" if rank.rank == chosen else None)
    return table


def _memory(rank: RankView, expected: int | None) -> str:
    """Return the memory of a rank; with an estimate, its peak and the estimated peak."""
    if not rank.memory or not expected:
        return in_words(rank.memory) if rank.memory else ""
    return f"{gib(rank.peak)} of {gib(expected)} GiB"


def _legend(width: int) -> Text:
    names = SHARES if width > 30 else SHARES[:2] if width > 10 else ()
    legend = Text()
    for name in names:
        legend.append(f"{MARKS[name][0]} ", style=MARKS[name][1]).append(f"{name} ")
    return legend


def _bar(rank: RankView, width: int) -> Text:
    bar, left = Text(), width
    if rank.seconds is None:
        return bar
    for name in SHARES:
        size = left if name == SHARES[-1] else min(left, round(rank.shares[name] * width))
        bar.append(MARKS[name][0] * size, style=MARKS[name][1])
        left -= size
    return bar


def _note(rank: RankView, *, ended: bool, wide: bool) -> Text:
    if rank.slow is not None:
        phase, ratio, steps = (rank.slow[key] for key in ("phase", "ratio", "steps"))
        since = f", {steps} steps" if wide else ""
        return Text(printable(f"{phase} {ratio:.2f}x{since}"), style="bold red")
    if rank.doing and not ended and (rank.since_s > 5.0 or rank.step is None):
        return Text(f"{printable(rank.doing)} for {rank.since_s:.0f} s", style="yellow")
    return Text("")


def _message(at: float, text: str, width: int) -> Text:
    first = printable(text.partition("\n")[0])
    line = Text(f"{time.strftime('%H:%M:%S', time.localtime(at))} {first}", no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _ago(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    return f"{seconds:.0f} s ago" if seconds < 100 else f"{duration(seconds)} ago"
