"""`launch plan`: predicts the fastest layouts of a model on a cluster. Experimental."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from launcher.cli.flags import (
    FlagParser,
    add_adapters,
    add_bill,
    add_expert_load,
    add_gpus_per_node,
    add_model_and_ranks,
    add_packed,
    add_reserve,
    check_adapter_flags,
    positive,
    size,
    slots_of,
)
from launcher.cli.output import must_be_new, new_console, write
from launcher.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

    from launcher.plan.bill import Bill
    from launcher.plan.choose import Choice, PlanSearch
    from launcher.plan.memory import MemoryPredictor
    from launcher.plan.work import ModelWork

DESCRIPTION = """\
Tries all layouts of a run (tensor-, pipeline-, context- and expert-parallel degrees, ZeRO stage, microbatch, schedule,
checkpointing, offload), drops those that do not fit, predicts the step time of the rest, and explains why the best one
was chosen. Needs no GPU. Experimental: step times are analytical predictions, compared with published runs of other
programs but with no run of this launcher on GPUs. Measure the best few before a long run."""
EPILOG = """\
examples:
  launch plan --model meta-llama/Llama-3.1-8B --num-gpus 8 --gpu h100
  launch plan --model ./my-model --hostfile hosts --gpu a100 --seq-length 4096 --write ds_config.json
  launch plan --model config.json --num-gpus 1024 --gpu h100 --global-batch 1024 --html plan.html

--model: a Hugging Face id, a directory, or a config.json. docs/plan.md says how steps are predicted.
"""
LEAST_TOKENS, TOKENS_OF_A_RANK, MOST_TOKENS = 1 << 19, 1 << 14, 1 << 24
EXIT_NOTHING_FITS = 1
SHOWN = 0.005  # smallest share of the step time that is listed in the breakdown


def plan_parser() -> FlagParser:
    """Return the parser of `launch plan`."""
    parser = FlagParser(
        prog="launch plan",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    add_model_and_ranks(parser, ranks_needed=True)
    add("--gpu", required=True, metavar="TYPE", help="GPU type: h100, a100, a100-40, l40s, ...")
    add_gpus_per_node(parser)
    add(
        "--memory",
        type=size,
        metavar="BYTES",
        help="memory of a GPU, if it differs from the data sheet: 40GiB",
    )
    add_reserve(parser)
    add(
        "--global-batch",
        type=positive,
        metavar="B",
        help="sequences per step (default: depends on the number of devices)",
    )
    add(
        "--seq-length",
        type=positive,
        metavar="L",
        help="tokens per sequence (default: 4096, or the model's maximum)",
    )
    add(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="dtype of the parameters (default: bf16)",
    )
    add_expert_load(parser)
    add_adapters(parser)
    add_packed(parser)
    parser.checks.append(check_adapter_flags)
    add_bill(parser)
    add("--top", type=positive, default=10, metavar="K", help="number of layouts to show (default: 10)")
    add("--write", metavar="DS.json", help="write the configuration of the best layout")
    add("--html", metavar="FILE", help="write a report with plots")
    add("--plot", metavar="FILE", help="plot time against memory (.svg, .png)")
    add("--json", action="store_true", help="print a JSON object")
    return parser


def plan(argv: Sequence[str]) -> int:
    """Run `launch plan`; returns 0, or 1 if nothing fits."""
    flags = plan_parser().parse_args(argv)
    if flags.tokens is None and (flags.price or flags.watts):
        fix = "pass the number of tokens of the run: --tokens 300B"
        raise ConfigError("--price and --watts require --tokens", where="--price, --watts", fix=fix)
    if flags.write:
        must_be_new(flags.write, "--write")
    from launcher.monitor.device_budget import budget_for
    from launcher.monitor.devices import device

    kind = device(flags.gpu)
    world, per_node = _ranks(flags, kind.per_node)
    from launcher.engine.dtypes import DTYPES
    from launcher.models.build import load_config
    from launcher.plan.choose import PlanSearch, reasons
    from launcher.plan.layout import as_json

    written = load_config(flags.model)
    sequence = flags.seq_length or min(4096, getattr(written, "max_position_embeddings", None) or 4096)
    batch = flags.global_batch or default_batch(world, sequence)
    model, work = trained_work(written, sequence, flags, DTYPES[flags.dtype])
    place = PlanSearch(kind, per_node, budget_for(kind, flags.reserve, flags.memory))
    choices, needs = search(model, work, place, world, batch, dtype=flags.dtype, top=flags.top)
    inputs = {
        "model": flags.model,
        "parameters": work.parameters,
        "trained_parameters": work.trained,
        "devices": world,
        "gpu": kind.title,
        "gpus_per_node": per_node,
        "global_batch": batch,
        "seq_length": sequence,
        "dtype": flags.dtype,
        "expert_load": flags.expert_load,
        "in_one_piece": work.in_one_piece,
        "tokens": flags.tokens,
        "price": flags.price,
        "watts": flags.watts,
    }
    if not choices:
        return _nothing(flags, inputs, needs.refused.values())
    why = list(reasons(work, place, choices[0], needs.peak, batch))
    config = json.dumps(as_json(choices[0].layout, dtype=flags.dtype), indent=2)
    if flags.json:
        print(
            json.dumps(
                {"inputs": inputs, "choices": [_object(inputs, each) for each in choices], "why": why},
                indent=2,
            )
        )
    else:
        _show(inputs, place, choices, why)
    if flags.write:
        write(flags.write, config + "\n", "--write")
    if flags.plot:
        from launcher.monitor.figure import save
        from launcher.plan.pictures import pareto

        save(pareto(choices, place.usable(choices[0].layout)), flags.plot)
    if flags.html:
        from launcher.plan.page import page

        write(flags.html, page(_title(inputs), work, place, choices, needs, why, config), "--html", over=True)
    return 0


def trained_work(
    config: PretrainedConfig, sequence: int, flags: argparse.Namespace, dtype: torch.dtype
) -> tuple[PretrainedConfig | nn.Module, ModelWork]:
    """Return the model for the estimator and its work, with the adapters and the expert load of the flags."""
    from launcher.plan.work import work_of

    described: PretrainedConfig | nn.Module = config
    if flags.lora:
        from launcher.models.adapters import LoraSettings, with_adapters
        from launcher.models.build import build_on_meta

        described = model = with_adapters(build_on_meta(config), LoraSettings.of_flags(flags))
    work = work_of(described, sequence, dtype)
    if flags.load_in_4bit:
        from launcher.estimate.quantized import pack_frozen

        pack_frozen(model)  # after its products are counted
    return described, replace(work, expert_load=flags.expert_load, packed=flags.load_in_4bit)


def search(
    model: PretrainedConfig | nn.Module,
    work: ModelWork,
    place: PlanSearch,
    world: int,
    batch: int,
    *,
    dtype: str = "bf16",
    top: int,
) -> tuple[list[Choice], MemoryPredictor]:
    """Return the fastest layouts that fit, and the memory predictor; progress is shown on a terminal."""
    from launcher.plan.choose import choose
    from launcher.plan.layout import layouts
    from launcher.plan.memory import MemoryPredictor

    needs = MemoryPredictor(model, work, dtype, place.device.attention)
    ways = list(layouts(work, world, batch))
    with _progress(len(ways)) as tell:
        return choose(work, place, ways, needs.peak, needs.kept, top=top, tell=tell), needs


@contextmanager
def _progress(number: int) -> Iterator[Callable[[int, Choice], None]]:
    """Show on a terminal how many layouts have been evaluated, and the best one so far."""
    from rich.console import Console

    best: list[Choice] = []
    with Console(stderr=True).status(f"evaluating {number:,} layouts, fastest first ...") as status:

        def tell(tried: int, choice: Choice) -> None:
            best.append(choice)
            first = min(best, key=lambda each: each.time.total)
            fastest = f"{first.time.total:.3g} s/step: {first.layout.in_words()}"
            status.update(f"{tried:,} of {number:,} layouts evaluated; best so far: {fastest}")

        yield tell


def default_batch(world: int, sequence: int) -> int:
    """Return the default global batch in sequences: about 16,384 tokens per device, 0.5 M to 16.8 M in total.

    With at least one sequence per device, the batch is a multiple of the number of devices.
    """
    tokens = min(MOST_TOKENS, max(LEAST_TOKENS, TOKENS_OF_A_RANK * world))
    sequences = max(1, tokens // sequence)
    return -(-sequences // world) * world if sequences >= world else sequences


def _ranks(flags: argparse.Namespace, as_built: int) -> tuple[int, int]:
    """Return (world size, ranks per node)."""
    if flags.hostfile is None:
        return flags.num_gpus, min(flags.num_gpus, flags.gpus_per_node or as_built)
    slots = slots_of(flags.hostfile)
    if len(set(slots)) > 1:
        raise ConfigError(
            f"hosts have between {min(slots)} and {max(slots)} slots, but a plan needs the same number on each",
            where=flags.hostfile,
            fix="exclude hosts, or lower their slots",
        )
    return sum(slots), flags.gpus_per_node or slots[0]


def _show(inputs: dict[str, Any], place: PlanSearch, choices: Sequence[Choice], why: Sequence[str]) -> None:
    from rich.table import Table

    console = new_console()
    table = Table(title=_title(inputs), title_justify="left")
    for name in ("s/step", "tokens/s", "TFLOP/s", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("layout")
    table.add_column("time breakdown")
    names = [field.name for field in fields(choices[0].time)]
    for choice in choices:
        total = choice.time.total
        tokens = inputs["global_batch"] * inputs["seq_length"] / total
        cells = [f"{total:.3g}", f"{tokens:,.0f}", f"{choice.flops / 1e12:.3g}", f"{choice.peak / 2**30:.1f}"]
        shares = {name: getattr(choice.time, name) / total for name in names}
        parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= SHOWN)
        style = "bold" if choice is choices[0] else None
        table.add_row(*cells, choice.layout.in_words(), parts, style=style)
    console.print(table)
    reached = place.device.calibrated_on or "default fractions of the peaks"
    console.print(f"Predicted from the data sheet of {place.device.title} and {reached}.", markup=False)
    room = place.budget.in_words(choices[0].layout.degrees)
    console.print(f"Memory available to tensors in the best layout: {room}.", markup=False)
    if inputs["in_one_piece"]:
        left = "Pipeline and context parallelism are excluded: the model has an auxiliary router loss"
        console.print(f"{left} (output_router_logits in its config.json).", markup=False)
    if (bill := _bill(inputs, choices[0])) is not None:
        console.print(f"Training on {inputs['tokens']:,.0f} tokens takes {bill.in_words}.", markup=False)
    console.print("\nVariations of the best layout:", markup=False)
    for line in why:
        console.print(f"  {line}", markup=False)


def _title(inputs: dict[str, Any]) -> str:
    size = f"{inputs['parameters'] / 1e9:.3g} B"
    if inputs["trained_parameters"] < inputs["parameters"]:
        size += f", {inputs['trained_parameters'] / 1e6:.3g} M trained"
    return (
        f"{inputs['model']} ({size}) on {inputs['devices']:,} x {inputs['gpu']}, "
        f"{inputs['global_batch']:,} sequences of {inputs['seq_length']:,} tokens a step"
    )


def _bill(inputs: dict[str, Any], choice: Choice) -> Bill | None:
    """Return the time, cost and energy of the whole run with a layout; None without --tokens."""
    from launcher.plan.bill import Bill

    if inputs["tokens"] is None:
        return None
    rate = inputs["global_batch"] * inputs["seq_length"] / choice.time.total
    return Bill.of(inputs["tokens"], rate, inputs["devices"], inputs["price"], inputs["watts"])


def _object(inputs: dict[str, Any], choice: Choice) -> dict[str, Any]:
    bill = _bill(inputs, choice)
    return {
        "layout": asdict(choice.layout),
        "seconds": choice.time.total,
        "parts": asdict(choice.time),
        "peak_bytes": choice.peak,
        "flops_per_rank": choice.flops,
        "run": None if bill is None else asdict(bill),
    }


def _nothing(flags: argparse.Namespace, inputs: dict[str, Any], refused: Any) -> int:
    if flags.json:
        print(json.dumps({"inputs": inputs, "choices": [], "why": []}, indent=2))
        return EXIT_NOTHING_FITS
    print(
        f"{_title(inputs)}: no layout fits; try more devices, a shorter --seq-length, or another --global-batch."
    )
    for line in sorted(set(refused))[:3]:
        print(f"  refused: {line}")
    return EXIT_NOTHING_FITS
