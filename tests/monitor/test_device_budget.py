"""The device memory that is available to tensors."""

from __future__ import annotations

import pytest

from launcher.errors import ConfigError
from launcher.monitor.device_budget import DeviceBudget, budget_of

GIB, MIB = 2**30, 2**20


def test_what_lies_beside_tensors_is_taken_off() -> None:
    budget = DeviceBudget(80 * GIB, context=500 * MIB, group=700 * MIB, reserve=0.05)
    assert budget.usable() == 76 * GIB - 500 * MIB  # one rank exchanges nothing
    assert budget.usable((8, 1, 1)) == 76 * GIB - 1200 * MIB
    assert budget.usable((4, 1, 2)) == 76 * GIB - 2600 * MIB  # of each axis one group, and all ranks
    words = budget.in_words((4, 1, 2))
    assert "NCCL 3 x 0.68 GiB" in words and "a reserve of 5%" in words and words.startswith("73.46 GiB")
    assert DeviceBudget(GIB, context=2 * GIB).usable() == 0


def test_a_device_is_named_or_told_by_its_bytes() -> None:
    assert budget_of("80GiB").memory == 80 * GIB
    assert 78 * GIB < budget_of("h100").memory < 80 * GIB
    assert budget_of("h100").context == 534 * MIB  # as published
    assert budget_of("h100", 0.5).usable() < 40 * GIB
    with pytest.raises(ConfigError, match="80 lots"):
        budget_of("80 lots")
    with pytest.raises(ConfigError, match="unknown GPU 'abacus'"):
        budget_of("abacus")
