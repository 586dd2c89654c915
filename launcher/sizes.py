"""Parsing and formatting of sizes in bytes."""

from __future__ import annotations

import re

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def bytes_of(text: str | float) -> int:
    """Return the number of bytes of a number or a text such as "80GiB", "24 GB", "512M" or "4096".

    K, M, G and T without "B" are powers of 1024.

    Raises:
        ValueError: the text is not a size.
    """
    if not isinstance(text, str):
        return int(text)
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([kmgt]?)(i?b)?\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is not a number of bytes; use for example 512M or 80GiB")
    decimal = (found[3] or "").upper() == "B"
    return int(float(found[1]) * (1000 if decimal else 1024) ** _POWERS[found[2].upper()])


def gib(number: float) -> str:
    """Return the number in GiB, such as "1.37"."""
    return f"{number / (1 << 30):,.2f}"


def in_words(number: float) -> str:
    """Return the number with its unit, such as "1.37 GiB" or "10.6 MiB"."""
    return f"{number / (1 << 30):,.2f} GiB" if number >= 1 << 28 else f"{number / (1 << 20):,.1f} MiB"
