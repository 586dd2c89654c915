"""DeepSpeed's API for sequence parallelism as scripts use it.

Slices come from the adapter, the script combines the loss, or its own attention runs between all-to-alls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.integrations import deepspeed

import launcher
from launcher.errors import ArgumentsError, LauncherError
from launcher.integrations import groups, sequence_groups, stand_ins
from launcher.integrations.distributed_attention import DistributedAttention, _SeqAllToAll
from launcher.integrations.ulysses import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter, _ready
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.sequence.families import BATCHES, model_of
from tests.tensor.running import whole_state

LR = 0.01


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def batches(kind: str, length: int) -> list[dict[str, Tensor]]:
    return [BATCHES[kind](step, length) for step in range(2)]


def trained_on_slices(ctx: RankContext, stage: int, kind: str, length: int) -> dict[str, Any]:
    """Train a step of two microbatches: the first batch of each rank's loader."""
    model = model_of("grouped")
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=2,
    )
    engine: Any = launcher.initialize(model=model, config=config_of(stage), mpu=mpu, device=DEVICE)[0]
    group, rank = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_rank()
    assert (rank, groups._get_sequence_parallel_world_size()) == (ctx.rank, 2)
    mine = [batches(kind, length)[ctx.rank]]
    loader = UlyssesSPDataLoaderAdapter(DataLoader(mine, batch_size=None), rank, group, 2, DEVICE)
    assert len(loader) == 2
    losses, slices = [], []
    for batch in loader:
        slices.append({key: value.tolist() for key, value in batch.items()})
        outputs = engine(**batch)
        assert outputs.logits[0].argmax(-1).shape == batch["input_ids"][0].shape  # a script may read them
        of_slice = engine.module.loss_function(
            logits=outputs.logits, labels=None, shift_labels=batch["shift_labels"], vocab_size=61
        )
        tokens = (batch["shift_labels"] != -100).sum()
        shares = torch.stack(collectives.all_gather(of_slice * tokens, group=group))  # type: ignore[no-untyped-call]
        every = tokens.clone()
        dist.all_reduce(every, group=group)
        loss = shares.sum() / every
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    weights = {name: value for name, value in whole_state(engine).items() if "/" not in name}
    engine.destroy()
    assert model.config._attn_implementation == "sdpa"
    return {"losses": losses, "weights": weights, "slices": slices}


@pytest.mark.parametrize(
    ("stage", "kind", "length"),
    [(3, "packed", 24), pytest.param(2, "left padded", 23, marks=pytest.mark.full),
     pytest.param(1, "plain", 21, marks=pytest.mark.full)],
)  # fmt: skip
def test_slices_of_deepspeeds_adapter(pool: WorkerPool, stage: int, kind: str, length: int) -> None:
    """Losses and weights match one process; real DeepSpeed lets packed documents attend to each other."""
    found = pool.run(trained_on_slices, 2, stage, kind, length)
    model = model_of("grouped")
    losses = []
    for batch in batches(kind, length):
        loss = model(**batch).loss
        (loss / 2).backward()
        losses.append(loss.item())
    torch.optim.SGD(model.parameters(), LR).step()
    for rank in found:
        assert rank["losses"] == pytest.approx(losses, rel=1e-6)
        for name, value in model.named_parameters():
            torch.testing.assert_close(rank["weights"][name], value.detach(), rtol=1e-5, atol=1e-7)
    ids = [torch.cat([torch.tensor(rank["slices"][at]["input_ids"]) for rank in found], 1) for at in range(2)]
    for whole, batch in zip(ids, batches(kind, length), strict=True):
        assert torch.equal(whole[:, :length], batch["input_ids"])


class JsonOfTrainer:
    mismatches = ()

    def is_zero3(self) -> bool:
        return False


def told_of_the_trainer(ctx: RankContext) -> str:
    """Return the state that the Trainer leaves after reading the JSON."""
    of_trainer = JsonOfTrainer()
    deepspeed.set_hf_deepspeed_config(of_trainer)
    try:
        stand_ins.initialize(model=model_of("grouped"), config={**config_of(1), "sequence_parallel_size": 2})
    except LauncherError as error:
        return str(error)
    finally:
        deepspeed.unset_hf_deepspeed_config()
    return "nothing"


def test_a_trainer_that_does_not_know_of_shared_sequences_is_told(pool: WorkerPool) -> None:
    """Its sampler would give different sequences to the ranks that share one."""
    for told in pool.run(told_of_the_trainer, 2):
        assert 'ParallelismConfig(sp_backend="deepspeed", sp_size=2)' in told


class OwnAttention(nn.Module):
    """A causal attention that takes [tokens, batch, heads, width]."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = nn.functional.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, key, value)), is_causal=True, enable_gqa=True
        )
        return found.permute(2, 0, 1, 3)


def exchanged(ctx: RankContext, heads: int, key_heads: int) -> list[Tensor]:
    sequence_groups.initialize_sequence_parallel(2)
    group = sequence_groups.get_sequence_parallel_group()
    parts = [x.chunk(2)[ctx.rank].clone().requires_grad_() for x in inputs(heads, key_heads)]
    out = DistributedAttention(OwnAttention(), group)(*parts, batch_dim_idx=1)
    out.square().sum().backward()
    tokens = _SeqAllToAll.apply(group, parts[0], 2, 0, 1)
    back = _SeqAllToAll.apply(group, tokens, 0, 2, 1)
    assert tokens.shape[0] == 2 * parts[0].shape[0] and torch.equal(back, parts[0])
    gradients = [part.grad for part in parts]
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


def inputs(heads: int, key_heads: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(8, 3, n, 6, generator=g) for n in (heads, key_heads, key_heads)]


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (3, 3), (4, 2)])
def test_attention_of_the_scripts_own(pool: WorkerPool, heads: int, key_heads: int) -> None:
    """This includes head counts that do not divide evenly."""
    whole = [x.requires_grad_() for x in inputs(heads, key_heads)]
    out = OwnAttention()(*whole)
    out.square().sum().backward()
    found = pool.run(exchanged, 2, heads, key_heads)
    for want, *parts in zip([out.detach(), *(x.grad for x in whole)], *found, strict=True):
        assert want is not None
        torch.testing.assert_close(torch.cat(parts), want, rtol=1e-5, atol=1e-6)


def averaged(ctx: RankContext) -> tuple[int, int, list[float]]:
    """Train a model with its own sequence parallelism: gradients are averaged over the sequence group, too."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    engine: Any = launcher.initialize(model=model, config=config, mesh_param=(1, 2), device=DEVICE)[0]
    engine.backward(engine(torch.full((1, 2), float(ctx.rank))).sum())
    engine.step()
    found = engine.seq_parallel_group.size(), engine.seq_dp_world_size, model.weight[0].tolist()
    engine.destroy()
    return found


def test_a_mesh_for_models_of_the_scripts_own(pool: WorkerPool) -> None:
    assert pool.run(averaged, 2) == [(2, 2, [0.5, 0.5])] * 2


def test_another_attention_than_the_models_is_refused() -> None:
    with pytest.raises(LauncherError, match="does not match model config"):
        UlyssesSPAttentionHF.register_with_transformers(model_of("grouped"), "flash_attention_2", 2, 1)


def with_other_slices(ctx: RankContext) -> None:
    model = model_of("grouped")
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 2)
    engine: Any = launcher.initialize(model=model, config=config_of(1), mpu=mpu, device=DEVICE)[0]
    engine(input_ids=torch.zeros(2, 4 + ctx.rank, dtype=torch.int64))


def test_slices_that_are_no_equal_ones_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="share a sequence, but were called with slices of unequal"):
        pool.run(with_other_slices, 2)


def test_batches_without_labels_are_refused() -> None:
    """As those of DPO, whose loss needs the log-probabilities of whole sequences."""
    with pytest.raises(ArgumentsError, match="would compute it from slices"):
        _ready({"input_ids": torch.zeros(2, 8, dtype=torch.long)}, 2)
