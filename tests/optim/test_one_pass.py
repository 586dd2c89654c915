"""A fused step is bit-identical to torch.optim's fused classes, whatever it casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from launcher.optim import compiled, one_pass
from launcher.optim.elementwise import Lion, UncorrectedAdam, UncorrectedAdamW

SIZES = (1, 0, 7, 64, 1000, 129)
SMALL = 256  # elements of a tile here: some sizes are cut, others joined
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "adam, amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, maximize=True, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-5, fused=True),
    "uncorrected adam": lambda p: UncorrectedAdam(p, lr=0.01, fused=True),
    "uncorrected adamw": lambda p: UncorrectedAdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.5, fused=True),
    "sgd": lambda p: SGD(p, lr=0.01, weight_decay=0.1, fused=True),
    "sgd, momentum": lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=0.3, fused=True),
    "sgd, nesterov": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "lion": lambda p: Lion(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    before = torch.get_num_threads()
    monkeypatch.setattr(one_pass, "TILE", SMALL)
    one_pass._scratch.clear()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)
    one_pass._scratch.clear()


def values(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def by_torch(optimizer: Optimizer, params: list[nn.Parameter], grads: list[Tensor], scale: float) -> None:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.to(p.dtype)
        if isinstance(optimizer, Lion):
            p.grad *= scale
    if not isinstance(optimizer, Lion):
        optimizer.grad_scale = torch.full((), 1 / scale)  # type: ignore[attr-defined]
    optimizer.step()


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_torch(name: str, grad_dtype: torch.dtype, threads: int) -> None:
    """Covers fp32 master weights, gradients of any dtype, and parameters of the gradients' dtype."""
    theirs, ours = ([nn.Parameter(v) for v in values(0)] for _ in range(2))
    reference, optimizer = OPTIMIZERS[name](theirs), OPTIMIZERS[name](ours)
    rule = one_pass.rule_of(optimizer)
    assert rule is not None
    low = [torch.zeros_like(p, dtype=grad_dtype) for p in ours] if grad_dtype != torch.float32 else None
    for turn in range(3):
        by_torch(reference, theirs, values(1 + turn, grad_dtype), 0.3)
        grads = values(1 + turn, grad_dtype)
        one_pass.step(
            rule,
            optimizer.param_groups[0],
            [
                one_pass.FusedSlice(p.data, grad, optimizer.state[p], low[i] if low else None)
                for i, (p, grad) in enumerate(zip(ours, grads, strict=True))
            ],
            scale=0.3,
        )
    for i, (p, q) in enumerate(zip(theirs, ours, strict=True)):
        assert torch.equal(p, q)
        if low:
            assert torch.equal(low[i], p.to(grad_dtype))
        assert reference.state[p].keys() == optimizer.state[q].keys()
        for key, value in reference.state[p].items():
            assert torch.equal(value, optimizer.state[q][key]), key
            assert value.dtype == optimizer.state[q][key].dtype


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_16_bit_master_weights(state: torch.dtype, threads: int) -> None:
    """They are cast up for the step, or stepped in 16 bits if the state is 16-bit."""
    ours = values(0, torch.bfloat16)
    theirs = [nn.Parameter(v.to(state)) for v in ours]
    reference, states = AdamW(theirs, fused=True), [{} for _ in ours]
    for turn in range(3):
        by_torch(reference, theirs, values(1 + turn, torch.bfloat16), 0.5)
        items = [
            one_pass.FusedSlice(*each)
            for each in zip(ours, values(1 + turn, torch.bfloat16), states, strict=True)
        ]
        one_pass.step(one_pass.ADAMW, reference.param_groups[0], items, scale=0.5, dtype=state)
        for p, q in zip(theirs, ours, strict=True):
            assert torch.equal(p.bfloat16(), q)
            p.data.copy_(q)  # rounded at every step


def test_who_steps_otherwise_is_left_to_its_own_step() -> None:
    params = [nn.Parameter(torch.zeros(3))]
    assert one_pass.rule_of(AdamW(params, fused=False)) is None
    assert one_pass.rule_of(type("Mine", (AdamW,), {})(params, fused=True)) is None
    hooked = AdamW(params, fused=True)
    assert one_pass.rule_of(hooked) is one_pass.ADAMW
    torch.optim.lr_scheduler.LambdaLR(hooked, lambda _: 1.0)
    assert one_pass.rule_of(hooked) is one_pass.ADAMW
    hooked.register_step_post_hook(lambda *_: None)
    assert one_pass.rule_of(hooked) is None
    replaced = AdamW(params, fused=True)
    replaced.step = lambda: None  # type: ignore[method-assign,assignment]
    assert one_pass.rule_of(replaced) is None


ADAMS = [name for name in OPTIMIZERS if "adam" in name and "amsgrad" not in name]


def stepped_low(name: str, *, compiles: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the master weights and bf16 parameters after three steps."""
    params = [nn.Parameter(v) for v in values(0)]
    optimizer = OPTIMIZERS[name](params)
    low = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
    rule, group = one_pass.rule_of(optimizer), optimizer.param_groups[0]
    group["maximize"] = name == "adam"
    assert rule is not None
    for turn in range(3):
        grads = values(1 + turn, torch.bfloat16)
        items = [
            one_pass.FusedSlice(p.data, grad, optimizer.state[p], into)
            for p, grad, into in zip(params, grads, low, strict=True)
        ]
        one_pass.step(rule, group, items, scale=0.3, compiles=compiles)
    return [p.data for p in params], low


@pytest.mark.parametrize("name", ADAMS)
def test_the_loop_that_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its formula, run without a compiler, matches torch's kernels to 1e-6."""
    calls: list[int] = []

    def loop(weights: Tensor, *rest: Tensor) -> None:
        calls.append(weights.numel())
        compiled.update(weights, *rest)

    monkeypatch.setattr(compiled, "loop", lambda: loop)
    monkeypatch.setattr(compiled, "SMALLEST", 100)
    want, (got, low) = stepped_low(name, compiles=False)[0], stepped_low(name, compiles=True)
    assert calls == [1000, 129] * 3, "small slices are left to torch's kernels"
    for a, b, c in zip(want, got, low, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)
        assert torch.equal(c, b.bfloat16())


def test_without_a_compiler_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> Callable[..., None]:
        def call(*tensors: Tensor) -> None:
            raise RuntimeError("g++ is not there")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(compiled, "SMALLEST", 1)
    compiled.loop.cache_clear()
    want, got = stepped_low("adamw", compiles=False)[0], stepped_low("adamw", compiles=True)[0]
    compiled.loop.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    told = [record.getMessage() for record in caplog.records]
    assert told == ["optimizer step could not be compiled; falling back to torch's kernels: g++ is not there"]
