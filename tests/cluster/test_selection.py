"""Filters of hosts and slots, and device masks."""

from __future__ import annotations

import pytest

from launcher.cluster.hostfile import Host
from launcher.cluster.selection import masked_devices, select
from launcher.errors import ConfigError

HOSTS = [Host("w0", (0, 1, 2, 3)), Host("w1", (0, 1, 2, 3)), Host("me@w2", (5, 6))]
ALL = {"w0": "0123", "w1": "0123", "me@w2": "56"}


def chosen(**flags: object) -> dict[str, str]:
    return {h.name: "".join(map(str, h.slots)) for h in select(HOSTS, **flags)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ALL),
        ({"include": "w0@w1:0,2"}, {"w0": "0123", "w1": "02"}),
        ({"include": "w1@w0"}, {"w0": "0123", "w1": "0123"}),
        ({"include": "w0:0@w0:2"}, {"w0": "02"}),
        ({"include": "w0:0-2@me@w2:6"}, {"w0": "012", "me@w2": "6"}),
        ({"include": "me@w2@w1:3"}, {"w1": "3", "me@w2": "56"}),
        ({"exclude": "w1:0"}, {**ALL, "w1": "123"}),
        ({"exclude": "w0@w1:1-3"}, {"w1": "0", "me@w2": "56"}),
        ({"num_nodes": 2, "num_gpus": 3}, {"w0": "012", "w1": "012"}),
        ({"num_gpus": 1}, {"w0": "0", "w1": "0", "me@w2": "5"}),
    ],
)
def test_what_is_chosen(flags: dict[str, object], expected: dict[str, str]) -> None:
    assert chosen(**flags) == expected
    assert list(chosen(**flags)) == list(expected)  # in the order of the hostfile


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"include": "w9"}, "'w9' is not a host of this run"),
        ({"include": "w0:7"}, "w0 has no slot 7"),
        ({"include": "w0:"}, "is neither a slot"),
        ({"include": "w0:a"}, "'a' in 'a' is neither a slot"),
        ({"include": "w0", "exclude": "w1"}, "are mutually exclusive"),
        ({"include": "w0", "num_gpus": 1}, "are mutually exclusive"),
        ({"exclude": "w0@w1@me@w2"}, "excludes every slot of all 3 hosts"),
        ({"num_nodes": 4}, "the number of hosts is 3"),
        ({"num_gpus": 3}, "me@w2 has 2 slots"),
    ],
)
def test_what_cannot_be_chosen(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen(**flags)


def test_slots_are_counted_inside_of_a_mask() -> None:
    assert masked_devices(None, [0, 2], "w0") == "0,2"
    assert masked_devices("4,5,6,7", [0, 2], "w0") == "4,6"
    assert masked_devices("GPU-aa, GPU-bb", [1], "w0") == "GPU-bb"
    with pytest.raises(ConfigError, match="slot 2 was requested, but the device mask shows 2"):
        masked_devices("GPU-aa,GPU-bb", [2], "w0")
