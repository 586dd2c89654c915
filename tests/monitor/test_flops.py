"""FLOPs and times of modules: what is counted where, and that no hooks remain."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from launcher.monitor.devices import peak_flops
from launcher.monitor.flops import ModuleMeter

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


def meter_of(model: nn.Module) -> tuple[ModuleMeter, Tensor]:
    return ModuleMeter(model, CPU), torch.randn(4, 8)


def test_forward_and_backward_are_counted_as_they_run() -> None:
    model = nn.Sequential(Block(), Block())
    meter, x = meter_of(model)
    with meter.counting(backward=False):
        loss = model(x).sum()
    with meter.counting(backward=True):
        loss.backward()
    linear = 2 * 4 * 8 * 16
    assert meter.counts.flops == {
        "": 4 * linear,
        **{block: 2 * linear for block in "01"},
        **{f"{block}.{part}": linear for block in "01" for part in ("up", "down")},
    }
    # Two products for each layer, but the first one's input needs no gradient.
    assert meter.counts.backward == (2 * 4 - 1) * linear


def test_counting_changes_no_bit() -> None:
    """FlopCounterMode decomposes SiLU's backward; ours does not."""
    gradients = []
    for counted in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)))
        meter, x = meter_of(model)
        loss = model(x * 3).square().sum()
        if counted:
            with meter.counting(backward=True):
                loss.backward()
        else:
            loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


def test_attention_on_a_cpu() -> None:
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    meter = ModuleMeter(nn.Identity(), CPU)
    with meter.counting(backward=True):
        out = nn.functional.scaled_dot_product_attention(q, k, v)
    product = 2 * 2 * 3 * 5 * 7 * 8
    assert meter.counts.backward == 2 * product
    with meter.counting(backward=True):
        out.sum().backward()
    assert meter.counts.backward == (2 + 5) * product


def test_times_nest_and_no_hook_stays() -> None:
    model = nn.Sequential(Block(), Block())
    meter, x = meter_of(model)
    with meter.timing():
        model(x)
    seconds = meter.counts.seconds
    assert set(seconds) == {name for name, _ in model.named_modules()}
    assert 0 < seconds["0.up"] < seconds["0"] < seconds[""]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_compiled_block_is_timed_as_one() -> None:
    model = nn.Sequential(Block(), Block())
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        compiled.append(graph)
        return graph.forward

    for block in model:
        block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
    meter, x = meter_of(model)
    model(x)
    before = len(compiled)
    with meter.timing():
        model(x)
    assert set(meter.counts.seconds) == {"", "0", "1"}
    assert len(compiled) == before > 0


def test_peaks_by_the_names_that_cuda_gives() -> None:
    peaks = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362e12,
        "Tesla V100-SXM2-32GB": 125e12,
        "cpu": None,
        "NVIDIA A1000": None,
    }
    assert {name: peak_flops(name) for name in peaks} == peaks
