"""For runners whose command forwards no input (pdsh): the agent waits for a TCP connection, and that is its stream.

What runs first on the node makes a key, and tells it together with its port through the runner's output, which only the
front end reads; who connects must know the key. The stream itself is not encrypted.
"""

from __future__ import annotations

import base64
import socket

from launcher.cluster.wire import Message

_LISTENER = """
import json, os, secrets, socket
key = secrets.token_hex(16)
server = socket.create_server(("", 0))
server.settimeout(30)
known = os.environ.get("SSH_CONNECTION", "").split()[2:3]
told = {"is": "dial", "port": server.getsockname()[1], "key": key, "addresses": known}
os.write(1, b"\\x1e" + json.dumps(told).encode() + b"\\n")
while True:
    peer, _ = server.accept()
    peer.settimeout(5)
    if secrets.compare_digest(peer.recv(len(key), socket.MSG_WAITALL), key.encode()):
        break
    peer.close()
peer.settimeout(None)
os.dup2(peer.fileno(), 0)
os.dup2(peer.fileno(), 1)
peer.close()
server.close()
"""
DIAL_S = 3.0


def one_line(then: str) -> str:
    """The listener, then `then`, as a line that no shell and no pattern of pdsh changes."""
    text = base64.b64encode((_LISTENER + then).encode()).decode()
    return f'import base64; exec(base64.b64decode("{text}"))'


def dial(told: Message, host: str) -> socket.socket:
    """Connect to the listener.

    Raises:
        OSError: it cannot be reached.
    """
    error = OSError(f"no address of {host}")
    for address in (*told["addresses"], host.rpartition("@")[2]):
        try:
            connection = socket.create_connection((address, told["port"]), timeout=DIAL_S)
        except OSError as failed:
            error = failed
            continue
        connection.sendall(told["key"].encode())
        connection.setblocking(False)
        return connection
    raise error
