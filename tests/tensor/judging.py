"""What becomes of a causal-LM type under tensor parallelism, found by training its tiny model; and the words for it,
which those for pipeline stages share (tests/pipeline/judging.py).

One job on 4 ranks: each type is split at degree 4, and then by two pairs of ranks at degree 2, the second of which
works on slices of the sequence. What a type misses in fp32 is tried once more in float64: a sum of terms that cancel
has fewer right digits than its terms, and other ones in another order.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from launcher.comm import Axis, Mesh
from launcher.errors import ConfigError
from launcher.models.units import ends_of, unit_modules
from launcher.tensor.apply import apply
from launcher.tensor.layers import ColumnParallel, VocabularyHead
from launcher.tensor.plan import matching, model_type_of, plan_of
from launcher.tensor.plans import PLANS
from launcher.tensor.rule import SplitRule
from launcher.tensor.split_model import SplitModel, TensorParallelOptions
from tests.pool import RankContext
from tests.pool.device import DEVICE
from tests.tensor.transparency import Truth, all_ranks, compare_with, truth_of
from tests.tensor.zoo import batch_of, tiny_model

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-6}
LENGTH = 16  # of sequences: degrees divide it
LARGE = 0.05  # of a model: what is smaller needs no mention
WORKS, EXACTLY, REFUSED = "works", "works (float64)", "refused"
UNADAPTED = "does not train with adapters in one process"


@dataclass
class Verdict:
    """One row of the table.

    Args:
        type: model_type.
        tensor, sequence: WORKS, EXACTLY or REFUSED; or what is wrong.
        reason: why it is refused; of sequence parallelism alone where the other works.
        plan: "transformers", "ours", or "both": ours over theirs.
        head: "split" over the vocabulary to the loss, "gathered" before it, "whole" on every rank.
        whole: large parts of the model that every rank has.
        repeated: whose parameters are split, and which every rank computes as a whole.
        styles: of the plan.
        stages: in pipeline stages: WORKS, EXACTLY or REFUSED; or what is wrong.
        uncut: why it is refused there.
    """

    type: str
    tensor: str
    sequence: str
    reason: str = ""
    plan: str = ""
    head: str = ""
    whole: str = ""
    repeated: str = ""
    styles: str = ""
    stages: str = ""
    uncut: str = ""


KEYS = [field.name for field in fields(Verdict)]


class InFloat64(TorchFunctionMode):
    """Code that asks for fp32, whatever the dtype of the model, gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass
class Outcome:
    """Of one model at one degree: a difference, a refusal or an error."""

    difference: float = 0.0
    worst: str = ""
    refusal: str = ""
    error: str = ""


def judge(ctx: RankContext, types: list[str], adapted: bool = False) -> list[Verdict]:
    """The verdicts, on all ranks; `adapted`: of models with LoRA adapters on all linear layers."""
    four, pairs = Mesh.build(DEVICE, tp=4), Mesh.build(DEVICE, tp=2)
    sequence = pairs.axes["dp"].rank == 1
    verdicts = []
    for start in range(0, len(types), ctx.world):
        kinds = types[start : start + ctx.world]
        truths = all_ranks(_truth(kinds[ctx.rank], adapted) if ctx.rank < len(kinds) else None)  # one each
        verdicts += [
            Verdict(kind, UNADAPTED, UNADAPTED)
            if truth is None
            else _judge(kind, truth, four.axes["tp"], pairs.axes["tp"], sequence, adapted)
            for kind, truth in zip(kinds, truths, strict=False)
        ]
    return verdicts


def _model_and_batch(kind: str, adapted: bool) -> tuple[Any, dict[str, Tensor]]:
    model: Any = tiny_model(kind, seed=0)
    if adapted:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    return model, batch_of(kind, seed=0, length=LENGTH)


def _truth(kind: str, adapted: bool) -> Truth | None:
    """Return the numbers of one process; None if it does not train with adapters."""
    try:
        return truth_of(*_model_and_batch(kind, adapted))
    except (RuntimeError, AttributeError):
        if not adapted:
            raise
        return None


def _judge(kind: str, truth: Truth, four: Axis, pair: Axis, sequence: bool, adapted: bool) -> Verdict:
    model, batch = _model_and_batch(kind, adapted)
    facts: dict[str, str] = {}
    found: dict[str, dict[torch.dtype, list[Outcome]]] = {"tensor": {}, "sequence": {}}
    for dtype, tolerance in TOLERANCES.items():
        with nullcontext() if dtype == torch.float32 else InFloat64():
            model, batch = in_dtype(model, batch, dtype)
            if dtype != torch.float32:
                truth = truth_of(model, batch)
            mine = _outcomes(model, batch, truth, four, pair, sequence, facts)
        ranks = all_ranks(mine)
        found["tensor"][dtype] = [at_four for at_four, _ in ranks] + [at_two for _, at_two in ranks[:2]]
        found["sequence"][dtype] = [at_two for _, at_two in ranks[2:]]
        if all(o.difference <= tolerance for outcomes in found.values() for o in outcomes[dtype]):
            break
    refusals = [o.refusal for outcomes in found.values() for o in outcomes[torch.float32]]
    reason = next(filter(None, refusals), "").partition(": ")[2]
    words = {key: word(outcomes) for key, outcomes in found.items()}
    return Verdict(kind, **words, reason=reason, **(facts if words["tensor"] != REFUSED else {}))


def word(outcomes: dict[torch.dtype, list[Outcome]]) -> str:
    """Of what the ranks found in fp32, and in float64 where that was tried."""
    plain = outcomes[torch.float32]
    errors = [o.error for o in plain if o.error]
    if errors:
        return f"error: {errors[0]}"
    if any(o.refusal for o in plain):
        return REFUSED if all(o.refusal for o in plain) else "error: refused at one degree only"
    for (dtype, ranks), word in zip(outcomes.items(), (WORKS, EXACTLY), strict=False):
        worst = max(ranks, key=lambda o: o.difference)
        if worst.difference <= TOLERANCES[dtype]:
            return word
    return f"wrong: {worst.difference:.1e} at {worst.worst}"


def in_dtype(
    model: PreTrainedModel, batch: dict[str, Tensor], dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    if dtype == torch.float32:
        return model, batch
    model = copy.deepcopy(model).to(dtype)
    if any("experts" in name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")  # others have kernels for fp32 only
    return model, {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()
    }


def _outcomes(
    model: PreTrainedModel,
    batch: dict[str, Tensor],
    truth: Truth,
    four: Axis,
    pair: Axis,
    sequence: bool,
    facts: dict[str, str],
) -> tuple[Outcome, Outcome]:
    """At degree 4, and at degree 2."""
    outcomes = []
    for axis, options in ((four, TensorParallelOptions()), (pair, TensorParallelOptions(sequence=sequence))):
        split_model = copy.deepcopy(model)
        outcome = Outcome()
        try:
            made = apply(split_model, axis, options, device=DEVICE)
            if axis is four and isinstance(model, PreTrainedModel):
                facts |= _facts(model, split_model, made)
            found = compare_with(truth, split_model, made, batch)
            outcome.difference, outcome.worst = found.largest, found.worst
        except ConfigError as error:
            outcome.refusal = error.what
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, AssertionError) as error:
            outcome.error = f"{type(error).__name__}: {error}".splitlines()[0]
        outcomes.append(outcome)
    return outcomes[0], outcomes[1]


# ---- what is split, and what is not -------------------------------------------------------------


def _facts(plain: PreTrainedModel, model: PreTrainedModel, made: SplitModel) -> dict[str, str]:
    """Of a split model, for `Verdict`."""
    kind = model_type_of(plain)
    theirs = any(
        matching(pattern).fullmatch(name)
        for pattern in (plain.tp_plan or {})
        if "head" not in pattern
        for name, _ in plain.named_modules()
    )
    head = ends_of(model)[1]
    split_head = isinstance(head, VocabularyHead)
    total = sum(p.numel() for p in plain.parameters())
    split = {name for name, s in made.splits.items() if s.numel < s.shape.numel()}
    blocks = {name for name, _ in unit_modules(model)}
    ends = {id(end) for end in ends_of(model)}
    whole: dict[str, int] = {}
    for name, module in _without_split(model, "", split, blocks, ends):
        name = _starred(name)
        whole[name] = whole.get(name, 0) + sum(p.numel() for p in module.parameters())
    repeated = {
        _starred(name.rpartition(".")[0])
        for name, module in model.named_modules()
        if isinstance(module, ColumnParallel) and module.split.gathers is not None
    }
    return {
        "plan": ("both" if theirs else "ours") if kind in PLANS else "transformers",
        "head": "whole" if not split_head else "gathered" if head.split.gathers else "split",
        "whole": " ".join(name for name, numel in whole.items() if numel >= LARGE * total),
        "repeated": " ".join(sorted(repeated)),
        "styles": " ".join(sorted({rule.style for rule in _rules(plain)})),
    }


def _rules(model: PreTrainedModel) -> Iterator[SplitRule]:
    names = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    for pattern, rule in plan_of(model).items():
        if any(matching(pattern).fullmatch(name) for name in names):
            yield rule


def _without_split(
    module: nn.Module, name: str, split: set[str], blocks: set[str], ends: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules none of whose parameters is split."""
    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        inside = any(parameter.startswith(f"{full}.") for parameter in split)
        if inside or full in blocks:
            yield from _without_split(child, full, split, blocks, ends)
        elif id(child) not in ends and any(True for _ in child.parameters()):
            yield full, child


def _starred(name: str) -> str:
    """A name for all blocks alike."""
    return re.sub(r"\.\d+", ".*", name)
