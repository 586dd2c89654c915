"""`launch memory-estimate`: estimates the memory a run needs on each rank, without GPUs or weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.flags import (
    FlagParser,
    add_adapters,
    add_expert_load,
    add_model_and_ranks,
    add_packed,
    add_reserve,
    check_adapter_flags,
    positive,
    slots_of,
)
from launcher.cli.output import config_of
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.estimate.answer import Estimate
    from launcher.estimate.estimator import Estimator

DESCRIPTION = """\
Estimates the memory that each rank of a run needs at the peak of a step: parameters, gradients, optimizer, buffers and
activations, on the device, in host memory and on NVMe. Needs no GPU, no weights and little memory."""
EPILOG = """\
examples:
  launch memory-estimate --config ds_configs/zero3.json --model meta-llama/Llama-3.1-8B --num-gpus 8 --gpu 80GiB
  launch memory-estimate --config ds_config.json --model ./my-model --hostfile hosts --compare --gpu 80GiB
  launch memory-estimate --config ds_config.json --model ./my-model --num-gpus 2 --seq-length 4096 --json
  launch memory-estimate --config ds_config.json --model ./my-model --num-gpus 8 --gpu 80GiB --longest
  launch memory-estimate --model ./my-model --num-gpus 8 --gpu h100
  launch memory-estimate --config ds_config.json --model ./my-model --num-gpus 8 --gpu h100 --watch
  launch memory-estimate --config ds_config.json --model ./my-model --num-gpus 2 --gpu l4 --lora 16 --load-in-4bit

--model: a Hugging Face id, a directory, or a config.json.
The estimate is made from a trace of one block of each kind. --dry-run runs three steps of the real engine as
one rank of the run, with fake tensors that have no memory: slower, but exact.
If a run does not fit --gpu, the output lists what to change, the cheapest change first, and the exit code is 1.
"""
EXIT_DOES_NOT_FIT = 1
RANKS_OF_NODE = 8


def estimate_parser() -> FlagParser:
    """Return the parser of `launch memory-estimate`."""
    parser = FlagParser(
        prog="launch memory-estimate",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    add(
        "--config",
        metavar="DS.json",
        help="the run's configuration (default: one is proposed for --gpu TYPE)",
    )
    add_model_and_ranks(parser)
    add("--gpu", metavar="TYPE|BYTES", help="GPU type (h100, a100-40, l4, ...), or its memory: 80GiB, 24GB")
    add_reserve(parser)
    add("--seq-length", type=positive, metavar="L", help="tokens per sequence (default: 2048)")
    add("--rank", type=int, metavar="R", help="show this rank (default: one of each pipeline stage)")
    add_expert_load(parser)
    add_adapters(parser)
    add_packed(parser)
    parser.checks.append(check_adapter_flags)
    add("--compare", action="store_true", help="compare all stages and kinds of offload")
    add(
        "--longest",
        action="store_true",
        help="find the longest sequence that fits --gpu, and the keys that allow longer ones",
    )
    add("--plot", metavar="FILE", help="draw the memory of the ranks as PNG or SVG")
    add("--dry-run", action="store_true", help="run the real engine with fake tensors")
    add("--json", action="store_true", help="print a JSON object")
    add("--watch", action="store_true", help="estimate again, in a second, whenever the JSON is saved")
    return parser


def memory_estimate(argv: Sequence[str]) -> int:
    """Run `launch memory-estimate`; returns 0, or 1 if the run does not fit the device."""
    flags = estimate_parser().parse_args(argv)
    if not flags.watch:
        return _estimate(flags)
    if not flags.config:
        raise ConfigError("--watch requires --config", where="--watch", fix="pass the JSON that you edit")
    from launcher.cli.watch import watch

    model = Path(flags.model)
    described = [model / "config.json" if model.is_dir() else model] if model.exists() else []
    return watch([Path(config_of(flags.config)), *described], lambda: _estimate(flags))


def _estimate(flags: argparse.Namespace) -> int:
    """Print one estimate; returns 0, or 1 if the run does not fit the device."""
    world = flags.num_gpus or (sum(slots_of(flags.hostfile)) if flags.hostfile else 1)
    from launcher.config.root import load
    from launcher.monitor.device_budget import budget_of
    from launcher.monitor.devices import defaults

    written = config_of(flags.config) if flags.config else _proposed(flags, world)
    config = load(written)
    degrees = degrees_of(config, world)
    budget = None if flags.gpu is None else budget_of(flags.gpu, flags.reserve)
    device = None if budget is None else budget.usable(degrees)
    if flags.rank is not None and not 0 <= flags.rank < world:
        raise ConfigError(
            f"--rank {flags.rank} is out of range: the number of ranks is {world}",
            where="--rank",
            fix="ranks start at 0",
        )
    if flags.longest and device is None:
        raise ConfigError(
            "--longest requires --gpu", where="--longest", fix="pass the GPU type or its memory: --gpu 80GiB"
        )
    _check_load(flags.expert_load, config)
    from launcher.cli import memory_tables
    from launcher.estimate.attention_kernels import attention_of
    from launcher.estimate.estimator import Estimator
    from launcher.estimate.model_trace import expert_load
    from launcher.estimate.node_host import NodeHost
    from launcher.estimate.variants import advice, side_by_side
    from launcher.models.build import load_config
    from launcher.monitor.memory import current_memory_bytes

    process = current_memory_bytes()  # after the imports that a rank has as well, before there is a model
    kernels = defaults()["attention"] if budget is None else budget.attention
    model: Any = load_config(flags.model)
    if flags.lora:
        from launcher.estimate.quantized import adapted_on_meta
        from launcher.models.adapters import LoraSettings

        model = adapted_on_meta(model, LoraSettings.of_flags(flags))
    estimator, used = Estimator(model, flags.expert_load, kernels), set[str]()
    if flags.longest and device is not None:
        return _longest(estimator, config, world, device, as_object=flags.json)
    sequence = flags.seq_length or estimator.sequence
    with expert_load(config, flags.expert_load), attention_of(kernels, used):  # for --dry-run
        found = _ranks(estimator, config, world, sequence, flags.rank, rehearsed=flags.dry_run)
    fits = None if device is None else all(one.peak <= device for one in found)
    used |= {*estimator.attention}
    node = NodeHost.of(found, _ranks_of_node(flags, world), process, on_host="cpu" in kernels)
    others = side_by_side(estimator, config, world, sequence) if flags.compare else []
    change = advice(estimator, config, world, sequence, device) if device is not None and not fits else None
    if flags.plot:
        from launcher.estimate.plot import memory_bars
        from launcher.monitor.figure import save

        title = f"{estimator.parameters / 1e9:.3g} B parameters, {world} ranks"
        save(memory_bars(found, title=title, device=device), flags.plot)
    if flags.json:
        inputs = {
            "config": flags.config,
            "model": flags.model,
            "parameters": estimator.parameters,
            "trained_parameters": estimator.trained,
            "num_gpus": world,
            "seq_length": sequence,
            "device_bytes": None if budget is None else budget.memory,
            "usable_bytes": device,
            "reserve": flags.reserve,
            "attention": sorted(used),
            "expert_load": flags.expert_load,
        }
        told: dict[str, Any] = {"per_rank": [as_json(one) for one in found], "fits": fits, "inputs": inputs}
        if not flags.config:
            told["proposed"] = written
        told["host_of_a_node"] = {"bytes": node.total, **asdict(node)}
        if flags.compare:
            told["compare"] = [memory_tables.as_json(one, device) for one in others]
        if fits is False:
            told["advice"] = None if change is None else change[0]
        print(json.dumps(told, indent=2))
    else:
        if not flags.config:
            print("no --config: this is the fastest configuration that fits, as predicted by `launch plan`:")
            print(json.dumps(written, indent=2))
        memory_tables.show(found, estimator.parameters, estimator.trained, sequence)
        memory_tables.attention(used)
        print(f"host memory: {node.in_words()}")
        if budget is not None and device is not None:
            memory_tables.verdict(found, device, budget.in_words(degrees))
        if config.expert_parallel.degree > 1:
            memory_tables.experts(estimator.model, config.expert_parallel.degree, flags.expert_load)
        if others:
            memory_tables.compare(others, device)
        if fits is False:
            memory_tables.advise(change)
    return EXIT_DOES_NOT_FIT if fits is False else 0


def _ranks_of_node(flags: argparse.Namespace, world: int) -> int:
    """Return the number of ranks on the largest node; by default, the usual number of GPUs per node."""
    if flags.hostfile:
        return max(slots_of(flags.hostfile))
    from launcher.monitor.devices import device

    return min(world, device(flags.gpu).per_node if _is_type(flags.gpu) else RANKS_OF_NODE)


def _check_load(load: float, config: Config) -> None:
    size = config.expert_parallel.degree
    if load <= size:
        return
    what, fix = "expert parallelism is off", "leave it out, or set expert_parallel in the JSON"
    if size > 1:
        what, fix = (
            f"{load:g} times an even share is more than all tokens",
            f"write a number from 1 to {size}",
        )
    raise ConfigError(f"{what}: expert_parallel.size is {size}", where="--expert-load", fix=fix)


def _longest(estimator: Estimator, config: Config, world: int, device: int, *, as_object: bool) -> int:
    from launcher.cli import memory_tables
    from launcher.estimate.longest import longest_sequences

    rows = longest_sequences(estimator, config, world, device)
    if as_object:
        print(json.dumps({"longest": [asdict(row) for row in rows], "usable_bytes": device}, indent=2))
        return 0
    memory_tables.longest(rows, device, world)
    return 0


def _proposed(flags: argparse.Namespace, world: int) -> dict[str, Any]:
    """Return the JSON of the layout that is predicted to be fastest on the device.

    Raises:
        ConfigError: --gpu is not a GPU type, or no layout fits.
    """
    if not _is_type(flags.gpu):
        fix = "pass the run's JSON, or a GPU type such as --gpu h100 to have one proposed"
        raise ConfigError("missing --config", where="launch memory-estimate", fix=fix)
    from launcher.cli.plan import default_batch, search, trained_work
    from launcher.engine.dtypes import DTYPES
    from launcher.estimate.estimator import LONG
    from launcher.models.build import load_config
    from launcher.monitor.device_budget import budget_for
    from launcher.monitor.devices import device
    from launcher.plan.choose import PlanSearch
    from launcher.plan.layout import as_json

    model, kind = load_config(flags.model), device(flags.gpu)
    sequence = flags.seq_length or min(LONG, getattr(model, "max_position_embeddings", None) or LONG)
    described, work = trained_work(model, sequence, flags, DTYPES["bf16"])
    place = PlanSearch(kind, min(world, kind.per_node), budget_for(kind, flags.reserve))
    found, _ = search(described, work, place, world, default_batch(world, sequence), top=1)
    if found:
        return as_json(found[0].layout)
    room = place.budget.in_words()
    raise ConfigError(
        f"no layout fits on {world} x {kind.title}; memory available to tensors: {room}",
        where="--gpu",
        fix="try more devices (--num-gpus) or a shorter --seq-length",
    )


def _is_type(gpu: str | None) -> bool:
    """Return whether --gpu is a GPU type rather than a number of bytes."""
    return gpu is not None and not gpu.strip()[:1].isdigit()


def degrees_of(config: Config, world: int) -> tuple[int, ...]:
    """Return the degrees of all axes whose ranks communicate.

    Raises:
        ConfigError: the degrees do not multiply to the number of ranks.
    """
    section = config.tensor_parallel, config.pipeline, config.expert_parallel
    return config.dp_degree(world), config.cp_degree, *(each.degree for each in section)


def as_json(found: Estimate) -> dict[str, Any]:
    """Return one entry of `per_rank`."""
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
        "host_bytes": found.host,
        "nvme_bytes": found.nvme,
        "peak_phase": found.phase,
        "phases": found.peaks,
    }


def _ranks(
    estimator: Estimator, config: Config, world: int, sequence: int, rank: int | None, *, rehearsed: bool
) -> list[Estimate]:
    if not rehearsed:
        return (
            estimator.run(config, world, sequence)
            if rank is None
            else [estimator.estimate(config, world, rank, sequence)]
        )
    from launcher.estimate.dry_run import dry_run

    ranks = estimator.ranks(config, world) if rank is None else [rank]
    return [dry_run(estimator.copy(), config, world=world, rank=one, sequence=sequence) for one in ranks]
