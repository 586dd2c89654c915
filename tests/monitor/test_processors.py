"""A single warning about 16-bit training on CPUs without instructions for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.monitor import processors

OLD_X86 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\n"
NEW_X86 = "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimdhp i8mm bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "bf16", "fp16"),
    [
        (OLD_X86, True, True),
        (NEW_X86, False, True),
        (ARM, False, False),
        ("model name: what it is\n", False, False),
    ],
    ids=["old x86", "x86 with bf16", "aarch64", "unknown"],
)
def test_instructions(cpuinfo: str, bf16: bool, fp16: bool) -> None:
    assert processors.lacks(torch.bfloat16, cpuinfo) is bf16
    assert processors.lacks(torch.float16, cpuinfo) is fp16
    assert not processors.lacks(torch.float32, cpuinfo)


def test_told_once_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cpuinfo").write_text(OLD_X86)
    monkeypatch.setattr(processors, "CPUINFO", tmp_path / "cpuinfo")
    processors.warn_of_slow_products.cache_clear()
    processors.warn_of_slow_products(torch.float32)
    processors.warn_of_slow_products(torch.bfloat16)
    processors.warn_of_slow_products(torch.bfloat16)
    processors.warn_of_slow_products.cache_clear()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "bf16" in told[0] and "fp32" in told[0]


def test_nothing_is_told_where_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processors, "CPUINFO", tmp_path / "not there")
    processors.warn_of_slow_products.cache_clear()
    processors.warn_of_slow_products(torch.bfloat16)
    processors.warn_of_slow_products.cache_clear()
    assert not caplog.records
