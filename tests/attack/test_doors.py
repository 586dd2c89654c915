"""Authentication of connections: the port of `--no_ssh`, and the port that pdsh's agent opens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from launcher.cli.manifest import print_manifest
from launcher.cluster import dial, handshake
from launcher.cluster.handshake import SignedSession
from launcher.cluster.hostfile import Host
from launcher.cluster.join import TOKEN, JoinServer, connect, token_of
from launcher.cluster.node import Node
from launcher.cluster.wire import MARK, Message, MessageReader, MessageWriter
from launcher.errors import ConfigError
from tests.cluster.launching import launch, launching, started
from tests.cluster.test_elastic import free_port

WORD = "0123456789abcdef"
LIMIT_S = 20.0
RUDE = (
    b"",
    b"3f",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 4000,
    (1 << 30).to_bytes(8, "big") + b"x" * 64,
    b"\n" * 99,
)
"""What strangers say: nothing, half a line, garbage, a length of 1 GB."""


@pytest.fixture
def listener() -> Iterator[tuple[socket.socket, list[tuple[socket.socket, SignedSession]]]]:
    """Yield a listening socket, and the callers that have authenticated."""
    inside: list[tuple[socket.socket, SignedSession]] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        until = time.monotonic() + LIMIT_S

        def listen() -> None:
            for found in handshake.callers(server, WORD, until):
                inside.append(found)

        threading.Thread(target=listen, daemon=True).start()
        yield server, inside


def connected(server: socket.socket) -> socket.socket:
    return socket.create_connection(server.getsockname(), timeout=5)


def heard(connection: socket.socket, limit_s: float = 2.0) -> bytes:
    """Return all data until the other side closes or stops sending."""
    connection.settimeout(limit_s)
    said = b""
    try:
        while data := connection.recv(1000):
            said += data
    except OSError:
        pass
    return said


def claims(inside: list[tuple[socket.socket, SignedSession]]) -> list[str]:
    """Return the authenticated callers after a first one.

    The listener learns of a caller slightly later than the caller.
    """
    until = time.monotonic() + LIMIT_S
    while not inside and time.monotonic() < until:
        time.sleep(0.01)
    return [session.claim for _, session in inside]


def test_a_listener_says_a_nonce_and_no_more_to_strangers(listener) -> None:  # type: ignore[no-untyped-def]
    server, inside = listener
    with connected(server) as silent:
        assert heard(silent, 0.3) == b""
    nonce, proof = b"0" * handshake.NONCE, b"0" * handshake.SIGN
    for said in (nonce + b"\n1 " + proof + b"\n", nonce + b"\n1\n", nonce + b"\n\xff\n"):
        with connected(server) as stranger:
            stranger.sendall(said)
            assert len(heard(stranger)) in (0, handshake.NONCE + 1)
    assert not inside


def test_strangers_do_not_hold_up_who_knows_the_token(listener) -> None:  # type: ignore[no-untyped-def]
    server, inside = listener
    with ExitStack() as stack:
        for said in RUDE * 20:
            stranger = stack.enter_context(connected(server))
            stranger.sendall(said)
        began = time.monotonic()
        friend = stack.enter_context(connected(server))
        assert handshake.call(friend, WORD, "1", LIMIT_S).claim == "1"
        assert time.monotonic() - began < handshake.ANSWER_S
        assert claims(inside) == ["1"]


def test_a_proof_is_of_one_role_one_node_and_one_time(listener) -> None:  # type: ignore[no-untyped-def]
    """A listener's answer, an old proof, or a proof for another node does not authenticate another connection."""
    server, inside = listener
    with connected(server) as one, connected(server) as other:
        mine = "a" * handshake.NONCE
        one.sendall(mine.encode() + b"\n")
        nonces = mine, handshake.read_line(one, time.monotonic() + 5)
        good = handshake.proof(WORD, "caller", nonces, "1")
        reflected = handshake.proof(WORD, "listener", nonces, "1")
        other.sendall(f"{mine}\n1 {good}\n".encode())  # replayed: the listener's nonce is another
        assert len(heard(other)) <= handshake.NONCE + 1
        for lie in (f"2 {good}", f"1 {reflected}"):
            with connected(server) as third:
                third.sendall(f"{mine}\n{lie}\n".encode())
                assert len(heard(third)) <= handshake.NONCE + 1
        assert not inside
        one.sendall(f"1 {good}\n".encode())
        assert handshake.read_line(one, time.monotonic() + 5) == reflected
        assert claims(inside) == ["1"]


def test_a_caller_takes_no_word_of_who_does_not_know_the_token() -> None:
    """A false node 0 returns the caller's own proof, or makes one with another token."""
    for lie in (lambda line: line.split(b" ")[1], lambda line: b"0" * handshake.SIGN + b"\n"):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer(lie=lie, server=server) -> None:  # type: ignore[no-untyped-def]
                peer, _ = server.accept()
                peer.recv(100)
                peer.sendall(b"b" * handshake.NONCE + b"\n")
                peer.sendall(lie(peer.recv(200)))

            thread = threading.Thread(target=answer)
            thread.start()
            with connected(server) as caller, pytest.raises(ValueError, match="another token"):
                handshake.call(caller, WORD, "1", 5.0)
            thread.join()


def pair(*tokens: str) -> tuple[SignedSession, SignedSession]:
    nonces = "a" * 32, "b" * 32
    return tuple(SignedSession(tokens[0], nonces, "1", is_caller) for is_caller in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("attack", ["none", "changed", "added", "repeated", "left out", "turned back"])
def test_who_stands_in_between_changes_no_line(attack: str) -> None:
    caller, listener = pair(WORD)
    lines = [caller.sends.closed(json.dumps({"do": n}).encode()) for n in range(4)]
    match attack:
        case "changed":
            lines[1] = lines[1][:-2] + b"7}"
        case "added":
            lines.insert(1, b"0" * handshake.SIGN + b'{"do": "start"}')
        case "repeated":
            lines.insert(1, lines[0])
        case "left out":
            del lines[1]
        case "turned back":
            lines[1] = listener.sends.closed(b'{"do": "start"}')
    read, write = os.pipe()
    os.write(write, b"".join(MARK + line + b"\n" for line in lines))
    reader = MessageReader(read, listener.takes)
    said = [message["do"] for message in reader.read()]
    os.close(write)
    os.close(read)
    assert said == ([0, 1, 2, 3] if attack == "none" else [0])
    assert reader.forged == reader.ended == (attack != "none")


def test_a_line_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.cluster.wire.LONGEST", 1 << 17)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(0.1)
        reader, sent = MessageReader(ours.fileno()), 0
        while not reader.ended and sent < 1 << 22:
            sent += theirs.send(b"x" * (1 << 16))
            reader.read()
        assert reader.ended and sent < 1 << 20


def test_no_token_no_door(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text("fedcba9876543210\n")
    file.chmod(0o600)
    assert token_of({TOKEN: WORD}, None, insecure=False, makes=False) == WORD
    assert token_of({TOKEN: WORD}, str(file), insecure=False, makes=False) == "fedcba9876543210"
    assert token_of({}, None, insecure=True, makes=False) == ""
    for environment in ({}, {TOKEN: ""}, {TOKEN: "secret"}, {TOKEN: "x\n" * 16}):
        with pytest.raises(ConfigError, match="token"):
            token_of(environment, None, insecure=False, makes=False)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="every user of this machine can read"):
        token_of({}, str(file), insecure=False, makes=True)
    log = tmp_path / "log"
    log.touch(0o644)
    log.chmod(0o644)
    with log.open("w") as open_to_all, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", open_to_all)
        with pytest.raises(ConfigError, match="other users can read"):
            token_of({}, None, insecure=False, makes=True)
    made = {token_of({}, None, insecure=False, makes=True) for _ in range(2)}
    said = capfd.readouterr().err
    assert len(made) == 2 and all(len(token) == 32 and f"export {TOKEN}={token}" in said for token in made)


SCRIPT = """
import json, os, pathlib
names = ("HF_TOKEN", "WORD", "LAUNCHER_TOKEN")
pathlib.Path("told" + os.environ["RANK"]).write_text(json.dumps([os.environ.get(name) for name in names]))
"""


def nodes(cwd: Path, port: int, *flags: str) -> list[tuple[str, ...]]:
    common = ("--no_ssh", "--num_nodes", "2", "--device", "cpu", "--master_addr", "127.0.0.1", *flags)
    return [(*common, "--master_port", str(port), "--node_rank", str(rank), "script.py") for rank in (0, 1)]


def test_the_token_that_node_0_prints_lets_others_in_and_their_secrets_stay_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("HF_TOKEN", "hf_of_node_0")
    first, second = nodes(tmp_path, free_port(), "--export", "HF_TOKEN", "--export", "WORD=said")
    refused = launch(*second, cwd=tmp_path)
    assert refused.returncode == 2 and "no token was given" in refused.stderr
    with launching(*first, cwd=tmp_path) as node0:
        assert node0.stderr is not None
        line = node0.stderr.readline()
        monkeypatch.setenv(TOKEN, line.rpartition("=")[2].strip())
        monkeypatch.setenv("HF_TOKEN", "hf_of_node_1")
        with launching(*second, cwd=tmp_path) as node1:
            out, errors = node0.communicate(timeout=60)
            assert node0.returncode == 0, errors
            assert node1.wait(timeout=30) == 0
    told = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in (0, 1)]
    assert told == [["hf_of_node_0", "said", None], ["hf_of_node_1", "said", None]]
    assert "hf_of" not in out + errors


def test_a_node_without_the_secret_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv(TOKEN, WORD)
    first, second = nodes(tmp_path, free_port(), "--node_timeout", "3")
    with launching("--export", "API_KEY=xyzxyz", *first, cwd=tmp_path) as node0:
        process = started(second, tmp_path)
        _, errors = node0.communicate(timeout=60)
        process.communicate(timeout=60)
    assert node0.returncode == 2 and "API_KEY is not set there" in errors and "xyzxyz" not in errors


def agent(stack: ExitStack) -> tuple[subprocess.Popen[bytes], Message]:
    """Start the agent as pdsh does; return it and the port that it reports."""
    command = [sys.executable, "-c", dial.one_line()]
    pipe = subprocess.PIPE
    process = stack.enter_context(
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline().removeprefix(MARK))


def test_the_port_of_pdsh_survives_silent_and_rude_strangers() -> None:
    with ExitStack() as stack:
        _, told = agent(stack)
        for said in RUDE * 5:
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", told["port"]), timeout=5))
            stranger.sendall(said)
        began = time.monotonic()
        connection, session = dial.dial(told, "127.0.0.1")
        assert time.monotonic() - began < handshake.ANSWER_S
        stack.enter_context(connection)
        code = "import json, os; os.write(1, hello['session'].sends.closed(b'here ' + hello['word'].encode()) + b'\\n')"
        MessageWriter(connection.fileno(), session.sends).send_plain({"code": code, "word": "x"})
        line = handshake.read_line(connection, time.monotonic() + LIMIT_S)
        assert session.takes.opened(line.encode()) == b"here x"


def test_the_agent_of_pdsh_runs_no_code_of_who_has_not_proved_itself() -> None:
    with ExitStack() as stack:
        process, told = agent(stack)
        first = json.dumps({"code": "print('run')"}).encode() + b"\n"
        for said in (first, told["key"].encode() + first):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", told["port"]), timeout=5))
            stranger.sendall(said)
            assert b"run" not in heard(stranger)
        # Who stands between the front end and the agent changes the first line.
        connection, _ = dial.dial(told, "127.0.0.1")
        connection.sendall(b"0" * handshake.SIGN + first)
        assert b"run" not in heard(connection, LIMIT_S)
        assert process.wait(timeout=LIMIT_S) != 0
        connection.close()


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
def test_pods_have_a_token_and_their_manifest_no_secret(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_never_to_be_seen")
    plain = ["--kind", kind, "--image", "i", "--num_nodes", "2", "--num_gpus", "1"]
    with pytest.raises(ConfigError, match="--token_secret is missing"):
        print_manifest([*plain, "--module", "m"])
    with pytest.raises(ConfigError, match="looks like a secret") as raised:
        print_manifest([*plain, "--token_secret", "t", "--export", "HF_TOKEN", "--module", "m"])
    assert "hf_never" not in str(raised.value)
    assert print_manifest([*plain, "--insecure", "--module", "m"]) == 0
    assert "--insecure" in capsys.readouterr().out
    assert (
        print_manifest([*plain, "--token_secret", "t", "--secret", "HF_TOKEN=hub:read", "--module", "m"]) == 0
    )
    out = capsys.readouterr().out
    assert "hf_never" not in out
    assert '"name": "hub"' in out and '"key": "read"' in out and "--secret" not in out


def test_one_pod_needs_no_door(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        print_manifest(
            ["--kind", "jobset", "--image", "i", "--num_nodes", "1", "--num_gpus", "1", "--module", "m"]
        )
        == 0
    )


def test_a_door_of_another_token() -> None:
    port = free_port()
    door, nodes = JoinServer("127.0.0.1", port, WORD), [Node(Host(f"node{n}", (0,)), n, []) for n in (0, 1)]
    for token in ("", "another" * 3):
        with pytest.raises(ConfigError, match="rejected this node"):
            connect("127.0.0.1", port, 1, token, 1.0)
        door.admit(nodes)
        assert not nodes[1].connected
