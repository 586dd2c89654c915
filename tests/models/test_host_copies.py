"""Block inputs offloaded to the host: copies overlap with compute, in the right order, and reads wait for them."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.models import host_copies
from launcher.models.activation import Checkpointer
from launcher.models.host_copies import SideStreamCopies, host_memory
from launcher.models.saved_inputs import SavedInputPolicy
from tests.models.late import Late, late_lanes
from tests.models.test_activation import IDS, INPUT_BYTES, assert_same, gradients, prepared
from tests.pool.reference import tiny_gpt2, tiny_llama

OUT, BACK = "out", "back"


class Blocks:
    """Functions named 0, 1, ... that record when they run."""

    def __init__(self, events: list[str], number: int = 3) -> None:
        self.events, self.number = events, number
        self.checkpointer = Checkpointer(SavedInputPolicy(on_host=True))

    def __call__(self, x: Tensor, *shared: Tensor) -> Tensor:
        for i in range(self.number):
            x = self.checkpointer.run(str(i), self._block(i), x, *shared)
        return x

    def _block(self, i: int) -> Any:
        def block(x: Tensor, *shared: Tensor) -> Tensor:
            self.events.append(f"run {i}")
            for one in shared:
                x = x * one
            return (x + i).sin()

        return block


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the events of the copy streams.

    "out 0": the first copy to the host starts; "out 0 done": it is waited for; "back 0": ...
    """
    events: list[str] = []
    monkeypatch.setattr(
        host_copies, "lanes", lambda _: (Late(OUT, events, count()), Late(BACK, events, count()))
    )
    return events


def test_the_next_input_of_the_backward_sets_off_before_it_is_needed(events: list[str]) -> None:
    blocks = Blocks(events)
    x = torch.linspace(0, 1, 8, requires_grad=True)
    loss = blocks(x).sum()
    forward = [line for i in range(3) for line in (f"out {i}", f"run {i}", f"out {i} done")]
    assert events == forward
    events.clear()
    loss.backward()
    assert events == [
        "back 0", "back 0 done", "back 1", "run 2",
        "back 1 done", "back 2", "run 1",
        "back 2 done", "run 0",
    ]  # fmt: skip


def test_a_microbatch_behind_another(events: list[str]) -> None:
    """Two forwards, then their backwards: a prefetch for the wrong one is waited for and discarded."""
    blocks = Blocks(events, number=2)
    xs = [torch.linspace(i, i + 1, 8, requires_grad=True) for i in range(2)]
    losses = [blocks(x).sum() for x in xs]
    for loss in losses:
        loss.backward()
    for x in xs:
        alone = x.detach().clone().requires_grad_()
        (alone.sin() + 1).sin().sum().backward()
        assert torch.equal(x.grad, alone.grad)
    started = [line for line in events if line.startswith("back") and not line.endswith("done")]
    assert len(started) == 4 and all(f"{line} done" in events for line in started)
    assert blocks.checkpointer.saved.kept_bytes == 0


def test_a_backward_that_takes_another_way(events: list[str]) -> None:
    """The previous block in time is not the next one in the backward: its copy is waited for before its memory is
    freed.
    """
    blocks = Blocks(events, number=1)
    losses = [blocks(torch.full((4,), float(i), requires_grad=True)).sum() for i in range(4)]
    for i in (3, 0, 2, 1):
        losses[i].backward(retain_graph=True)
        losses[i].backward()  # a second time
    started = {line for line in events if line.startswith("back") and not line.endswith("done")}
    pending = {line for line in started if f"{line} done" not in events}
    assert len(pending) <= 1  # never more than one block is ahead


def test_what_all_blocks_share_is_copied_once(events: list[str]) -> None:
    blocks = Blocks(events)
    mask = torch.linspace(1, 2, 8)
    x = torch.linspace(0, 1, 8, requires_grad=True)
    loss = blocks(x, mask).sum()
    assert blocks.checkpointer.saved.kept_bytes == (3 + 1) * 8 * 4
    before = mask.clone()
    mask.mul_(2)  # the same memory, another value
    other = blocks(x, mask).sum()
    assert blocks.checkpointer.saved.kept_bytes == (3 + 1 + 2 + 1) * 8 * 4  # both begin with x
    for result, factor in ((loss, before), (other, mask)):
        plain = x.detach().clone().requires_grad_()
        y = plain
        for i in range(3):
            y = (y * factor + i).sin()
        y.sum().backward()
        (got,) = torch.autograd.grad(result, x)
        assert torch.equal(got, plain.grad)


def test_a_block_that_fails_leaves_nothing_on_its_way(events: list[str]) -> None:
    def failing(x: Tensor) -> Tensor:
        raise KeyError("in the block")

    with pytest.raises(KeyError):
        Checkpointer(SavedInputPolicy(on_host=True)).run("0", failing, torch.ones(3, requires_grad=True))
    assert events == ["out 0", "out 0 done"]


@pytest.mark.parametrize(
    "keys", [{}, {"contiguous_memory_optimization": True}, {"number_checkpoints": 2}], ids=str
)
def test_late_copies_change_no_bit(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]) -> None:
    """A copy may complete as late as it is waited for."""

    def model() -> Any:
        return tiny_gpt2(layers=3, resid_pdrop=0.2, attn_pdrop=0.2, embd_pdrop=0.2)

    want = gradients(model())
    monkeypatch.setattr(host_copies, "lanes", late_lanes)
    checkpointed = model()
    prepared(checkpointed, cpu_checkpointing=True, **keys)
    for _ in range(2):
        checkpointed.zero_grad()
        assert_same(gradients(checkpointed), want)


@pytest.mark.key("activation_checkpointing.cpu_checkpointing")
def test_inputs_that_are_given_by_name() -> None:
    checkpointer = Checkpointer(SavedInputPolicy(on_host=True))
    x = torch.ones(4, 5, requires_grad=True)
    out = checkpointer.run("0", lambda a, *, b, scale: a * b.exp() * scale, x, b=x * 2, scale=3.0)
    assert checkpointer.saved.kept_bytes == 2 * 4 * 5 * 4
    out.sum().backward()
    assert torch.allclose(x.grad, 9 * torch.ones(4, 5) * torch.tensor(2.0).exp())


def test_host_memory_is_plain_without_a_gpu() -> None:
    memory = host_memory(6, torch.ones(2, dtype=torch.bfloat16))
    assert memory.shape == (6,) and memory.dtype == torch.bfloat16 and not memory.is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu() -> None:
    """Results are bit-identical, and the inputs use no device memory between forward and backward."""
    device = torch.device("cuda")

    def run(**keys: Any) -> tuple[int, list[Tensor]]:
        model = tiny_llama(layers=8, hidden=256).to(device)
        prepared(model, **keys)
        ids = IDS.to(device)
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=ids, labels=ids).loss
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held, [p.grad.clone() for p in model.parameters()]

    held, want = run()
    less, got = run(cpu_checkpointing=True)
    assert held - less >= 8 * INPUT_BYTES * (256 // 32)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    lane = SideStreamCopies(device)
    source, host = torch.ones(1 << 20, device=device), host_memory(1 << 20, torch.ones(1, device=device))
    lane.wait(lane.copy(host, source))
    torch.cuda.synchronize()
    assert host.is_pinned() and bool((host == 1).all())
