"""Which third-party programs are run, and which are not (data)."""

from __future__ import annotations

from tests.clients import checkouts, deepspeeds, packages
from tests.clients.client import Client

CLIENTS: list[Client] = [
    *packages.trl(),
    *packages.lightning(),
    *packages.trainers(),
    *deepspeeds.examples(),
    *checkouts.accelerates(),
    *checkouts.factory(),
    *checkouts.suites(),
]

NOT_RUN: dict[str, str] = {
    "transformers' model zoo of DeepSpeed tests": "fp16 with example scripts and 28 models of the hub",
}
"""Client -> the reason why it was not run."""
