"""Which variables are forwarded, and that they arrive unchanged."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cluster.environment import asked_for, parse_file, passed_on
from launcher.cluster.hostfile import Host
from launcher.cluster.node import ONE_LINE
from launcher.cluster.ray_nodes import RayNodes
from launcher.cluster.runners import RUNNERS, RunnerOptions, command
from launcher.cluster.wire import MARK
from launcher.errors import ConfigError

# What an operating system takes as a value: any characters but NUL, undecodable bytes among them.
VALUES = st.text(
    st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]) | st.just("\udc80"), max_size=40
)


def test_prefixes_and_names_are_passed_on_and_the_nodes_own_are_not() -> None:
    environment = {
        "NCCL_DEBUG": "1",
        "HF_HOME": "/x",
        "PATH": "/bin",
        "SECRET": "s",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert passed_on(environment) == {"NCCL_DEBUG": "1", "HF_HOME": "/x", "PATH": "/bin"}


def test_file_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for directory, text in ((home, "A=home\nB=home\n"), (here, "B=here\nC=here\n")):
        directory.mkdir()
        (directory / ".deepspeed_env").write_text(text)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    found = asked_for(["C=x=y", "FROM_HERE"], {"FROM_HERE": " $HOME\n"})
    assert found == {"A": "home", "B": "here", "C": "x=y", "FROM_HERE": " $HOME\n"}
    for wrong, said in (("1A=2", "not a valid variable name"), ("NOT_SET", "is not set here")):
        with pytest.raises(ConfigError, match=said):
            asked_for([wrong], {})


def test_lines_of_the_file() -> None:
    text = """# comment

PLAIN = a b $HOME `x`   # a remark
export HASH=a#b
DOUBLE="say \\"hi\\" # no remark
on two lines"
SINGLE='$x "y" \\'
EMPTY=
LAST=1"""
    assert parse_file(text, "file") == {
        "PLAIN": "a b $HOME `x`",
        "HASH": "a#b",
        "DOUBLE": 'say "hi" # no remark\non two lines',
        "SINGLE": '$x "y" \\',
        "EMPTY": "",
        "LAST": "1",
    }


@pytest.mark.parametrize("line", ["NAME", "=x", "2A=1", 'A="open', "A='open", 'A="x" y'])
def test_wrong_line_of_the_file(line: str) -> None:
    with pytest.raises(ConfigError, match="file:2"):
        parse_file(f"GOOD=1\n{line}\n", "file")


@given(VALUES)
def test_quoted_values_come_out_as_they_went_in(value: str) -> None:
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    assert parse_file(f'A="{quoted}"\nB=1', "file") == {"A": value, "B": "1"}


@given(st.lists(VALUES, max_size=4))
def test_values_reach_a_process_behind_a_shell_byte_for_byte(values: list[str]) -> None:
    # As sshd does it: a shell reads the command; what is to be said comes through standard input.
    line = command("ssh", Host("node1", (0,)), RunnerOptions(python="python3"))[-1]
    code = "import os; os.environ.update(hello['environment']); os.write(1, repr(dict(os.environb)).encode())"
    hello = {"environment": {f"V{i}": value for i, value in enumerate(values)}, "code": code}
    # Each example is a process: only the encoding is tried here for most of them.
    text = json.dumps(hello)
    assert json.loads(text) == hello and "\n" not in text
    if values and len(values[0]) > 30:
        done = subprocess.run(
            ["sh", "-c", line], input=text + "\n", capture_output=True, text=True, check=True
        )
        found = eval(done.stdout)
        for i, value in enumerate(values):
            assert found[f"V{i}".encode()] == os.fsencode(value)


def test_commands_of_the_runners_hold_no_value_and_nothing_for_a_shell() -> None:
    assert not set(ONE_LINE) & set("'$`\\%!\n")
    host = Host("node1", (0, 1))
    options = RunnerOptions(extra=("--more",), ssh_port=2222, ray=RayNodes([host], "socket"))
    for name in RUNNERS:
        words = command(name, host, options)
        assert ("--more" in words) == (name != "ray") and any("node1" in word for word in words)
        assert (ONE_LINE in words[-1]) != RUNNERS[name].dials
    assert MARK not in ONE_LINE.encode()
