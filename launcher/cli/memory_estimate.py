"""`launch memory-estimate`: what a run needs on each rank, before it starts, without GPUs and without weights."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.flags import FlagParser, positive
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.estimate.dry_run import DryRun

DESCRIPTION = """\
Says what a run needs: the real engine takes three steps on one rank of as many as you name, with the real model, but
tensors have no memory and nothing is computed. Needs no GPU, no weights and little memory."""
EPILOG = """\
examples:
  launch memory-estimate --config ds_configs/zero3.json --model meta-llama/Llama-3.1-8B --num-gpus 8 --gpu 80GiB
  launch memory-estimate --config ds_config.json --model ./my-model --num-gpus 2 --seq-length 4096 --json

--model: a Hugging Face id, a directory, or a config.json.
"""
UNITS = {"": 1, "B": 1, "GB": 10**9, "GIB": 1 << 30, "G": 1 << 30, "MB": 10**6, "MIB": 1 << 20, "M": 1 << 20}
EXIT_DOES_NOT_FIT = 1


def estimate_parser() -> FlagParser:
    """The parser of `launch memory-estimate`."""
    parser = FlagParser(
        prog="launch memory-estimate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="DS.json", help="the run's configuration")
    parser.add_argument("--model", required=True, metavar="MODEL", help="what is trained")
    parser.add_argument(
        "--num-gpus", type=positive, default=1, metavar="N", help="ranks of the run (default: 1)"
    )
    parser.add_argument("--gpu", metavar="BYTES", help="memory of a device: 80GiB, 24GB")
    parser.add_argument(
        "--seq-length", type=positive, metavar="L", help="tokens of a sequence (default: 2048)"
    )
    parser.add_argument(
        "--rank", type=int, default=0, metavar="R", help="the rank that is looked at (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print one object for programs")
    return parser


def memory_estimate(argv: Sequence[str]) -> int:
    """Run `launch memory-estimate`; returns 0, or 1 where the run does not fit the device."""
    flags = estimate_parser().parse_args(argv)
    device = None if flags.gpu is None else device_bytes(flags.gpu)
    from launcher.config.load import load

    config = load(flags.config)
    config.dp_degree(flags.num_gpus)  # raises where the degrees do not make the number of ranks
    if not 0 <= flags.rank < flags.num_gpus:
        raise ConfigError(
            f"there is no rank {flags.rank} among {flags.num_gpus}", where="--rank", fix="ranks begin with 0"
        )
    from launcher.estimate.dry_run import dry_run
    from launcher.models.build import build_on_meta, load_config

    model_config = load_config(flags.model)
    sequence = flags.seq_length or min(2048, getattr(model_config, "max_position_embeddings", None) or 2048)
    model = build_on_meta(model_config)
    parameters = sum(p.numel() for p in model.parameters())
    found = dry_run(model, config, world=flags.num_gpus, rank=flags.rank, sequence=sequence)
    fits = None if device is None else found.peak <= device
    if flags.json:
        inputs = {
            "config": flags.config,
            "model": flags.model,
            "parameters": parameters,
            "num_gpus": flags.num_gpus,
            "seq_length": sequence,
            "device_bytes": device,
        }
        print(json.dumps({"per_rank": [as_json(found)], "fits": fits, "inputs": inputs}, indent=2))
    else:
        from rich.console import Console

        _show(Console(highlight=False, soft_wrap=True), found, parameters, sequence, device)
    return EXIT_DOES_NOT_FIT if fits is False else 0


def device_bytes(text: str) -> int:
    """Bytes of "80GiB" or "24 GB".

    Raises:
        ConfigError: it is no size.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError(f"{text!r} is no size of memory", where="--gpu", fix="write for example 80GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def as_json(found: DryRun) -> dict[str, Any]:
    """One entry of `per_rank`."""
    between, peak = found.between, found.at_peak
    return {
        "rank": found.rank,
        "model_states_bytes": between.model_states,
        "parameters_bytes": between.parameters,
        "gradients_bytes": between.gradients,
        "optimizer_bytes": between.optimizer,
        "activations_bytes": peak.activations,
        "buffers_bytes": peak.buffers,
        "peak_bytes": found.peak,
        "peak_phase": found.phase,
        "phases": found.peaks,
    }


def _show(console: Console, found: DryRun, parameters: int, sequence: int, device: int | None) -> None:
    from rich.table import Table

    title = f"rank {found.rank} of {found.world}, {parameters / 1e9:.3g} B parameters, sequences of {sequence:,} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("between steps", justify="right")
    table.add_column(f"at the peak ({found.phase})", justify="right")
    for name in ("parameters", "gradients", "optimizer", "buffers", "activations"):
        table.add_row(name, *(_size(getattr(held, name)) for held in (found.between, found.at_peak)))
    table.add_row("total", _size(found.between.total), _size(found.at_peak.total), style="bold")
    console.print(table)
    phases = ", ".join(f"{phase} {_size(peak)}" for phase, peak in found.peaks.items())
    console.print(f"at most in each phase of a step: {phases}", markup=False)
    if device is not None:
        verdict = "fits" if found.peak <= device else "does NOT fit"
        console.print(f"{verdict}: {_size(found.peak)} of {_size(device)}", markup=False)


def _size(number: int) -> str:
    return f"{number / (1 << 30):,.2f} GiB" if number >= 1 << 28 else f"{number / (1 << 20):,.1f} MiB"
