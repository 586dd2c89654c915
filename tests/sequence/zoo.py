"""Tests every causal-LM type with its sequences sharded over two ranks:

    python -m tests.sequence.zoo [TYPE ...] [--write]

takes one step of a tiny model of each (a ring of two ranks, a length that is not a multiple of two) and compares the
loss and every gradient with those of one process. A gradient may be off by 1e-5, or by twice the effect of rounding the
parameters in one process: some models turn 1e-7 into 1e-5 (gemma4). Fails if one differs, raises an error that is not a
refusal, or has a verdict that differs from `verdicts.tsv`; with --write it writes that file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import launcher
from launcher.engine.fragments import safe_get_full_grad
from launcher.errors import LauncherError
from launcher.tensor.split import whole
from tests.pool import RankContext, WorkerPool
from tests.tensor.zoo import CAUSAL_TYPES, batch_of, tiny_model
from tests.tensor.zoo_tables import UNRUNNABLE

VERDICTS = Path(__file__).with_name("verdicts.tsv")
CONFIG: dict[str, Any] = {"context_parallel": {"ring": 2}}
TOLERANCE, SMALL = 1e-5, 0.05  # of the largest value of a gradient; no less than 5 % of the model's largest
WORKS, LENGTH = "works", 15
SUFFIX = re.compile(
    r", so (its sequences cannot be sharded \(context parallelism\)|expert parallelism is not possible)$"
)


Watch = Callable[[torch.nn.Module], list[list[Tensor]]]
"""Registers hooks, and returns the list that the next forward fills with tensors, one entry per layer. The first
layer must match bitwise."""


def judge(
    ctx: RankContext, kind: str, sections: dict[str, Any] = CONFIG, watch: Watch = lambda model: []
) -> str:
    """Return WORKS, "refused: ...", or what is wrong.

    Args:
        sections: sections of the JSON that enable the tested feature. All ranks have the same batch.
        watch: returns further values that must be the same.
    """
    batch = batch_of(kind, seed=0, length=LENGTH)
    plain = tiny_model(kind, seed=0).train()
    said = watch(plain)
    try:
        wanted = plain(**batch).loss
    except ValueError as error:
        words = str(error)[:60].rpartition(" ")[0]
        return f"refused: even in one process, {words}"
    wanted.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        **sections,
    }
    engine: Any = None
    try:
        engine = launcher.initialize(
            model=tiny_model(kind, seed=0), config=config, device=torch.device("cpu")
        )[0]
        told = watch(engine.module)
        loss = engine(**batch).loss
        if len(told) != len(said) or not all(map(_said_alike, told, said, range(len(said)))):
            return "another forward inside"
        engine.backward(loss)
        found = {name: _whole_gradient(engine, p) for name, p in engine.module.named_parameters()}
    except LauncherError as error:
        return f"refused: {_reason(error.what)}"
    except Exception as error:
        return f"error: {type(error).__name__}: {str(error)[:150]}".replace("\n", " ")
    finally:
        if engine is not None:
            engine.destroy()
    return _compared(loss, found, wanted, gradients, lambda: _of_last_digits(kind, batch, gradients))


def _said_alike(mine: list[Tensor], wanted: list[Tensor], layer: int) -> bool:
    bits = layer == 0
    return all(
        torch.equal(a, b) if bits else torch.allclose(a.float(), b.float(), rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(mine, wanted, strict=True)
    )


def _whole_gradient(engine: Any, parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the gradient of the logical parameter, on every rank."""
    slot, gradient = engine.zero.find_slot(parameter), safe_get_full_grad(parameter)
    return None if gradient is None else whole(gradient, slot.split, slot.split_axis)


def _reason(what: str) -> str:
    """Return the reason for a refusal, without common parts, and without losses, whose last digits vary."""
    if "has a loss of" in what:
        return "the loss with sharded sequences differs"
    return re.sub(r"^\w+ (?=does|has|passes|cannot|is)", "", SUFFIX.sub("", what))


def _compared(
    loss: Tensor,
    found: dict[str, Any],
    wanted: Tensor,
    gradients: dict[str, Tensor],
    rounding: Callable[[], float],
) -> str:
    if not abs(float(loss.detach()) - float(wanted.detach())) <= TOLERANCE * abs(float(wanted.detach())):
        return f"another loss: {float(loss.detach()):.6f}, not {float(wanted.detach()):.6f}"
    missing = next((key for key in gradients if found.get(key) is None), None)
    if missing is not None:
        return f"no gradient of {missing}"
    off = _off(found, gradients)
    name = max(off, key=off.__getitem__)
    if off[name] <= TOLERANCE or off[name] <= 2 * rounding():
        return WORKS
    return f"another gradient: {name}, {off[name]:.1e} of its largest value off"


def _off(found: dict[str, Any], gradients: dict[str, Tensor]) -> dict[str, float]:
    """Return the error of each gradient, relative to its largest value."""
    most = max(float(gradient.abs().max()) for gradient in gradients.values())
    return {
        key: float((found[key] - gradient).abs().max()) / max(float(gradient.abs().max()), SMALL * most)
        for key, gradient in gradients.items()
    }


def _of_last_digits(kind: str, batch: dict[str, Tensor], gradients: dict[str, Tensor]) -> float:
    """Return the largest change of the gradients of one process if its parameters are randomly rounded."""
    worst = 0.0
    for seed in range(4):
        plain, random = tiny_model(kind, seed=0).train(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(1 + (torch.randint(0, 3, parameter.shape, generator=random) - 1) * 2.0**-23)
        plain(**batch).loss.backward()
        moved = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        worst = max(worst, *_off(moved, gradients).values())
    return worst


def main(
    what: str | None, verdicts_file: Path, sections: dict[str, Any], types: list[str], *more: Any
) -> None:
    """Test all types, or those named on the command line; compare with the verdicts file, or write it.

    Args:
        what: the text of --help.
        more: arguments of `judge`.
    """
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--ranks", type=int, default=2, help="number of ranks; sizes of 2 in the JSON are changed to it"
    )
    flags = parser.parse_args()
    verdicts: dict[str, str] = {}
    if flags.ranks != 2:
        sections = json.loads(json.dumps(sections).replace('"size": 2', f'"size": {flags.ranks}'))
    pool = WorkerPool()
    for kind in flags.types or types:
        try:
            verdicts[kind] = pool.run(judge, flags.ranks, kind, sections, *more)[0]
        except Exception as error:  # a hang, or ranks that diverged
            verdicts[kind] = f"error: {str(error)[:200]}".replace("\n", " ")
        print(f"{kind}\t{verdicts[kind]}", flush=True)
    pool.close()
    if flags.write:
        verdicts_file.write_text("".join(f"{kind}\t{verdict}\n" for kind, verdict in verdicts.items()))
        return
    known = dict(line.split("\t") for line in verdicts_file.read_text().splitlines())
    other = [kind for kind, verdict in verdicts.items() if known.get(kind) != verdict]
    wrong = [kind for kind, verdict in verdicts.items() if verdict != WORKS and "refused" not in verdict]
    sys.exit(f"another verdict than before: {other}; wrong: {wrong}" if other or wrong else 0)


if __name__ == "__main__":
    main(__doc__, VERDICTS, CONFIG, [kind for kind in CAUSAL_TYPES if kind not in UNRUNNABLE])
