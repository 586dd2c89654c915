"""Which variables hold secrets, by their names and by what their values look like; texts without the values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"
SHORTEST = 6
"""Characters of a value that is looked for in texts; shorter ones stand in too many words."""
_WORDS = {
    *("TOKEN", "TOKENS", "KEY", "KEYS", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASS", "PASSPHRASE"),
    *("CREDENTIAL", "CREDENTIALS", "AUTH", "AUTHORIZATION", "COOKIE"),
}  # fmt: skip
_ENDINGS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "APIKEY", "ACCESSKEY", "SECRETKEY", "PRIVATEKEY")
_VALUES = re.compile(
    r"""(?:hf_|sk-|gh[opsur]_|github_pat_|glpat-|xox[abeoprs]-|npm_|pypi-|dckr_pat_|nvapi-|wandb_v1_)[\w-]{8,}
    | (?:AKIA|ASIA)[A-Z0-9]{12,} | AIza[\w-]{20,} | ya29\.[\w-]{8,} | eyJ[\w-]{8,}\.[\w-]+
    | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY | ://[^/@\s:]*:[^/@\s]+@""",
    re.VERBOSE,
)
"""Tokens of well-known services, keys, URLs with a password."""
_hidden: set[str] = set()


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable looks as if nobody else may read its value."""
    words = name.upper().split("_")
    named = any(word in _WORDS or word.endswith(_ENDINGS) for word in words)
    return named or _VALUES.search(value) is not None


def secrets_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that look like secrets."""
    return {name: value for name, value in variables.items() if is_secret(name, value)}


def shown(name: str, value: str) -> str:
    """The value of a variable as people may see it."""
    return MASK if is_secret(name, value) else value


def hide(values: Iterable[str]) -> None:
    """From now on `masked` leaves these out."""
    _hidden.update(value for value in values if len(value) >= SHORTEST)


def masked(text: str) -> str:
    """A text for people, without the values that are hidden, and without what looks like a token in itself."""
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, MASK)
    return _VALUES.sub(MASK, text)
