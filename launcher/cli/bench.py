"""`launch bench`: measures a directory's I/O speed, to choose an `aio` section, and the speed of devices."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from launcher.cli.flags import FlagParser, positive, size
from launcher.cli.output import must_be_new, new_console, write
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.offload.measure import IoMeasurement

DESCRIPTION = """\
io: measures a directory for NVMe offload: writes and reads a file there with requests of different sizes and different
numbers of requests in flight, and prints the best `aio` section. It temporarily uses --size bytes of the disk.
device: measures matmuls, memory and links of this machine's devices, for `launch plan --gpu FILE.json`."""
EPILOG = """\
examples:
  launch bench io /local_nvme
  launch bench io /local_nvme --size 4G --seconds 120 --out aio.json
  launch bench device --num-gpus 8 --out device.json
"""


def bench_parser() -> FlagParser:
    """Return the parser of `launch bench`."""
    parser = FlagParser(
        prog="launch bench",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("what", choices=["io", "device"], help="what to measure")
    parser.add_argument(
        "path", nargs="?", metavar="PATH", help="io: the directory to measure, as in nvme_path"
    )
    parser.add_argument(
        "--num-gpus", type=positive, default=1, metavar="N", help="device: number of ranks (default: 1)"
    )
    parser.add_argument(
        "--size", type=size, default="1G", metavar="N", help="size of the file: 512M, 4G (default: 1G)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=60, metavar="S", help="seconds to measure (default: 60)"
    )
    parser.add_argument(
        "--out", metavar="FILE.json", help="write the results to this file, which must not exist yet"
    )
    return parser


def bench(argv: Sequence[str]) -> int:
    """Run `launch bench`; returns 0."""
    flags = bench_parser().parse_args(argv)
    if flags.out is not None:
        must_be_new(flags.out, "--out")
    if flags.what == "device":
        return _device(flags.num_gpus, flags.out)
    if flags.path is None:
        raise ConfigError("missing argument: the directory to measure", fix="launch bench io /local_nvme")
    from rich.console import Console

    from launcher.offload.measure import bench as made
    from launcher.offload.measure import best, sweep

    console = new_console()
    waiting = Console(stderr=True).status("")
    with made(Path(flags.path), flags.size) as file, waiting:
        direct = file.file.direct
        rows = sweep(
            file, flags.seconds, lambda share: waiting.update(f"measuring {flags.path}: {share:.0%}")
        )
    chosen = best(rows[1:])
    _show(console, f"{flags.path}, {'direct I/O' if direct else 'through the cache'}", rows, chosen)
    text = json.dumps({"aio": chosen.section()}, indent=2)
    console.print(text, markup=False)
    _write(flags.out, text + "\n")
    return 0


def _device(ranks: int, out: str | None) -> int:
    """Run the device benchmark on `ranks` ranks of this machine."""
    with tempfile.TemporaryDirectory() as directory:
        row = Path(directory, "device.json")
        launch = [sys.executable, "-m", "launcher.cli.main", "--num_gpus", str(ranks), "--quiet"]
        program = [
            "--no_local_rank",
            "--module",
            "launcher.plan.measure",
            str(row),
            "--output-dir",
            directory,
        ]
        code = subprocess.run([*launch, *program]).returncode
        if code:
            return code
        text = row.read_text(encoding="utf-8")
    print(text, end="")
    _write(out, text)
    return 0


def _write(out: str | None, text: str) -> None:
    if out is not None:
        write(out, text, "--out")
        print(f"written: {out}")


def _show(console: Console, title: str, rows: list[IoMeasurement], chosen: IoMeasurement) -> None:
    """Print a table of MB/s and the percentage of the disk's own throughput (the first row)."""
    from rich.table import Table

    disk, *settings = rows
    table = Table(title=title, title_justify="left")
    for column in ("request", "in flight", "write MB/s", "read MB/s", "write", "read", "rounds"):
        table.add_column(column, justify="right")
    write, read = median(disk.write), median(disk.read)
    for row in [disk, *sorted(settings, key=lambda row: -row.both)]:
        cells = [
            _short(row.block_size),
            str(row.in_flight),
            f"{median(row.write) / 1e6:,.0f}",
            f"{median(row.read) / 1e6:,.0f}",
            f"{median(row.write) / write:.0%}",
            f"{median(row.read) / read:.0%}",
            str(len(row.read)),
        ]
        table.add_row(*cells, style="bold green" if row is chosen else None, end_section=row is disk)
    console.print(table)
    console.print(
        "first row: the disk's limit with the largest requests; green: the fewest bytes in flight that "
        "reach the top speed",
        markup=False,
    )


def _short(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
