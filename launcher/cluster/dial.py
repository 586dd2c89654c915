"""Control stream for runners whose command forwards no input (pdsh): a TCP connection to the agent.

The code that runs first on the node creates a token and reports it, together with its port, through the
runner's output, which only the front end reads. The connection then begins with a handshake (`handshake.py`).
"""

from __future__ import annotations

import base64
import socket
import zlib
from pathlib import Path

from launcher.cluster import handshake
from launcher.cluster.wire import Message

FRONT_END = "0"
"""The front end's claim in the handshake."""
DIAL_S = 3.0
LISTEN_S = 30.0
"""How long an agent waits for the front end."""
_LISTENER = f"""
import json, os
token = secrets.token_hex(16)
server = socket.create_server(("", 0), backlog=128)
known = os.environ.get("SSH_CONNECTION", "").split()[2:3]
told = {{"is": "dial", "port": server.getsockname()[1], "key": token, "addresses": known}}
os.write(1, b"\\x1e" + json.dumps(told).encode() + b"\\n")
found = next(callers(server, token, time.monotonic() + {LISTEN_S}), None)
if found is None:
    raise SystemExit("the front end did not connect within {LISTEN_S:g} s")
server.close()
serve_at(*found)
"""


def one_line() -> str:
    """Return the listener as one line that neither a shell nor the patterns of pdsh change."""
    source = Path(handshake.__file__).read_text(encoding="utf-8") + _LISTENER
    text = base64.b64encode(zlib.compress(source.encode(), 9)).decode()
    return f'import base64, zlib; exec(zlib.decompress(base64.b64decode("{text}")))'


def dial(told: Message, host: str) -> tuple[socket.socket, handshake.SignedSession]:
    """Connect to the listener.

    Raises:
        OSError: the listener cannot be reached.
    """
    error = OSError(f"no address for {host}")
    for address in (*told["addresses"], host.rpartition("@")[2]):
        try:
            connection = socket.create_connection((address, told["port"]), timeout=DIAL_S)
        except OSError as failed:
            error = failed
            continue
        try:
            return connection, handshake.call(connection, told["key"], FRONT_END, DIAL_S)
        except (OSError, ValueError) as failed:
            connection.close()
            error = OSError(f"another program answers there: {failed}")
    raise error
