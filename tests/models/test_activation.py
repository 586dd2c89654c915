"""Activation checkpointing: what is saved, where inputs are stored, and that results match a plain backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.comm import Axis, Mesh
from launcher.config import ActivationCheckpointingConfig
from launcher.models import activation
from launcher.models.activation import Checkpointer, checkpoint_blocks
from launcher.models.saved_inputs import BlockInputs, SavedInput, SavedInputPolicy, SavedInputs
from launcher.models.units import unit_modules
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import SEQ, batch, tiny_gpt2, tiny_llama

ONE = Axis("tp")
IDS = batch(0, 4)
INPUT_BYTES = 4 * SEQ * 32 * 4  # of one block: [4, SEQ, hidden 32] in fp32


def prepared(model: Any, **keys: Any) -> Checkpointer:
    made = checkpoint_blocks(model, unit_modules(model), ActivationCheckpointingConfig(**keys), ONE)
    assert made is not None
    return made


def gradients(model: nn.Module, seed: int = 0, **more: Tensor) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(seed)
    loss = model(input_ids=IDS, labels=IDS, **more).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: Any, want: Any) -> None:
    assert got[0] == want[0] and got[1].keys() == want[1].keys()
    for name, value in want[1].items():
        assert torch.equal(got[1][name], value), name


class Saved:
    """Bytes that autograd saves, without parameters."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _count(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.numel() * tensor.element_size() * (not isinstance(tensor, nn.Parameter))
        return tensor


@pytest.mark.key("activation_checkpointing", "activation_checkpointing.number_checkpoints")
def test_fewer_bytes_are_saved_the_more_blocks_are_checkpointed() -> None:
    def saved(number: int | None) -> int:
        model = tiny_llama(layers=4)
        if number is not None:
            assert len(prepared(model, number_checkpoints=number).names) == number
        with Saved() as counted:
            model(input_ids=IDS, labels=IDS)
        return counted.bytes

    plain, two, four = saved(None), saved(2), saved(4)
    block = (plain - four) / 4
    assert two == pytest.approx(plain - 2 * block, rel=0.02)
    assert block > 10 * INPUT_BYTES  # an input of a block is a small part of what a block saves


@pytest.mark.parametrize("keys", [
    {}, {"number_checkpoints": 1}, {"cpu_checkpointing": True}, {"contiguous_memory_optimization": True},
    {"partition_activations": True}, {"synchronize_checkpoint_boundary": True}, {"profile": True},
    {"cpu_checkpointing": True, "contiguous_memory_optimization": True, "partition_activations": True},
], ids=str)  # fmt: skip
def test_the_same_gradients_with_dropout(keys: dict[str, Any]) -> None:
    """Gradients are bit-identical, so recomputation restores the forward's random state and drops the same elements."""

    def model() -> Any:
        return tiny_gpt2(layers=3, resid_pdrop=0.2, attn_pdrop=0.2, embd_pdrop=0.2)

    want, other = gradients(model()), gradients(model(), seed=1)
    assert want[0] != other[0]
    checkpointed = model()
    prepared(checkpointed, **keys)
    assert_same(gradients(checkpointed), want)


@pytest.mark.key("activation_checkpointing.cpu_checkpointing")
def test_saved_inputs_wait_on_the_host() -> None:
    def on_host(wanted: bool) -> tuple[int, int, int]:
        model = tiny_llama()
        saved = prepared(model, cpu_checkpointing=wanted).saved
        loss = model(input_ids=IDS, labels=IDS).loss
        waiting = saved.kept_bytes
        loss.backward()
        del loss
        return waiting, saved.kept_bytes, saved.host_bytes

    assert on_host(True) == (3 * INPUT_BYTES, 0, 3 * INPUT_BYTES)
    assert on_host(False)[2] == 0


def places_of(model: Any, saved: SavedInputs) -> list[int]:
    """Return the addresses of the storages that hold block inputs during a forward."""
    found: list[int] = []
    pack = saved.pack

    def spy(tensor: Tensor, block: BlockInputs) -> Any:
        kept = pack(tensor, block)
        found.append(kept.piece.untyped_storage().data_ptr())
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "pack", spy)
        model(input_ids=IDS, labels=IDS).loss.backward()
    return found


@pytest.mark.key("activation_checkpointing.contiguous_memory_optimization")
@pytest.mark.parametrize("on_host", [False, True])
def test_one_buffer_for_all_saved_inputs(on_host: bool) -> None:
    model = tiny_llama()
    saved = prepared(model, contiguous_memory_optimization=True, cpu_checkpointing=on_host).saved
    first, second = places_of(model, saved), places_of(model, saved)
    assert len(first) == 3 and len(set(first + second)) == 1
    other = tiny_llama()
    keys = {"cpu_checkpointing": True} if on_host else {"number_checkpoints": 3}
    assert len(set(places_of(other, prepared(other, **keys).saved))) == (3 if on_host else 0)


def packed(saved: SavedInputs, tensor: Tensor) -> tuple[SavedInput, BlockInputs]:
    """Pass it as a block's only input."""
    with saved.block():
        block = BlockInputs(lambda: None)
        return saved.pack(tensor, block), block


def test_places_are_given_back_and_never_shared() -> None:
    saved = SavedInputs(SavedInputPolicy(places=2))
    tensors = [torch.full((4,), float(i)) for i in range(4)]
    kept = [packed(saved, tensor) for tensor in tensors]  # two find no place
    odd = packed(saved, torch.ones(3))
    assert [saved.unpack(*k)[0].item() for k in kept] == [0, 1, 2, 3] and saved.unpack(*odd).shape == (3,)
    again, place = saved.unpack(*kept[0]), kept[0][0].piece.data_ptr()
    kept[0] = packed(saved, torch.full((4,), 9.0))  # the place is still taken while this is made
    assert kept[0][0].piece.data_ptr() != place
    kept[1] = packed(saved, torch.full((4,), 8.0))
    assert kept[1][0].piece.data_ptr() == place and again[0] == 0
    assert saved.kept_bytes == 4 * 16 + 12


@pytest.mark.key("activation_checkpointing.synchronize_checkpoint_boundary")
@pytest.mark.parametrize("wanted", [False, True])
def test_the_device_is_waited_for_at_each_boundary(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    calls = []
    monkeypatch.setattr(activation, "synchronize_device", lambda: calls.append(1))
    model = tiny_llama()
    prepared(model, synchronize_checkpoint_boundary=wanted)
    gradients(model)
    assert len(calls) == (3 * 2 * 2 if wanted else 0)  # blocks, forward and recomputation, both ends


@pytest.mark.key("activation_checkpointing.profile")
@pytest.mark.parametrize("wanted", [False, True])
def test_times_of_each_block(wanted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama(layers=2)
    checkpointer = prepared(model, profile=wanted)
    gradients(model)
    checkpointer.steps = 1
    checkpointer.print_profile()
    checkpointer.print_profile()  # nothing new
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == wanted
    for name in ("model.layers.0 forward", "model.layers.0 recompute", "model.layers.1 recompute"):
        assert not wanted or f"{name} " in lines[0]


# ---- split over an axis -------------------------------------------------------------------------


def split(ctx: RankContext, wanted: bool) -> tuple[int, Any]:
    """Identical inputs on the ranks of the dp axis simulate tensor parallelism."""
    axis = Mesh.build(torch.device("cpu")).dp
    model = tiny_llama()
    config = ActivationCheckpointingConfig(partition_activations=wanted, cpu_checkpointing=not wanted)
    made = checkpoint_blocks(model, unit_modules(model), config, axis)
    assert made is not None
    loss = model(input_ids=IDS, labels=IDS).loss
    kept = made.saved.kept_bytes
    loss.backward()
    return kept, (loss.item(), {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.key("activation_checkpointing.partition_activations")
def test_split_inputs_need_half_the_memory_on_two_ranks(pool: WorkerPool) -> None:
    want = gradients(tiny_llama())
    for wanted, kept_bytes in ((False, 3 * INPUT_BYTES), (True, 3 * INPUT_BYTES // 2)):
        for kept, got in pool.run(split, 2, wanted):
            assert kept == kept_bytes
            assert_same(got, want)


def split_odd(ctx: RankContext) -> None:
    saved = SavedInputs(SavedInputPolicy(Mesh.build(torch.device("cpu")).dp, on_host=True, places=2))
    for tensor in (
        torch.arange(7.0).view(7, 1),
        torch.arange(3),
        torch.tensor(2.0),
        torch.ones(5).bfloat16(),
    ):
        kept, block = packed(saved, tensor)
        assert torch.equal(saved.unpack(kept, block), tensor)
        assert kept.piece.numel() == (-(-tensor.numel() // 2) if kept.split else tensor.numel())


def test_sizes_that_do_not_divide(pool: WorkerPool) -> None:
    pool.run(split_odd, 2)


# ---- with what models do themselves -------------------------------------------------------------


class Calls:
    """Counts the calls of each layer's attention in a forward and a backward."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(self._one_more)

    def _one_more(self, *_: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_blocks_are_not_checkpointed_twice(when: str) -> None:
    want = gradients(tiny_llama())
    model = tiny_llama()
    enable = model.gradient_checkpointing_enable
    if when == "before":
        enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        with pytest.warns(UserWarning, match="is switched off"):
            prepared(model)
    else:
        prepared(model)
        enable()
    calls = Calls(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(gradients(model), want)
    assert calls.count == 3 * 2
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)


def test_a_checkpoint_inside_a_checkpoint_only_calls() -> None:
    counted: list[int] = []
    checkpointer = Checkpointer(SavedInputPolicy())

    def inner(x: Tensor) -> Tensor:
        counted.append(1)
        return x.sin().exp()

    def outer(x: Tensor) -> Tensor:
        return checkpointer.run("inner", inner, x).cos()

    x = torch.ones(3, requires_grad=True)
    checkpointer.run("outer", outer, x).sum().backward()
    assert len(counted) == 2
    assert x.grad is not None and x.grad.allclose(-(x.sin().exp().sin() * x.sin().exp() * x.cos()))


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_a_model_that_would_fill_its_cache(build: Any) -> None:
    """Models from the Hub set use_cache: a recomputation must not append keys and values again."""
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    want = gradients(build(use_cache=False), attention_mask=mask)
    model = build(use_cache=True)
    prepared(model)
    assert_same(gradients(model, attention_mask=mask), want)
    with torch.no_grad():
        assert model(input_ids=IDS).past_key_values.get_seq_length() == SEQ  # generation still caches


@pytest.fixture
def plain() -> Iterator[nn.Module]:
    yield nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_a_model_without_blocks_is_told(plain: nn.Module) -> None:
    with pytest.warns(UserWarning, match="no transformer blocks"):
        made = checkpoint_blocks(plain, [], ActivationCheckpointingConfig(), ONE)
    assert made is not None and made.names == []
    assert checkpoint_blocks(plain, [], None, ONE) is None
