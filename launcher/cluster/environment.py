"""Environment variables passed from this machine to ranks on other nodes, and the file `.deepspeed_env`.

They are sent in the first line of the control stream: byte for byte, bypassing every shell, and invisible to
`ps`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.cluster.secret import hide, is_secret, masked
from launcher.errors import ConfigError, shortened
from launcher.files import read_small

PREFIXES = (
    *("NCCL_", "GLOO_", "UCX_", "UCC_", "FI_", "IBV_", "RDMAV_", "MV2_", "I_MPI_"),
    *("TORCH", "PYTORCH_", "TRITON_", "CUDA_", "CUBLAS_", "CUDNN_", "HIP_", "ROCM_", "HSA_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_", "MALLOC_"),
    *("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "DATASETS_", "TOKENIZERS_", "ACCELERATE_"),
    *("WANDB_", "COMET_", "MLFLOW_", "TENSORBOARD_"),
    *("PYTHON", "CONDA_", "LAUNCHER_", "DEEPSPEED_", "DS_", "LC_"),
)
"""Prefixes of the variables that are passed on to other nodes."""
EXTRA_PREFIXES: list[str] = []
"""More prefixes, added by programs that run the launcher in their own process."""
NAMES = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "XDG_CACHE_HOME", "LANG", "TZ"),
    *(
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "ALL_PROXY",
    ),
    *("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE"),
)
"""Names of further variables that are passed on."""
OF_THE_NODE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "DS_ENV_FILE",
    "LAUNCHER_PID",
    "LAUNCHER_CORES",
    "LAUNCHER_MEMORY",
    "LAUNCHER_TOKEN",
)
"""Variables that are never passed on: they describe one node, or ranks must not see them."""
FILE = ".deepspeed_env"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(
    r"""(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*
    (?: "(?P<double>(?:[^"\\]|\\.)*+)" | '(?P<single>[^']*)' | (?P<plain>(?:[^\n\#]|(?<![ \t])\#)*+) )
    [ \t\r]* (?:(?<=[ \t])\#[^\n]*)? (?:\n|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_SKIPPED = re.compile(r"[ \t\r]*(?:#[^\n]*)?(?:\n|\Z)")


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are passed to other nodes by default."""
    return {
        name: value
        for name, value in environment.items()
        if (name in NAMES or name.startswith((*PREFIXES, *EXTRA_PREFIXES))) and name not in OF_THE_NODE
    }


def asked_for(exports: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables requested by `.deepspeed_env` and `--export`; the flag takes precedence.

    Args:
        exports: `NAME` (with its value on this machine) or `NAME=VALUE`.

    Raises:
        ConfigError: a name is invalid or has no value here; a line of the file assigns nothing.
    """
    found: dict[str, str] = {}
    name = environment.get("DS_ENV_FILE", FILE)
    for directory in (Path.home(), Path.cwd()):
        path = str(directory / name)
        if os.path.exists(path) and not os.path.isdir(path):
            text = read_small(
                Path(path),
                "the environment file",
                where="DS_ENV_FILE" if "DS_ENV_FILE" in environment else FILE,
                fix="write a file with lines of the form NAME=VALUE",
                errors="surrogateescape",
            )
            found |= parse_file(text, path)
    for export in exports:
        name, equals, value = export.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{shortened(masked(name))!r} is not a valid variable name",
                where="--export",
                fix="write NAME or NAME=VALUE",
            )
        if not equals and name not in environment:
            raise ConfigError(
                f"{shortened(name)} is not set here",
                where=f"--export {shortened(export)}",
                fix=f"write {shortened(name)}=VALUE",
            )
        _put(found, name, value if equals else environment[name])
    return found


def _put(found: dict[str, str], name: str, value: str) -> None:
    """Set a variable. Hide its value if it is a secret, even if a later value replaces it."""
    found[name] = value
    if is_secret(name, value):
        hide([value])


def parse_file(text: str, name: str) -> dict[str, str]:
    """Parse `NAME=VALUE` lines; comments, blank lines, `export` and quotes as in a shell, without expansion.

    Inside double quotes a backslash escapes the next character. Quoted values may span several lines.

    Raises:
        ConfigError: a line is invalid, or contains a character that no variable can hold.
    """
    found: dict[str, str] = {}
    position = 0
    while position < len(text):
        if skipped := _SKIPPED.match(text, position):
            position = skipped.end()
            continue
        start = re.compile(r"[ \t]*").match(text, position)
        match = _ASSIGNMENT.match(text, start.end() if start else position)
        if match is None or (match["plain"] or "").startswith(('"', "'")):
            number = text.count("\n", 0, position) + 1
            line = text[position:].split("\n", 1)[0].strip()
            line = shortened(masked(line.partition("=")[0])) + ("=..." if "=" in line else "")
            raise ConfigError(
                f"{line!r} does not set a variable",
                where=f"{name}:{number}",
                fix="write NAME=VALUE, quoted where needed",
            )
        if match["double"] is not None:
            value = re.sub(r"\\(.)", r"\1", match["double"], flags=re.DOTALL)
        else:
            value = match["single"] if match["single"] is not None else match["plain"].rstrip()
        if "\0" in value:
            raise ConfigError(
                f"the value of {shortened(match['name'])} contains a NUL character, which a variable cannot hold",
                where=f"{name}:{text.count(chr(10), 0, position) + 1}",
                fix="delete it; text files contain none",
            )
        _put(found, match["name"], value)
        position = match.end()
    return found


def of_mpi() -> list[str]:
    """Return the prefixes of variables that mpirun and srun set for the agent; ranks must not see them."""
    return ["OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIR_CVAR_"]
