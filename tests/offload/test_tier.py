"""Tiers: values round-trip next to other tensors, and mistakes are reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from launcher.errors import OffloadError
from launcher.offload.nvme import NvmeTier
from launcher.offload.tier import ALIGNMENT, HUGE_PAGE, Tier, buffer, memory


@pytest.fixture
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    made = NvmeTier(tmp_path)
    request.addfinalizer(made.close)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_values_come_back(tier: Tier, dtype: torch.dtype) -> None:
    wanted = {f"k{n}": torch.randn(n).to(dtype) for n in (0, 1, 7, 4096, 70_001)}
    for future in [tier.write(key, tensor) for key, tensor in wanted.items()]:
        future.result()
    got = {key: torch.empty_like(tensor) for key, tensor in wanted.items()}
    for future in [tier.read(key, into) for key, into in reversed(got.items())]:
        future.result()
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)


def test_a_tensor_that_rests_is_a_copy_and_is_overwritten_in_place(tier: Tier) -> None:
    tensor, other = torch.arange(5000.0), torch.arange(5000.0) + 1
    tier.write("a", tensor).result()
    tier.write("b", other).result()
    tensor.neg_()
    tier.read("a", into := torch.empty(5000)).result()
    assert torch.equal(into, torch.arange(5000.0))
    tier.write("a", tensor).result()
    tier.read("a", into).result()
    assert torch.equal(into, -torch.arange(5000.0))
    tier.read("b", into).result()
    assert torch.equal(into, other)


@pytest.mark.parametrize("mistake", ["never", "freed", "longer", "strided", "write longer"])
def test_mistakes_name_the_key(tier: Tier, mistake: str) -> None:
    tier.write("moment", torch.ones(8)).result()
    if mistake == "freed":
        tier.free("moment")
    calls: dict[str, Callable[[], object]] = {
        "never": lambda: tier.read("other moment", torch.empty(8)),
        "freed": lambda: tier.read("moment", torch.empty(8)),
        "longer": lambda: tier.read("moment", torch.empty(9)),
        "strided": lambda: tier.read("moment", torch.empty(8, 2)[:, 0]),
        "write longer": lambda: tier.write("moment", torch.empty(9)),
    }
    with pytest.raises(OffloadError, match="moment"):
        calls[mistake]()


def test_a_freed_key_may_come_back_with_another_size(tier: Tier) -> None:
    tier.write("a", torch.ones(10_000)).result()
    tier.free("a")
    tier.write("a", torch.full((3,), 2.0)).result()
    tier.read("a", into := torch.empty(3)).result()
    assert into.tolist() == [2, 2, 2]


def test_room_that_is_not_there_is_said_with_both_numbers(tier: Tier) -> None:
    with pytest.raises(OffloadError, match=r"1,000,000,000,000,000 bytes are needed, [\d,]+ "):
        tier.reserve(10**15)


@pytest.mark.parametrize("numel", [1, 1000, 5_000_000])
def test_buffers_are_aligned_and_outlive_their_makers(numel: int) -> None:
    made = buffer(numel, torch.bfloat16)
    assert made.data_ptr() % ALIGNMENT == 0 and made.shape == (numel,)
    part = made.fill_(3)[-1:]
    del made
    assert part.item() == 3


def pages_of(address: int) -> tuple[str, int]:
    """Return the flags of the mapping of an address in this process, and KiB of huge pages there."""
    inside, huge = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = start <= address < end
        elif inside and line.startswith("AnonHugePages"):
            huge = int(line.split()[1])
        elif inside and line.startswith("VmFlags"):
            return line, huge
    raise AssertionError("no mapping holds the address")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here")
def test_what_lives_long_lies_in_huge_pages_and_takes_no_more_than_it_needs() -> None:
    made = memory(5 * HUGE_PAGE // 8, torch.float32, torch.device("cpu")).zero_()  # 2.5 of them
    assert made.data_ptr() % HUGE_PAGE == 0
    flags, huge = pages_of(made.data_ptr())
    assert " hg" in flags
    assert huge * 1024 <= 2 * HUGE_PAGE
    assert memory(1000, torch.bfloat16, torch.device("cpu")).shape == (1000,)
