"""Ours against each peer, mode by mode: the tables of docs/speed.md and six rows of the README, from the records.

python -m benchmarks.speed_page
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Line, heading, lines_of, speed_ratios
from benchmarks.suite import RESULTS
from benchmarks.sweep import ROOT

README, PAGE = ROOT / "README.md", ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- speed: made by `python -m benchmarks.all` -->", "<!-- end of speed -->"

PEERS = {
    "single": "plain PyTorch",
    "ddp": "DDP",
    "deepspeed": "DeepSpeed",
    "fsdp2": "FSDP2",
    "dtensor": "`parallelize_module`",
    "pipelining": "torch pipelining",
}
# Suite and model -> what the section is called
SECTIONS = {
    "zero-small": "ZeRO stages, 25.6 M parameters",
    "zero-medium": "ZeRO stages, 113.7 M parameters",
    "tensor-small": "Tensor parallelism, 25.6 M parameters",
    "pipeline-small": "Pipeline stages, eight microbatches, 25.6 M parameters",
    "offload-medium": "Offload, stage 3 where no other is named, 113.7 M parameters",
}
# (group, peer) -> how many times as fast we mean to be
AIMS = {
    ("one rank", "single"): 0.98,
    ("stage 0", "ddp"): 1.1,
    ("stage 1", "deepspeed"): 1.5,
    ("stage 2", "deepspeed"): 1.5,
    ("stage 3", "deepspeed"): 1.5,
    ("stage 3", "fsdp2"): 1.5,
    ("tp 2", "deepspeed"): 1.5,
    ("tp 2", "dtensor"): 1.8,
    ("two stages", "deepspeed"): 1.2,
    ("two stages", "pipelining"): 1.05,
    ("stage 2, optimizer on the CPU", "deepspeed"): 1.5,
    ("optimizer on the CPU", "deepspeed"): 1.5,
    ("all on the CPU", "deepspeed"): 1.5,
    ("optimizer on NVMe", "deepspeed"): 1.5,
    ("all on NVMe", "deepspeed"): 1.5,
}
# The README's rows: (section, group, peer) -> what the row is called
SHORT = {
    ("zero-small", "stage 0", "ddp"): "stage 0, 26 M",
    ("zero-small", "stage 3", "deepspeed"): "stage 3, 26 M",
    ("zero-small", "stage 3", "fsdp2"): "stage 3, 26 M",
    ("tensor-small", "tp 2", "deepspeed"): "tensor, 26 M",
    ("pipeline-small", "two stages", "deepspeed"): "two stages, 26 M",
    ("offload-medium", "optimizer on NVMe", "deepspeed"): "NVMe, 114 M",
}
SHORT_HEAD = ["| run | ours | peer | speed | memory |", "| --- | ---: | ---: | ---: | ---: |"]
COLUMNS = (
    "| mode | ours | peer | ours / peer, speed (smallest-largest turn) | aimed at | memory, ours / peer |"
)
RULE = "| --- | ---: | ---: | ---: | ---: | ---: |"
ABOUT = """\
# Speed and memory beside the peers

Made by `python -m benchmarks.all`, which takes some two hours; `python -m benchmarks.speed_page` makes the page again
from the records in `benchmarks/results/`. Two ranks with one thread each on two cores, in turns. Each peer stands with
the fastest of its rows, tuned ones among them, and with the least memory of any of its rows; the records have them all,
and `benchmarks/README.md` says how each is set up. Times are medians of a step, speeds are
compared turn by turn, memory is the peak RSS of the rank with most. Runs during which other programs used more than a
tenth of the CPUs do not count where a row has others. What was tried is in `benchmarks/notes.md`.
"""


@dataclass(frozen=True)
class Against:
    """One of our rows against one peer.

    Args:
        mode: what we do there.
        fastest: row of this peer.
        least_mb: peak memory of the leanest row of this peer.
        ratios: of the speeds, turn by turn.
    """

    group: str
    mode: str
    ours: Line
    fastest: Line
    least_mb: float
    ratios: list[float]

    @property
    def cells(self) -> list[str]:
        aim = AIMS.get((self.group, self.fastest.peer))
        name = PEERS[self.fastest.peer]
        return [
            self.mode,
            _own(self.ours),
            f"{name}: {statistics.median(self.fastest.step_ms):.0f} ms, {self.least_mb:.0f} MB",
            self.speed,
            "" if aim is None else f"{aim:g}",
            self.memory,
        ]

    @property
    def short_cells(self) -> list[str]:
        """Those of the README, but for the first."""
        peer = f"{PEERS[self.fastest.peer]}: {statistics.median(self.fastest.step_ms):.0f} ms"
        return [f"{statistics.median(self.ours.step_ms):.0f} ms", peer, self.speed, self.memory]

    @property
    def speed(self) -> str:
        ratio = statistics.median(self.ratios)
        return _bold(f"{ratio:.2f}", ratio > 1) + f" ({min(self.ratios):.2f}-{max(self.ratios):.2f})"

    @property
    def memory(self) -> str:
        ratio = self.ours.peak_rss_mb / self.least_mb
        return _bold(f"{ratio:.2f}", ratio <= 1)


def against(group: str, lines: list[Line]) -> Iterator[Against]:
    """Each of our rows against each peer of a group."""
    all_ours = [line for line in lines if line.ours]
    for ours in all_ours:
        mode = _mode(group, ours, all_ours)
        for peer in dict.fromkeys(line.peer for line in lines if not line.ours):
            rows = [line for line in lines if line.peer == peer]
            if ratios := speed_ratios(ours, rows):
                fastest = max(rows, key=lambda line: line.tokens_per_s)
                yield Against(group, mode, ours, fastest, min(line.peak_rss_mb for line in rows), ratios)


def records(section: str) -> list[Path]:
    """Its files, the newest first."""
    return sorted(RESULTS.glob(f"{section}-*.jsonl"), reverse=True)


def groups_of(files: list[Path]) -> dict[str, list[Line]]:
    """Of the last session of each file; a group is taken from the first of them that has it."""
    groups: dict[str, list[Line]] = {}
    for file in reversed(files):
        groups |= lines_of(file)[1]
    return groups


def short_table() -> list[str]:
    """The README's: of each group the first of our rows. Rows without a record are left out."""
    rows = []
    for (section, group, peer), name in SHORT.items():
        lines = groups_of(records(section)).get(group, [])
        row = next((one for one in against(group, lines) if one.fastest.peer == peer), None)
        if row is not None:
            rows.append([name, *row.short_cells])
    return [*SHORT_HEAD, *(f"| {' | '.join(cells)} |" for cells in rows)]


def table(files: list[Path]) -> list[str]:
    """One row for each of ours and each peer."""
    rows = []
    for group, lines in groups_of(files).items():
        rows += [one.cells for one in against(group, lines)]
        if all(line.ours for line in lines):  # what the peers made of it is in the records
            rows += [[_mode(group, line, lines), _own(line), "no peer ran", "", "", ""] for line in lines]
    return [COLUMNS, RULE, *(f"| {' | '.join(cells)} |" for cells in rows)]


def write() -> None:
    """Write both pages."""
    sections = {section: files for section in SECTIONS if (files := records(section))}
    page = [ABOUT]
    for section, files in sections.items():
        abouts = [
            f"Records: `benchmarks/results/{file.name}`. {heading(lines_of(file)[0])}" for file in files
        ]
        page += [f"## {SECTIONS[section]}\n", "\n\n".join(abouts), "", *table(files), ""]
    PAGE.write_text("\n".join(page))
    text, block = README.read_text(), "\n".join([BEGIN, "", *short_table(), "", END])
    README.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, text, flags=re.DOTALL))


def _mode(group: str, line: Line, all_ours: list[Line]) -> str:
    return group if len(all_ours) == 1 else line.name.removeprefix("ours, ")


def _own(line: Line) -> str:
    return f"{statistics.median(line.step_ms):.0f} ms, {line.peak_rss_mb:.0f} MB"


def _bold(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text


if __name__ == "__main__":
    write()
