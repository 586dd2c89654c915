"""Detection of secrets, by the name and the form of a value, and their removal from texts and configurations.

Peers and ranks choose the texts, so the time of every pattern must be linear in their length: it starts with
something that cannot occur in its repeated part, and repetitions are possessive or short
(`tests/attack/test_secrets.py`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

from launcher.errors import printable

MASK = "***"
SHORTEST = 6
"""Least number of characters of a value that is masked in texts; shorter values occur inside too many
words."""
SHORTEST_LINE = 8
"""The same for one line of a longer value, and for a value that was inherited rather than exported
explicitly."""
_WORDS = {
    *("TOKEN", "TOKENS", "KEY", "KEYS", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASS", "PASSPHRASE"),
    *("CREDENTIAL", "CREDENTIALS", "AUTH", "AUTHORIZATION", "COOKIE", "NETRC"),
}  # fmt: skip
_ENDINGS = (
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "APIKEY", "ACCESSKEY", "SECRETKEY", "PRIVATEKEY"),
    *("SSHKEY", "SSHPASS", "PGPASS", "DBPASS"),
)
_COUNTED = {"MAX", "MIN", "NUM"}
_HARMLESS = re.compile(r"(?:^|_)EXPERIMENT_KEY$")
_HINTS = re.compile("KEY|TOKEN|SECRET|PASS|CRED")
_HEX = re.compile(r"[0-9a-fA-F]{32,128}+")
_RANDOM = re.compile(r"(?=[^0-9]*+[0-9])(?=[^a-z]*+[a-z])(?=[^A-Z]*+[A-Z])[A-Za-z0-9_+=~-]{20,}+")
"""Text that looks random; ordinary names rarely match."""
_SETTING = re.compile(
    r"""(?:^|_)(?: API_?KEY | ACCESS_?KEY(?:_ID)? | (?:WANDB|COMET)_?KEY | PRIVATE_?KEY | SECRET(?:_?KEY)?
    | (?:AUTH|ACCESS|REFRESH|BEARER|API|SESSION|HF|HUB|HUGGINGFACE|GITHUB|WANDB)_?TOKEN
    | PASSWORD | PASSWD | PASSPHRASE | CREDENTIALS? )$""",
    re.VERBOSE,
)
"""Names of flags and JSON keys that hold secrets; TOKEN or KEY alone mostly means something else in them."""

_BEGIN = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
"""Where a token may begin: not inside a word, but after an escape such as `\\n`."""
_GAP = r"(?:\s|\\[nrt]|[\\\"',])*+"
_VALUES = re.compile(
    rf"""{_BEGIN}(?:
        (?: gh[opsur]_ | github_pat_ | glpat- | xox[abeoprs]- | xapp- | dckr_pat_ | nvapi- | wandb_v1_ | pypi-Ag
          | (?:sk|rk)_(?:live|test)_ | whsec_ | dop_v1_ | lin_api_ | AGE-SECRET-KEY- )[\w-]{{8,}}+
        | hf_(?: [A-Za-z0-9]{{30,}}+ | (?=[A-Za-z]{{0,40}}[0-9])[A-Za-z0-9]{{8,}}+ )[\w-]*+
        | sk-(?: (?:ant|proj|or|svcacct|admin)-[\w-]{{8,}}+ | (?=[A-Za-z_-]{{0,40}}[0-9])[\w-]{{8,}}+ | [\w-]{{32,}}+ )
        | (?:npm_|gsk_|r8_)[A-Za-z0-9]{{20,}}+ | SG\.[\w-]{{16,64}}\.[\w-]{{16,}}+
        | (?:AKIA|ASIA)[A-Z0-9]{{12,}}+ | AIza[\w-]{{20,}}+ | ya29\.[\w-]{{8,}}+ | [0-9]{{8,10}}:AA[\w-]{{30,}}+
        | [Bb]earer\s{{1,4}}[A-Za-z0-9._~+/=-]{{16,}}+
        | (?i:authorization)["']?\s?[:=]\s?["']?(?i:basic|bearer|token)\s[^\s"',]{{6,}}+
        | hooks\.slack\.com/(?:services|workflows|triggers)/[\w/-]{{8,}}+
        | (?:\w{{1,9}}\.)?discord(?:app)?\.com/api/(?:v[0-9]{{1,2}}/)?webhooks/[\w/-]{{8,}}+
        | (?:AccountKey|SharedAccessKey|SharedAccessSignature)=[^;\s"']{{8,}}+
        | machine\s{{1,8}}\S{{1,200}}\s{{1,8}}login\s{{1,8}}\S{{1,200}}\s{{1,8}}password\s{{1,8}}\S++
    )
    | (?:(?<![\w-])|(?<=\\[nrt]))eyJ[\w-]{{8,}}+\.[\w-]++(?:\.[\w-]++)?
    | (?:[?&;]sig|X-(?:Amz|Goog)-Signature)=[\w%+/=-]{{8,}}+ | ;\s?(?i:password|pwd)=[^;\s"']{{4,}}+
    | -----BEGIN\ [A-Z\ ]{{0,40}}PRIVATE\ KEY(?:\ BLOCK)?(?:-----)?
      (?:{_GAP}[A-Za-z0-9+/=]{{20,}}+)*+
      (?:{_GAP}[A-Za-z0-9+/=]{{0,76}}{_GAP}-----END\ [A-Z\ ]{{0,40}}PRIVATE\ KEY(?:\ BLOCK)?-----)?
    | ://(?: [^/\s:"'<>]{{0,128}}:[^/\s"'<>]{{1,128}}@
           | [^/@\s:"'<>]{{0,128}}:(?![0-9]{{1,5}}(?:[/?\#,;)]|\Z))[^@\s"'<>]{{1,128}}@
           | [0-9a-f]{{16,64}}@ )""",
    re.VERBOSE,
)
"""Tokens of well-known services, keys, webhooks, connection strings, URLs with a password."""
_hidden: set[str] = set()


def has_secret(text: str) -> bool:
    """Return whether the text contains something that looks like a token."""
    return _VALUES.search(text) is not None


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable appears to hold a secret."""
    if _VALUES.search(value):
        return True
    words = _words(name)
    if _HARMLESS.search("_".join(words)) or (value.isdecimal() and _COUNTED & {*words}):
        return False
    if any(word in _WORDS or word.endswith(_ENDINGS) for word in words):
        return True
    if "PWD" in words[1:] or "PAT" in words[1:]:
        return not value.startswith(("/", "*", "."))  # a directory, or a pattern
    return _HINTS.search(name.upper()) is not None and _HEX.fullmatch(value) is not None


def is_secret_setting(name: str, value: object) -> bool:
    """Return the same for a program's flag or a JSON key. Most with TOKEN or KEY in their name hold no
    secret."""
    if not isinstance(value, str) or not value or value.lower() in ("auto", "none", "true", "false"):
        return False
    if _VALUES.search(value):
        return True
    words = _words(name)
    if not words or _HARMLESS.search("_".join(words)) or value.startswith(("/", "./", "$", "<")):
        return False
    if words[-1] in _WORDS and (_HEX.fullmatch(value) or _RANDOM.fullmatch(value)):
        return True
    return _SETTING.search("_".join(words)) is not None


def secrets_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that appear to hold secrets."""
    return {name: value for name, value in variables.items() if is_secret(name, value)}


def secret_arguments(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (flag, value) for each secret on a command line: `--flag VALUE`, `--flag=VALUE`, `flag=VALUE`."""
    for token, following in zip(tokens, [*tokens[1:], ""], strict=False):
        name, equals, value = token.partition("=")
        if not equals and token.startswith("-"):
            value = "" if following.startswith("--") else following
        if value and is_secret_setting(name, value):
            yield name, value
        elif _VALUES.search(token) and not token.startswith("-"):
            yield "", token


def without_secrets(tree: Any) -> Any:
    """Return a configuration with its secrets masked, for a file that others may read."""
    if isinstance(tree, Mapping):
        return {
            key: MASK if is_secret_setting(str(key), value) else without_secrets(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [without_secrets(item) for item in tree]
    return _VALUES.sub(MASK, tree) if isinstance(tree, str) else tree


def shown(name: str, value: str) -> str:
    """Return the value of a variable for display, masked if it is a secret."""
    return MASK if is_secret(name, value) else value


def hide(values: Iterable[str]) -> None:
    """Make `masked` hide these values from now on, in every form in which programs print them."""
    for value in values:
        if len(value) >= SHORTEST:
            lines = [line.strip() for line in value.splitlines()]
            for text in (value, *(line for line in lines if len(line) >= SHORTEST_LINE)):
                _hidden.update(_forms(text))


def hide_inherited(environment: Mapping[str, str]) -> None:
    """Call `hide` for the secrets of an environment, except for values that messages need (paths,
    numbers)."""
    found = secrets_of(environment).values()
    hide(v for v in found if len(v) >= SHORTEST_LINE and not v.isdecimal() and not v.startswith("/"))


def masked(text: str) -> str:
    """Return a text for display, with hidden values and everything that looks like a token masked."""
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, MASK)
    return _VALUES.sub(MASK, text)


def _words(name: str) -> list[str]:
    """Split `hfToken2` and `HF-TOKEN` into HF, TOKEN."""
    parts = re.split(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])", name)
    return [part.upper() for part in parts if part]


def _forms(value: str) -> set[str]:
    """Return a value literally, and as escaped by repr, JSON, a shell and a URL, each also with a second
    level of escapes."""
    once = {value} | _escaped(value) | {quote(value, safe=""), quote(value), quote_plus(value)}
    return once.union(*map(_escaped, once))


def _escaped(text: str) -> set[str]:
    both = repr('"' + text)[2:-1]  # with a quote of each kind in it, repr escapes '
    plain = both.replace("\\'", "'")
    ascii_only = ascii('"' + text)[2:-1]
    found = {both, plain, ascii_only, ascii_only.replace("\\'", "'"), printable(text), shlex.quote(text)}
    found |= {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    return found | {shlex.quote(text)[1:-1]} if "'" in text else found
