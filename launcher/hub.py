"""Checks whether the Hugging Face Hub can be reached; without it, its library would retry for half a minute."""

from __future__ import annotations

import os
import socket
import urllib.request
from urllib.parse import urlsplit

HUB = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = {"1", "ON", "YES", "TRUE"}  # as huggingface_hub reads them


def unreachable() -> str:
    """Return why the Hub cannot be asked; "" where it can, as far as is known without asking."""
    said = next((name for name in _OFFLINE if os.environ.get(name, "").upper() in _TRUE), None)
    if said is not None:
        return f"{said} is set, so {HUB} is not asked"
    return "" if _has_address(HUB) else f"{HUB} cannot be reached"


def _has_address(url: str) -> bool:
    """Return whether the name of a host has an address."""
    if urllib.request.getproxies():
        return True  # the proxy looks it up
    try:
        return bool(socket.getaddrinfo(urlsplit(url).hostname, 443))
    except (OSError, ValueError):  # no such name, or no such URL
        return False
