"""Rank 0 on the user's terminal: a pseudo-terminal, so that live progress lines work, copied to its log.

Only used when the launcher's own output is a terminal; otherwise torch elastic's tee does the work.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import threading
from pathlib import Path

ESCAPE_SEQUENCE = re.compile(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9])")
SHOW_CURSOR = b"\x1b[?25h\x1b[0m"
CHECK_S = 0.1


class LineLog:
    """Writes terminal output as plain lines: no escape sequences, a redrawn line in its last state."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._line = b""

    @property
    def at_line_start(self) -> bool:
        return not _last_state(self._line)

    def write(self, data: bytes) -> None:
        *finished, self._line = (self._line + data).split(b"\n")
        for line in finished:
            self._file.write(_last_state(line) + b"\n")
        # A live line is redrawn for hours without an end: keep only what may still be visible.
        self._line = self._line[self._line.rfind(b"\r", 0, -1) + 1 :] if b"\r" in self._line else self._line

    def close(self) -> None:
        if _last_state(self._line):
            self._file.write(_last_state(self._line) + b"\n")
        self._file.close()


class TerminalCopy:
    """A pseudo-terminal whose output goes to the user's terminal and, cleaned, to a log file.

    Args:
        log: path of the log.
        terminal: file descriptor of the user's terminal.
    """

    def __init__(self, log: Path, terminal: int = 1) -> None:
        self._terminal, self._log = terminal, LineLog(log)
        self._master, self._slave = pty.openpty()
        attributes = termios.tcgetattr(self._slave)
        attributes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once is enough
        termios.tcsetattr(self._slave, termios.TCSANOW, attributes)
        self._size = b""
        self._copy_size()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="terminal copy", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """What a rank opens as its stdout."""
        return os.ttyname(self._slave)

    def close(self) -> None:
        """Copy what is left and close; call it when the rank has ended."""
        self._ended.set()
        self._thread.join()
        # A rank that was killed while it drew a live line left the cursor hidden and in mid-line.
        _write_all(self._terminal, SHOW_CURSOR if self._log.at_line_start else SHOW_CURSOR + b"\r\n")
        self._log.close()
        os.close(self._slave)
        os.close(self._master)

    def _copy(self) -> None:
        while True:
            ended = self._ended.is_set()
            ready, _, _ = select.select([self._master], [], [], 0 if ended else CHECK_S)
            if ready:
                data = os.read(self._master, 65536)
                self._log.write(data)
                _write_all(self._terminal, data)
            elif ended:
                return
            else:
                self._copy_size()

    def _copy_size(self) -> None:
        size = fcntl.ioctl(self._terminal, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        if size != self._size:
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
            self._size = size


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _last_state(line: bytes) -> bytes:
    states = [state for state in ESCAPE_SEQUENCE.sub(b"", line).split(b"\r") if state.strip()]
    return states[-1] if states else b""
