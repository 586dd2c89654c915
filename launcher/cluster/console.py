"""The view of the ranks on the console: rank 0 as it prints, or whole lines of several ranks behind their names."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable

from launcher.cluster.terminal import LONGEST, SHOW_CURSOR, size_of


class ConsoleWriter:
    """Prints output of ranks to a file descriptor, at the speed of its reader: a thread waits for that, and the front
    end goes on. What waits to be printed is bounded by who sends it, who is told what has been (`agent.py`).

    Args:
        names: the name of each rank that is shown, put before its lines; empty shows bytes as they come.
        out: file descriptor of the user's terminal, or of where its output goes.
    """

    def __init__(self, names: dict[int, str], out: int = 1) -> None:
        self._names, self._out = names, out
        self._rest: dict[int, bytes] = {}
        self._at_line_start = True
        self._shown = False
        self._to_print: queue.SimpleQueue[tuple[bytes, Callable[[], None]] | None] = queue.SimpleQueue()
        self._printed: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    @property
    def size(self) -> tuple[int, int] | None:
        """Return the rows and columns, where output of rank 0 goes to a terminal as it comes."""
        return None if self._names else size_of(self._out)

    def show(self, rank: int, data: bytes, then: Callable[[], None] = lambda: None) -> None:
        """Print it soon; `flush` calls `then` when that is done."""
        if not self._names:
            self._write(data, then)
            return
        *lines, rest = (self._rest.get(rank, b"") + data).split(b"\n")
        if len(rest) > LONGEST:  # of a line without an end no more is kept
            lines.append(rest)
            rest = b""
        self._rest[rank] = rest
        name = self._names[rank].encode()
        # A live line is drawn again and again; its last state is the line.
        text = b"".join(name + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines)
        self._write(text, then)

    def flush(self) -> None:
        """Tell what has been printed.

        Raises:
            OSError: nobody reads it any more.
        """
        while not self._printed.empty():
            self._printed.get()()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Show what has no end of line, and leave the terminal in order: a rank that was killed while it drew a live
        line left the cursor hidden and in mid-line. Nothing can be shown after it; see `finished`."""
        for rank, rest in self._rest.items():
            if rest:
                self._write(self._names[rank].encode() + rest + b"\n")
        self._rest.clear()
        if self._shown and not self._names and size_of(self._out) is not None:
            self._write(SHOW_CURSOR if self._at_line_start else SHOW_CURSOR + b"\r\n")
        self._to_print.put(None)

    @property
    def finished(self) -> bool:
        """Return whether all is printed."""
        return self._thread is None or not self._thread.is_alive()

    def _write(self, data: bytes, then: Callable[[], None] = lambda: None) -> None:
        if data:
            self._shown = True
            self._at_line_start = data.endswith((b"\n", b"\r"))
        if self._thread is None:
            self._thread = threading.Thread(target=self._print, daemon=True, name="screen")
            self._thread.start()
        self._to_print.put((data, then))

    def _print(self) -> None:
        try:
            while (item := self._to_print.get()) is not None:
                data, then = item
                while data:
                    try:
                        data = data[os.write(self._out, data) :]
                    except BlockingIOError:  # the user's end does not block
                        select.select([], [self._out], [])
                self._printed.put(then)
        except OSError as error:
            self._error = error
