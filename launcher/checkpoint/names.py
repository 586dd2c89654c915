"""The names of files and directories in a directory of checkpoints, for those that only look; imports nothing."""

from __future__ import annotations

LATEST_FILE = "latest"
UNIVERSAL_FILE = "latest_universal"
"""Written by DeepSpeed's `ds_to_universal`, which leaves `latest` as it is."""
META_FILE = "meta.json"
TMP, OLD = ".tmp-", ".old-"
"""Prefixes of the tag while a save is under way (or was killed), and of what the save replaces."""
