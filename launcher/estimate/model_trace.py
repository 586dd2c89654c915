"""Memory traces of a model's blocks and ends, from one microbatch of a shortened model with fake tensors."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm import Axis, Mesh
from launcher.config import ActivationCheckpointingConfig, Config
from launcher.engine.assemble import split_layers
from launcher.engine.batches import call, loss_in
from launcher.engine.dtypes import DTYPES, autocast_dtype, cast_buffers, special_dtypes
from launcher.engine.same_inputs import CutBy
from launcher.engine.sharing import share_sequences, tile
from launcher.estimate.attention_kernels import CPU_KERNELS, attention_of
from launcher.estimate.fake import FakeMode, fused_dropout
from launcher.estimate.live import LiveBytes
from launcher.estimate.memory_trace import (
    BlockTrace,
    MemoryTrace,
    TraceRecorder,
    change_of,
    relative,
)
from launcher.estimate.short_model import ShortModel, shortened
from launcher.models.activation import checkpoint_blocks
from launcher.models.units import ends_of, unit_modules
from launcher.pipeline.hf.parts import parts_of
from launcher.tensor.layers import give_own_backward
from launcher.tensor.split_model import loss_only
from launcher.tensor.weight_gradients import adding_in, putting_off

CPU = torch.device("cpu")
IDS = 100  # token ids are drawn below this number, or the size of a smaller vocabulary
SECTIONS = (
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "fp16",
    "bf16",
    "torch_autocast",
    "data_types",
)


@dataclass(frozen=True)
class ModelTrace:
    """The trace of a microbatch for each block of the full model.

    Args:
        trace: trace of the short model.
        late: the same with deferred weight gradients of linear layers; None if not requested.
        stands_for: see `ShortModel`.
        hidden: bytes of the hidden states between blocks.
        local: bytes that the model's forward allocates before its blocks and that only its local variables
            reference: they are freed when forward returns, which in a pipeline is the end of the first stage.
    """

    trace: MemoryTrace
    late: MemoryTrace | None
    stands_for: tuple[int, ...]
    hidden: int
    local: int = 0

    def of(self, block: int, *, late: bool = False) -> BlockTrace:
        """Return the trace of a block of the full model."""
        trace = self.late if late and self.late is not None else self.trace
        return trace.blocks[self.stands_for[block]]


class ModelTraces:
    """Traces of a model, recorded on demand and cached.

    Args:
        model: the full model on meta; not modified.
        expert_load: tokens routed to a rank's experts, relative to an even share.
        attention: kernels of the device.

    Attributes:
        used: kernels that the traces have used so far.
    """

    def __init__(
        self, model: nn.Module, expert_load: float = 1.0, attention: Collection[str] = CPU_KERNELS
    ) -> None:
        self._model, self._load, self._attention = model, expert_load, attention
        self.used: set[str] = set()
        self._known: dict[str, ModelTrace] = {}

    def of(self, config: Config, sequence: int, *, recomputed: bool) -> ModelTrace:
        """Return the trace of a microbatch for a configuration.

        Args:
            config: resolved configuration.
            sequence: sequence length in tokens.
            recomputed: whether blocks are recomputed, as configured in `activation_checkpointing`.
        """
        section = section_of(config) if recomputed else None
        late = config.pipeline.degree > 1 and config.pipeline.schedule.startswith("zb")
        key = json.dumps(
            [
                {name: getattr(config, name).to_dict() for name in SECTIONS},
                section and section.to_dict(),
                [config.pipeline.degree > 1, late, config.train_micro_batch_size_per_gpu],
                [sequence, config.cp_degree, config.tiled_loss, config.tiled_mlp],
            ],
            default=str,
            sort_keys=True,
        )
        if key not in self._known:
            special = special_dtypes(config, self._model)
            with expert_load(config, self._load), attention_of(self._attention, self.used):
                trace = _traced(shortened(self._model), config, section, special, sequence, late=late)
            self._known[key] = trace
        return self._known[key]


def expert_load(config: Config, load: float) -> AbstractContextManager[None]:
    """Return a context in which a rank's experts get `load` times an even share of the tokens.

    The load is limited to all tokens and to the capacity of the experts.
    """
    section = config.expert_parallel
    if section.degree == 1:
        return nullcontext()
    from launcher.experts.routing import rehearsed_load

    return rehearsed_load(min(load, section.degree, section.capacity_factor or load))


def section_of(config: Config) -> ActivationCheckpointingConfig | None:
    """Return the configured activation checkpointing of a Hugging Face model; None without recomputation."""
    if config.pipeline.degree > 1 and config.pipeline.activation_checkpoint_interval == 1:
        return config.activation_checkpointing or ActivationCheckpointingConfig()
    return config.activation_checkpointing


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside the context: a dispatch mode only sees the operations of its thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Replace meta buffers by zeros on `device`: buffers are small, and only their shapes matter."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)


def microbatch(model: nn.Module, sequences: int, sequence: int) -> dict[str, Tensor]:
    """Return a batch of random token ids [sequences, sequence] from the model's vocabulary."""
    config: Any = model.config
    ids = torch.randint(min(IDS, config.get_text_config().vocab_size), (sequences, sequence))
    return {"input_ids": ids, "labels": ids}


def _traced(
    short: ShortModel,
    config: Config,
    section: ActivationCheckpointingConfig | None,
    special: Mapping[str, torch.dtype],
    sequence: int,
    *,
    late: bool,
) -> ModelTrace:
    model, tp, cp = short.model, config.tensor_parallel.degree, config.cp_degree
    # The last cp rank: without zigzag, its queries attend to the most keys.
    mesh, spread = Mesh.planned(CPU, cp * tp, (cp - 1) * tp, cp=cp, tp=tp), None
    if (ep := config.expert_parallel.degree) > 1:
        from launcher.experts.apply import apply as apply_experts

        by = config.expert_parallel.dispatch
        spread = apply_experts(model, Axis("ep", ep), mesh, by)  # the first rank has the most experts
    split_layers(model, mesh, config, spread.splits if spread else ())
    tiled = tile(model, config, CutBy.HOOKS)
    shared = share_sequences(model, mesh, config, CutBy.HOOKS)
    blocks = unit_modules(model)
    if section is not None:
        every = section.model_copy(
            update={"number_checkpoints": None, "contiguous_memory_optimization": False, "profile": False}
        )
        checkpoint_blocks(model, blocks, every, mesh.axes["tp"])
    if config.pipeline.degree > 1:
        for _, block in blocks:
            give_own_backward(block)
    called = _untied(model) if config.pipeline.degree > 1 else {}
    live = LiveBytes()
    autocast = autocast_dtype(config)
    casting = torch.autocast(CPU.type, autocast) if autocast else nullcontext()
    with one_thread(), FakeMode(live), fused_dropout():
        _fill(model, DTYPES[config.dtype], special)
        fill_buffers(model, CPU)
        cast_buffers(config, model)
        batch = microbatch(model, int(str(config.train_micro_batch_size_per_gpu)), sequence)
        ends = {name for name, m in model.named_modules() if m in ends_of(model)}
        recorder = TraceRecorder(live, model, [name for name, _ in blocks], sorted(ends), called)
        with recorder.listening():
            _run(recorder, model, batch, casting, later=False)  # warmup: allocates what is created only once
            trace = _recorded(recorder, model, batch, casting, later=False)
            behind = _recorded(recorder, model, batch, casting, later=True) if late else None
            local = 0
            if config.pipeline.degree > 1:
                first = change_of(trace.before.forward) + change_of(trace.blocks[0].forward)
                local = first - _held_after(blocks[0][1], live, model, batch, casting)
    names = [name for name, _ in blocks]
    text: Any = getattr(model, "config", None)
    width = int(getattr(text.get_text_config(), "hidden_size", 0)) if text is not None else 0
    hidden = batch["input_ids"].numel() * width * (autocast or DTYPES[config.dtype]).itemsize
    if shared is not None:
        hidden = hidden * shared.layout.padded(sequence) // (sequence * cp)
        shared.remove()
    for changed in tiled:
        changed.remove()
    if config.tensor_parallel.sequence_parallel:
        hidden //= tp
    late_trace = behind and _for_any(behind, names)
    return ModelTrace(_for_any(trace, names), late_trace, short.stands_for, hidden, local)


def _untied(model: nn.Module) -> dict[str, str]:
    """Untie parameters that the modules after the blocks share with those before them.

    In a pipeline, each copy gets its gradient in the backward of its own stage.

    Returns:
        name of each new parameter -> name of the parameter that it was tied to.
    """
    parts = parts_of(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    first = {parameter for _, module in parts.before for parameter in module.parameters()}
    called: dict[str, str] = {}
    for name, module in parts.after:
        for inner, holder in module.named_modules():
            for key, parameter in holder._parameters.items():
                if parameter is not None and parameter in first:
                    own = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
                    own.__dict__.update(parameter.__dict__)
                    holder._parameters[key] = own
                    called[".".join(filter(None, (name, inner, key)))] = names[parameter]
    return called


def _fill(model: nn.Module, dtype: torch.dtype, special: Mapping[str, torch.dtype]) -> None:
    made: dict[nn.Parameter, nn.Parameter] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                own = (
                    special.get(names[parameter], dtype) if parameter.is_floating_point() else parameter.dtype
                )
                values = torch.empty(parameter.shape, dtype=own)
                made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                made[parameter].__dict__.update(parameter.__dict__)
            module._parameters[key] = made[parameter]


def _recorded(
    recorder: TraceRecorder,
    model: nn.Module,
    batch: dict[str, Tensor],
    casting: AbstractContextManager[Any],
    *,
    later: bool,
) -> MemoryTrace:
    with recorder.recording():
        _run(recorder, model, batch, casting, later=later)
    return recorder.trace


def _run(
    recorder: TraceRecorder,
    model: nn.Module,
    batch: dict[str, Tensor],
    casting: AbstractContextManager[Any],
    *,
    later: bool,
) -> None:
    with casting, loss_only():
        loss = loss_in(call(model, batch))
    loss = loss * 1.0  # as the engine weights the loss
    recorder.turn()
    with putting_off() if later else nullcontext() as put_off, adding_in(recorder.note_own):
        loss.backward()
    if put_off is not None:
        recorder.stop()
        put_off.computed()


def _held_after(
    block: nn.Module,
    live: LiveBytes,
    model: nn.Module,
    batch: dict[str, Tensor],
    casting: AbstractContextManager[Any],
) -> int:
    """Return the additional bytes that are live when forward is aborted after a block."""
    outputs: list[Any] = []

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)
        raise _LeftError

    handle, before = block.register_forward_hook(leave), live.now
    try:
        with casting, loss_only():
            call(model, batch)
    except _LeftError:
        pass  # the frames of the forward, and their local variables, are gone
    finally:
        handle.remove()
    return live.now - before


class _LeftError(Exception):
    """Raised to abort the forward after a block."""


def _for_any(trace: MemoryTrace, names: list[str]) -> MemoryTrace:
    for piece, name in zip(trace.blocks, names, strict=True):
        piece.forward, piece.backward = relative(piece.forward, name), relative(piece.backward, name)
    return trace
