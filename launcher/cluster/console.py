"""Console output of the ranks: rank 0 unchanged, or whole lines of several ranks after their names."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable

from launcher.cluster.terminal import LONGEST, SHOW_CURSOR, size_of


class ConsoleWriter:
    """Prints the output of ranks to a file descriptor, at the pace of its reader.

    A thread does the blocking writes, so that the front end can continue. The amount of queued output is
    bounded by its senders, which are notified of what has been printed (`agent.py`).

    Args:
        names: the name of each displayed rank, printed before its lines; if empty, bytes are printed
            unchanged.
        out: file descriptor of the user's terminal, or of the file or pipe in its place.
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
        """Return the rows and columns of the terminal if rank 0 is printed to one unchanged, else None."""
        return None if self._names else size_of(self._out)

    def show(self, rank: int, data: bytes, then: Callable[[], None] = lambda: None) -> None:
        """Queue `data` for printing; `flush` calls `then` once it is printed."""
        if not self._names:
            self._write(data, then)
            return
        *lines, rest = (self._rest.get(rank, b"") + data).split(b"\n")
        if len(rest) > LONGEST:  # do not buffer more of an unfinished line
            lines.append(rest)
            rest = b""
        self._rest[rank] = rest
        name = self._names[rank].encode()
        # A progress bar redraws its line; print only the last state.
        text = b"".join(name + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines)
        self._write(text, then)

    def flush(self) -> None:
        """Call the callbacks of all output that has been printed.

        Raises:
            OSError: the reader of the output is gone.
        """
        while not self._printed.empty():
            self._printed.get()()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Print unfinished lines and restore the terminal. Nothing can be shown afterwards; see `finished`.

        A rank that was killed while it drew a progress bar leaves the cursor hidden and in mid-line.
        """
        for rank, rest in self._rest.items():
            if rest:
                self._write(self._names[rank].encode() + rest + b"\n")
        self._rest.clear()
        if self._shown and not self._names and size_of(self._out) is not None:
            self._write(SHOW_CURSOR if self._at_line_start else SHOW_CURSOR + b"\r\n")
        self._to_print.put(None)

    @property
    def finished(self) -> bool:
        """Return whether all output is printed."""
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
                    except BlockingIOError:  # the descriptor is non-blocking
                        select.select([], [self._out], [])
                self._printed.put(then)
        except OSError as error:
            self._error = error
