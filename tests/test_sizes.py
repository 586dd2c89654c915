"""Human-readable byte counts."""

from __future__ import annotations

import pytest

from launcher.sizes import bytes_of, in_words


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4096", 4096),
        (5e9, 5 * 10**9),
        (1e18, 10**18),
        ("80GiB", 80 << 30),
        ("24 GB", 24 * 10**9),
        ("5gb", 5 * 10**9),
        ("1.5K", 1536),
        ("512M", 512 << 20),
        ("7B", 7),
    ],
)
def test_sizes(text: str | float, wanted: int) -> None:
    assert bytes_of(text) == wanted


@pytest.mark.parametrize("text", ["", "lots", "80 lots", "-1G", "1.2.3", "GiB", "5PB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of bytes"):
        bytes_of(text)


def test_words() -> None:
    assert [in_words(number) for number in (0, 10 << 20, 1 << 28, 3 << 39)] == [
        "0.0 MiB",
        "10.0 MiB",
        "0.25 GiB",
        "1,536.00 GiB",
    ]
