"""Checks whether the Hugging Face Hub is reachable; otherwise its library would retry for half a minute."""

from __future__ import annotations

import os
import socket
import urllib.request
from urllib.parse import urlsplit

HUB = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = {"1", "ON", "YES", "TRUE"}  # as huggingface_hub reads them


def unreachable() -> str:
    """Return why the Hub is unreachable, or "" if it seems reachable; sends no request."""
    said = next((name for name in _OFFLINE if os.environ.get(name, "").upper() in _TRUE), None)
    if said is not None:
        return f"{said} is set, so {HUB} is not contacted"
    return "" if _has_address(HUB) else f"{HUB} cannot be reached"


def _has_address(url: str) -> bool:
    """Return whether the host name of the URL resolves."""
    if urllib.request.getproxies():
        return True  # the proxy resolves the name
    try:
        return bool(socket.getaddrinfo(urlsplit(url).hostname, 443))
    except (OSError, ValueError):  # unknown host, or invalid URL
        return False
