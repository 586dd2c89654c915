"""Cross entropy of split logits: torch's values and gradients on the full logits, for a few numbers per token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from launcher.comm import Axis, Mesh, record_collectives
from launcher.errors import LauncherError
from launcher.tensor import loss
from launcher.tensor.loss import LossOptions, causal_lm_loss, vocab_parallel_cross_entropy
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE

ALONE = Axis("tp")
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def truth(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Return torch's loss of full logits."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), **options)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], Tensor, Tensor, LossOptions]:
    """Return the widths of the shares, logits [T, V], labels [T], and the loss's options."""
    widths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any))
    tokens, vocabulary = draw(st.integers(1, 6)), sum(widths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(tokens, vocabulary, generator=generator) * draw(st.sampled_from([0.1, 5.0, 50.0]))
    ignore = draw(st.sampled_from([-100, -1, 0]))
    labels = draw(st.lists(st.sampled_from([ignore, *range(vocabulary)]), min_size=tokens, max_size=tokens))
    return widths, logits, torch.tensor(labels), LossOptions(0, vocabulary, ignore)


@given(problems(), st.sampled_from([1, 8, 1 << 20]))
def test_shares_put_together_are_torchs_loss(problem: Any, chunk: int) -> None:
    """Covers uneven and empty shares, ignored tokens, and rows read in chunks."""
    widths, logits, labels, whole = problem
    shares = list(logits.split(widths, -1))
    settings = [
        LossOptions(sum(widths[:rank]), whole.vocabulary, whole.ignore_index) for rank in range(len(widths))
    ]
    upstream = torch.linspace(1.0, 2.0, len(labels))
    parts = torch.full((len(widths), 3, len(labels)), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_TILE", chunk)
        for part, share, own in zip(parts, shares, settings, strict=True):
            loss.fill_terms(part, share, labels, own)
        numbers = loss.combine(parts)
        losses = loss.losses(numbers, labels, whole)
        found = [
            loss.gradient(share, labels, numbers.largest, numbers.total, upstream, own)
            for share, own in zip(shares, settings, strict=True)
        ]
    leaf = logits.clone().requires_grad_()
    expected = truth(leaf, labels, ignore_index=whole.ignore_index, reduction="none")
    expected.backward(upstream)
    torch.testing.assert_close(losses, expected.detach(), **CLOSE)
    torch.testing.assert_close(torch.cat(found, -1), leaf.grad, **CLOSE)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_reductions(reduction: Any, ignored: str) -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    labels[{"none": [], "some": [0], "all": [0, 1]}[ignored]] = -100
    found, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    mine = vocab_parallel_cross_entropy(found, labels, ALONE, start=0, vocabulary=7, reduction=reduction)
    theirs = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction=reduction)
    assert mine.shape == (labels.shape if reduction == "none" else ())
    torch.testing.assert_close(mine.flatten(), theirs.flatten(), equal_nan=True, **CLOSE)
    mine.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, **CLOSE)


def test_ids_masked_by_minus_infinity() -> None:
    """Models do this for unused ids; a rank may have no others."""
    logits, labels = torch.randn(3, 6), torch.tensor([0, 1, 2])
    logits[:, 3:] = float("-inf")
    parts = torch.empty(2, 3, 3)
    for rank in range(2):
        loss.fill_terms(parts[rank], logits[:, 3 * rank : 3 * rank + 3], labels, LossOptions(3 * rank, 6))
    found = loss.losses(loss.combine(parts), labels, LossOptions(0, 6))
    torch.testing.assert_close(found, F.cross_entropy(logits, labels, reduction="none"), **CLOSE)


def test_the_gradient_of_bf16_logits_is_bf16_and_no_fp32_copy_is_kept() -> None:
    logits, labels = torch.randn(16, 64).bfloat16().requires_grad_(), torch.randint(64, (16,))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        value = vocab_parallel_cross_entropy(logits, labels, ALONE, start=0, vocabulary=64)
    assert [t.dtype for t in kept if t.numel() >= logits.numel()] == [torch.bfloat16]
    assert value.dtype == torch.float32
    value.backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
    numbers = torch.ones(16)
    made = loss.gradient(logits.detach(), labels, numbers, numbers, numbers, LossOptions(0, 64))
    assert made.dtype == torch.bfloat16  # autograd would have rounded a larger one
    exact = logits.detach().float().requires_grad_()
    truth(exact, labels).backward()
    torch.testing.assert_close(logits.grad.float(), exact.grad, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("label", [-1, 64])
def test_a_label_that_no_rank_has_is_refused(label: int) -> None:
    with pytest.raises(LauncherError, match=rf"label {label} is out of range for 64 .*\n.*0 to 63, or -100"):
        vocab_parallel_cross_entropy(
            torch.zeros(2, 64), torch.tensor([3, label]), ALONE, start=0, vocabulary=64
        )


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(LauncherError, match=r"\(2, 3, 8\) do not match labels of shape \(2, 4\)"):
        labels = torch.zeros(2, 4, dtype=torch.long)
        vocab_parallel_cross_entropy(torch.zeros(2, 3, 8), labels, ALONE, start=0, vocabulary=8)


@pytest.mark.parametrize("items", [None, 11, torch.tensor(11)])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_that_models_call_is_transformers_own(items: Any, shifted: bool) -> None:
    logits, labels = torch.randn(2, 6, 9), torch.randint(9, (2, 6))
    labels[0, :3] = -100
    given: dict[str, Any] = {"labels": None, "shift_labels": labels} if shifted else {"labels": labels}
    given |= {"vocab_size": 9, "num_items_in_batch": items, "pad_token_id": 0}
    found = causal_lm_loss(logits, **given, axis=ALONE, start=0, vocabulary=9)
    torch.testing.assert_close(found, ForCausalLMLoss(logits, **given), **CLOSE)


def split_loss(ctx: RankContext, widths: list[int]) -> tuple[Tensor, Tensor, list[Any]]:
    """Return the loss, this rank's gradient, and the bytes sent."""
    axis = Mesh.build(DEVICE, tp=ctx.world).axes["tp"]
    start, (logits, labels) = sum(widths[: ctx.rank]), whole_problem(sum(widths))
    local = logits[..., start : start + widths[ctx.rank]].clone().requires_grad_()
    with record_collectives() as records:
        value = vocab_parallel_cross_entropy(local, labels, axis, start=start, vocabulary=sum(widths))
        value.backward()
    assert local.grad is not None
    return value.detach(), local.grad, records


def whole_problem(vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(3, 5, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (3, 5), generator=generator)
    labels[1, 2:] = -100
    return logits, labels


@pytest.mark.parametrize("widths", [[30, 31], [16, 15, 15, 15], [2, 1, 0, 1]], ids=str)
def test_ranks_send_a_few_numbers_a_token(pool: WorkerPool, widths: list[int]) -> None:
    """One gather in forward, nothing in backward, nothing of vocabulary size."""
    logits, labels = whole_problem(sum(widths))
    logits.requires_grad_()
    expected = truth(logits, labels)
    expected.backward()
    results = pool.run(split_loss, len(widths), widths)
    for value, _, records in results:
        assert torch.equal(value, results[0][0])
        torch.testing.assert_close(value, expected.detach(), **CLOSE)
        assert [(r.op, r.tag, r.numel) for r in records] == [
            ("all_gather", "head/loss", len(widths) * 3 * labels.numel())
        ]
        assert records[0].nbytes == 4 * records[0].numel
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in results], -1), logits.grad, **CLOSE)
