"""A pseudo-terminal for rank 0, so that progress bars work on the user's terminal; copied to the rank's log.

Only used if the front end's own output is a terminal. Otherwise rank 0 writes to its log, which the agent
reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import termios
from pathlib import Path

from launcher.cluster.node_spec import open_log

ESCAPE_SEQUENCE = re.compile(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]*+(?:\x07|\x1b\\)|[()][A-Z0-9])")
LONGEST = 1 << 20
"""Most bytes kept of an unfinished line."""
SHOW_CURSOR = b"\x1b[?25h\x1b[0m"


class LineLog:
    """Writes terminal output as plain lines: no escape sequences, and only the last state of a redrawn line.

    Args:
        keep: append to what the file already contains.
    """

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        self._file = open_log(path, keep=keep)
        self._line = b""
        self.problem: OSError | None = None
        """Why the log has ended before the output; the run need not end for it."""

    def write(self, data: bytes) -> None:
        *finished, self._line = (self._line + data).split(b"\n")
        for line in finished:
            self._keep(_last_state(line) + b"\n")
        # A progress bar is redrawn for hours without a newline: keep only what may still be visible.
        self._line = self._line[self._line.rfind(b"\r", 0, -1) + 1 :] if b"\r" in self._line else self._line
        if len(self._line) > LONGEST:
            self._keep(self._line)
            self._line = b""

    def close(self) -> None:
        if _last_state(self._line):
            self._keep(_last_state(self._line) + b"\n")
        self._file.close()

    def _keep(self, data: bytes) -> None:
        if self.problem is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.problem = error


class PseudoTerminal:
    """A pseudo-terminal for a rank. Its output is read, cleaned, and written to a log.

    Args:
        log: path of the log.
        size: rows and columns of the user's terminal.
        keep: append to what the log already contains.

    Attributes:
        slave: file descriptor that the rank writes to.
    """

    def __init__(self, log: Path, size: tuple[int, int], *, keep: bool = False) -> None:
        self._log, self._told = LineLog(log, keep=keep), False
        self._master, self.slave = pty.openpty()
        attributes = termios.tcgetattr(self.slave)
        attributes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once is enough
        termios.tcsetattr(self.slave, termios.TCSANOW, attributes)
        os.set_blocking(self._master, False)
        self.resize(*size)

    def read(self) -> bytes:
        """Return what was written since the last call."""
        ready, _, _ = select.select([self._master], [], [], 0)
        data = b""
        if ready:
            with contextlib.suppress(OSError):
                data = os.read(self._master, 65536)
        self._log.write(data)
        if self._log.problem is not None and not self._told:
            self._told = True
            data += f"launch: the log ends here: {self._log.problem.strerror}\n".encode()
        return data

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        """Close the terminal. Call this once the rank has ended and `read` returns nothing more."""
        self._log.close()
        os.close(self.slave)
        os.close(self._master)


def size_of(descriptor: int) -> tuple[int, int] | None:
    """Return the rows and columns of a terminal; None if the descriptor is not a terminal."""
    try:
        packed = fcntl.ioctl(descriptor, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    except OSError:
        return None
    rows, columns, _, _ = struct.unpack("HHHH", packed)
    return rows, columns


def _last_state(line: bytes) -> bytes:
    states = [state for state in ESCAPE_SEQUENCE.sub(b"", line).split(b"\r") if state.strip()]
    return states[-1] if states else b""
