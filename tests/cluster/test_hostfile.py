"""Hostfiles: what is accepted, and the errors for the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.cluster.hostfile import Host, parse_hostfile, read_hostfile
from launcher.cluster.selection import select
from launcher.errors import ConfigError


def test_lines_comments_and_slot_lists() -> None:
    text = "# nodes\n\nw0 slots=4 # four\nuser@w1   slots=2\n  w2\tslots=0,2,5-7\nw3 slots=2 max_slots=4\n"
    assert parse_hostfile(text, "hosts") == [
        Host("w0", (0, 1, 2, 3)),
        Host("user@w1", (0, 1)),
        Host("w2", (0, 2, 5, 6, 7)),
        Host("w3", (0, 1)),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("w0 slots=4\nw1 slots=4x", "slots=4x is not a number"),
        ("w0 slots=4\nw1", "'w1' does not specify a host and its slots"),
        ("w0 slots=4\nw1 slots = 2", "does not specify a host"),
        ("w0 slots=4\nw1 slots=0", "needs at least one slot"),
        ("w0 slots=4\nw0 slots=2", "the host w0 is listed twice"),
        ("w0 slots=4\nw1 slots=2-1", "'2-1' in '2-1'"),
        ("w0 slots=4\nw1 slots=1,", "'' in '1,'"),
        ("w0 slots=4\n-oProxyCommand=x slots=2", "is not a valid host name"),
        ("w0 slots=4\nw1 slots=2 slots=3", "does not specify a host"),
    ],
)
def test_wrong_line_is_named_with_its_number_and_text(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts")
    assert said in str(caught.value) and f"hosts:2: {text.splitlines()[1]}" in str(caught.value)


def test_no_host_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no hosts"):
        parse_hostfile("# nothing\n", "hosts")
    with pytest.raises(ConfigError, match="does not exist"):
        read_hostfile(str(tmp_path / "absent"))


def _calls(count: int) -> int:
    """Return the number of function calls to read and select from ``count`` hosts."""
    text = "".join(f"node{n} slots=8\n" for n in range(count))
    exclude = "@".join(f"node{n}:0-3" for n in range(0, count, 2))
    calls = 0

    def counted(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        chosen = select(parse_hostfile(text, "hosts"), exclude=exclude)
    finally:
        sys.setprofile(None)
    assert len(chosen) == count and sum(len(host.slots) for host in chosen) == 6 * count
    return calls


def test_the_work_grows_with_the_hosts_and_not_with_their_square() -> None:
    # Calls are counted, for a clock depends on what else the machine does.
    assert _calls(2000) < 11 * _calls(200)
