"""What the user sees of the ranks: rank 0 as it prints, or whole lines of several ranks behind their names."""

from __future__ import annotations

import os

from launcher.cluster.terminal import SHOW_CURSOR, size_of


class Screen:
    """Prints output of ranks to a file descriptor.

    Args:
        names: the name of each rank that is shown, put before its lines; empty shows bytes as they come.
        out: file descriptor of the user's terminal, or of where its output goes.
    """

    def __init__(self, names: dict[int, str], out: int = 1) -> None:
        self._names, self._out = names, out
        self._rest: dict[int, bytes] = {}
        self._at_line_start = True
        self._shown = False

    @property
    def size(self) -> tuple[int, int] | None:
        """Rows and columns, where output of rank 0 goes to a terminal as it comes."""
        return None if self._names else size_of(self._out)

    def show(self, rank: int, data: bytes) -> None:
        if not self._names:
            self._write(data)
            return
        *lines, self._rest[rank] = (self._rest.get(rank, b"") + data).split(b"\n")
        name = self._names[rank].encode()
        # A live line is drawn again and again; its last state is the line.
        self._write(b"".join(name + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines))

    def close(self) -> None:
        """Show what has no end of line, and leave the terminal in order: a rank that was killed while it drew a live
        line left the cursor hidden and in mid-line."""
        for rank, rest in self._rest.items():
            if rest:
                self._write(self._names[rank].encode() + rest + b"\n")
        self._rest.clear()
        if self._shown and not self._names and size_of(self._out) is not None:
            self._write(SHOW_CURSOR if self._at_line_start else SHOW_CURSOR + b"\r\n")

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self._shown = True
        self._at_line_start = data.endswith((b"\n", b"\r"))
        while data:
            try:
                data = data[os.write(self._out, data) :]
            except BlockingIOError:
                continue
