"""The tables that `launch memory-estimate` prints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.output import new_console
from launcher.sizes import in_words

if TYPE_CHECKING:
    from torch import nn

    from launcher.estimate.answer import Estimate
    from launcher.estimate.longest import LongestSequence
    from launcher.estimate.variants import Variant

ATTENTION = {
    "flash": "the flash kernel, which stores no attention scores",
    "efficient": "the memory-efficient kernel, which stores no attention scores",
    "math": "the math kernel, which stores the attention scores of all token pairs",
    "cpu": "torch's CPU kernel",
}
COMPONENTS = ("parameters", "gradients", "optimizer", "buffers", "activations")


def show(found: Sequence[Estimate], parameters: int, trained: int, sequence: int) -> None:
    """Print the memory of each estimated rank by component."""
    from rich.table import Table

    console = new_console()
    for one in found:
        some = "" if trained == parameters else f", {trained / 1e9:.2g} B trained"
        size = f"{parameters / 1e9:.3g} B parameters{some}"
        title = f"rank {one.rank} of {one.world}, {size}, sequences of {sequence:,} tokens"
        table = Table(title=title, title_justify="left")
        table.add_column("")
        table.add_column("between steps", justify="right")
        table.add_column(f"at the peak ({one.phase})", justify="right")
        for name in COMPONENTS:
            table.add_row(name, *(in_words(getattr(held, name)) for held in (one.between, one.at_peak)))
        table.add_row("total", in_words(one.between.total), in_words(one.at_peak.total), style="bold")
        console.print(table)
        phases = ", ".join(f"{phase} {in_words(peak)}" for phase, peak in one.peaks.items())
        console.print(f"peak of each phase of a step: {phases}", markup=False)
        if one.host or one.nvme:
            console.print(
                f"off the device: host {in_words(one.host)}, NVMe {in_words(one.nvme)}", markup=False
            )


def attention(used: Collection[str]) -> None:
    """Print the attention kernels that the estimate assumes."""
    if used:
        told = " and ".join(ATTENTION[name] for name in sorted(used))
        new_console().print(f"attention: {told}", markup=False)


def verdict(found: Sequence[Estimate], usable: int, of: str) -> None:
    """Print whether the most loaded rank fits.

    Args:
        usable: bytes available to tensors.
        of: the same in words, with a breakdown of the rest.
    """
    fullest = max(found, key=lambda one: one.peak)
    fits = "fits" if fullest.peak <= usable else "does NOT fit"
    which = f" on rank {fullest.rank}" if len(found) > 1 else ""
    new_console().print(f"{fits}{which}: {in_words(fullest.peak)} of {of}", markup=False)


def experts(model: nn.Module, ranks: int, load: float) -> None:
    """Print a rank's share of the experts and the assumed number of tokens routed to them.

    Args:
        model: the unsharded model.
        ranks: expert-parallel degree.
        load: tokens routed to a rank's experts, relative to an even share.
    """
    from launcher.experts.modules import experts_in, number_of
    from launcher.pipeline.partition.costs import elements
    from launcher.tensor.parts import even_sizes

    found = [module for _, module in experts_in(model)]
    mine = sorted({even_sizes(number_of(module), ranks)[0] for module in found})
    all_experts = sorted({number_of(module) for module in found})
    share = f"{elements(found) / ranks:,.0f}"
    tokens = "an even share" if load == 1 else f"{load:g} times an even share"
    new_console().print(
        f"experts: each rank has {_or(mine)} of {_or(all_experts)} in each of {len(found)} layers, "
        f"{share} parameters, and {tokens} of the tokens (--expert-load)",
        markup=False,
    )


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def compare(variants: Sequence[Variant], device: int | None) -> None:
    """Print alternatives to the run, each on its most loaded rank."""
    from rich.table import Table

    table = Table(title="Alternatives (most loaded rank)", title_justify="left")
    for name in ("", "states", "peak", "host", "NVMe", *(["fits"] if device is not None else [])):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for one in variants:
        if not one.ranks:
            table.add_row(one.name, f"not possible: {one.refused}")
            continue
        fullest = max(one.ranks, key=lambda rank: rank.peak)
        cells = [fullest.between.model_states, fullest.peak, fullest.host, fullest.nvme]
        verdict = [] if device is None else ["yes" if one.fits(device) else "no"]
        table.add_row(one.name, *(in_words(cell) if cell else "" for cell in cells), *verdict)
    new_console().print(table)


def longest(rows: Iterable[LongestSequence], device: int, world: int) -> None:
    """Print the longest sequence for each row, as soon as it is found."""
    console = new_console()
    where = f"each of {world} ranks" if world > 1 else "one rank"
    console.print(f"longest sequence in {in_words(device)} on {where}, at a microbatch's peak:", markup=False)
    for row in rows:
        what = f"+ {row.change}" if row.change else "as configured"
        if row.refused:
            found = f"not possible: {row.refused}"
        elif not row.tokens:
            found = "none: not even 1,024 tokens fit"
        else:
            found = f"{row.tokens:>11,} tokens, {in_words(row.peak)}"
        console.print(f"  {what:<34} {found}", markup=False)


def advise(found: tuple[list[str], Variant] | None) -> None:
    """Print what to change so that the run fits."""
    console = new_console()
    if found is None:
        console.print(
            "none of these changes makes it fit: smaller microbatches, recomputation, a higher stage, offload of "
            "everything. Use more ranks, tensor_parallel or pipeline",
            markup=False,
        )
        return
    changes, variant = found
    console.print(f"it fits in {in_words(variant.peak)} with these keys in the JSON:", markup=False)
    console.print("  " + ",\n  ".join(changes), markup=False)


def as_json(variant: Variant, device: int | None) -> dict[str, Any]:
    """Return one entry of `compare`."""
    if not variant.ranks:
        return {"name": variant.name, "refused": variant.refused}
    fullest = max(variant.ranks, key=lambda rank: rank.peak)
    return {
        "name": variant.name,
        "model_states_bytes": fullest.between.model_states,
        "peak_bytes": fullest.peak,
        "host_bytes": fullest.host,
        "nvme_bytes": fullest.nvme,
        "fits": None if device is None else variant.fits(device),
    }
