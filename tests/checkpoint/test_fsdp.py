"""A run that FSDP2 began resumes here, also on other topologies."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import launcher
from launcher.checkpoint import formats
from launcher.checkpoint.fp32 import get_fp32_state_dict_from_zero_checkpoint
from launcher.checkpoint.reader import overlap
from launcher.checkpoint.source import SourceCheckpoint
from launcher.checkpoint.store import load_meta
from launcher.cli.main import main
from launcher.errors import CheckpointError
from tests.checkpoint.test_reader import _Malice
from tests.engine.driving import log_lines
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, share, tiny_llama

BEFORE, AFTER = 3, 5


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def loss_of(step: int, model: Any, rank: int, world: int) -> torch.Tensor:
    (ids,) = share(batch(step, sequences=4) % 61, rank, world)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def begin(ctx: RankContext, root: Path, tied: bool) -> list[float]:
    """Save after some steps, nested, flattened, and as accelerate does; return the losses after that."""
    model: Any = tiny_llama(tied=tied, layers=2, vocab=61, seed=0)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    losses = []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            _save(model, optimizer, root)
        loss = loss_of(step, model, ctx.rank, ctx.world)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses[BEFORE:]


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights = get_model_state_dict(model)
    nested, flattened = (get_optimizer_state_dict(model, optimizer, options=o) for o in (None, flat))
    dcp.save({"model": weights, "optim": nested}, checkpoint_id=root / "nested")
    dcp.save(
        {**weights, "optimizer": flattened, "train_state": {"step": 3}}, checkpoint_id=root / "flattened"
    )
    dcp.save({"model": weights}, checkpoint_id=root / "accelerate" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": nested}, checkpoint_id=root / "accelerate" / "optimizer_0")


def go_on(ctx: RankContext, root: Path, tag: str, stage: int, tied: bool) -> tuple[list[float], list[float]]:
    """Return the losses after loading, and the weight decays of the param groups, which are in another order."""
    model = tiny_llama(tied=tied, layers=2, vocab=61, seed=7)
    config = {
        "train_batch_size": 4, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    optimizer = torch.optim.AdamW([{**g, "weight_decay": 0.5} for g in reversed(groups_of(model))], lr=1.0)
    engine = launcher.initialize(model=model, optimizer=optimizer, config=config, device=DEVICE)[0]
    path, _ = engine.load_checkpoint(root, tag)
    assert path is not None and engine.global_steps == BEFORE
    decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
    losses = []
    for step in range(BEFORE, BEFORE + AFTER):
        loss = loss_of(step, engine, ctx.rank, ctx.world)
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    return losses, decays


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_goes_on(pool: WorkerPool, tmp_path: Path, tied: bool) -> None:
    want = pool.run(begin, 2, tmp_path, tied)[0]
    for tag, ranks, stage in (("nested", 2, 3), ("flattened", 1, 0), ("accelerate", 2, 1)):
        for losses, decays in pool.run(go_on, ranks, tmp_path, tag, stage, tied):
            assert losses == pytest.approx(want, rel=1e-6), tag
            assert decays == [0.0, 0.1]


def test_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Covers `launch import`, `launch inspect`, damage, and a launcher checkpoint without its meta.json."""
    model = tiny_llama(layers=1)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    ids = batch(0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    dcp.save(
        {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=tmp_path / "theirs",
    )
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    got = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ours")
    assert all(torch.equal(got[name], p) for name, p in model.named_parameters())
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "theirs"), "--verify"]) == 0
    told = capsys.readouterr().out
    assert (
        "a checkpoint of torch.distributed.checkpoint" in told and "group 1: lr 0.01, weight decay 0" in told
    )

    (file,) = (tmp_path / "theirs").glob("*.distcp")
    whole = file.read_bytes()
    at = len(whole) // 2
    turned = whole[:at] + bytes(255 - byte for byte in whole[at : at + 64]) + whole[at + 64 :]
    for changed, why in ((whole[:-100], "too short"), (turned, "checksum")):
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=why) as told_of:
            formats.check_bytes(tmp_path / "theirs", 0, 1)
        assert file.name in str(told_of.value)
    (tmp_path / "ours" / "theirs" / "meta.json").unlink()
    with pytest.raises(CheckpointError, match=r"meta\.json cannot be read: it is missing"):
        load_meta(tmp_path / "ours", "theirs")


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    proof = tmp_path / "code-was-run"
    state = {
        "model": {"w": torch.ones(2)},
        "optim": {"param_groups": [{"lr": _Malice(proof), "params": ["w"]}]},
    }
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read"):
        load_meta(tmp_path, "theirs")
    assert not proof.exists()


def test_what_else_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Covers two optimizers, a learning rate in a tensor, averaged weights, and a module named `state`."""
    model = nn.ModuleDict({"state": nn.Linear(2, 2), "rest": nn.Linear(2, 2)})
    made = {}
    for name, rate in (("state", 0.1), ("rest", torch.tensor(0.5))):
        optimizer = torch.optim.AdamW(model[name].parameters(), lr=rate)
        for p in model[name].parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        made[name] = get_optimizer_state_dict(model, optimizer)
    average = {"state": {"rest.weight": {"exp_avg": torch.zeros(2, 2)}}}
    state = {"model": get_model_state_dict(model), "optim": list(made.values()), "ema": average}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    stored = SourceCheckpoint.open(tmp_path, "a")
    assert [group["lr"] for group in stored.options] == [0.1, 0.5]
    assert [sorted(names) for names in stored.groups] == [[f"{name}.bias", f"{name}.weight"] for name in made]
    (told,) = [record.getMessage() for record in caplog.records if record.name == "launcher"]
    assert told.endswith("ignoring entries that launcher does not support: ema")
    states = dict(stored.whole_states(1 << 20))
    assert all(torch.equal(states[name]["model"], p) for name, p in model.named_parameters())
    assert all(states[name]["exp_avg"].count_nonzero() == p.numel() for name, p in model.named_parameters())


def _without_counts(state: dict[str, Any]) -> dict[str, Any]:
    moments = {
        name: {key: v for key, v in own.items() if key != "step"} for name, own in state["state"].items()
    }
    return {**state, "state": moments}


def test_quantised_weights_and_overlapping_chunks(pool: WorkerPool, tmp_path: Path) -> None:
    weights = WithBuffer().state_dict() | {"layer.weight": torch.ones(4, 4, dtype=torch.int8)}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(RanksFailed, match=r"incompatible dtypes: layer.weight is torch.int8"):
        pool.run(load_buffers, 1, tmp_path)
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4]))
    assert overlap([chunk, chunk])
    assert overlap([chunk, replace(chunk, offsets=torch.Size([1, 3]))])
    assert not overlap(
        [chunk, replace(chunk, offsets=torch.Size([1, 4])), replace(chunk, offsets=torch.Size([2, 0]))]
    )


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    numbered = copy.deepcopy(optimizer.state_dict())
    counted = get_optimizer_state_dict(model, optimizer)
    for of in counted["state"].values():
        of["step"] = 1
    weights, named = model.state_dict(), get_optimizer_state_dict(model, optimizer)
    for number, (state, told) in enumerate(
        [
            ({"model": weights, "optim": numbered}, "states for 0, 1, but no weights with those names"),
            ({"model": weights, "optim": counted}, "'step' of (weight|bias) is a Python number"),
            ({"app": {"model": weights}}, "no weights under 'model'"),
            ({"model": weights, "optim": _without_counts(named)}, "moments for bias, but no step count"),
        ]
    ):
        dcp.save(state, checkpoint_id=tmp_path / str(number), no_dist=True)
        with pytest.raises(CheckpointError, match=told):
            load_meta(tmp_path, str(number))


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.norm(self.layer(x)).square().mean()
        return loss


def load_buffers(ctx: RankContext, directory: Path) -> list[torch.Tensor]:
    model = WithBuffer()
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    engine = launcher.initialize(model=model, optimizer=optimizer, config=config, device=DEVICE)[0]
    engine.load_checkpoint(directory, "a")
    return [tensor.clone() for tensor in model.state_dict().values()]


def test_buffers_and_ties(pool: WorkerPool, tmp_path: Path) -> None:
    model = WithBuffer()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 4)).backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    for got in pool.run(load_buffers, 2, tmp_path):
        assert all(map(torch.equal, got, model.state_dict().values()))
    for tied, told in (
        (True, "different values for lm_head.weight"),
        (False, "lacks 1 parameters.*lm_head"),
    ):
        other = tiny_llama(tied=not tied, layers=2, vocab=61, seed=0)
        optimizer = torch.optim.AdamW(groups_of(other), lr=1e-2)
        loss_of(0, other, 0, 1).backward()
        optimizer.step()
        state = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, optimizer)}
        dcp.save(state, checkpoint_id=tmp_path / f"tied{tied}", no_dist=True)
        with pytest.raises(RanksFailed, match=told):
            pool.run(go_on, 1, tmp_path, f"tied{tied}", 1, tied)


def _rates(ctx: RankContext, root: Path, kind: str) -> tuple[list[float], str]:
    """Return the learning rates after loading and after two steps, and the messages about the schedule."""

    def falling(optimizer: torch.optim.Optimizer) -> Any:
        falls = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return (
            torch.optim.lr_scheduler.SequentialLR(optimizer, [falls], []) if kind == "SequentialLR" else falls
        )

    params = {"warmup_num_steps": 10, "warmup_max_lr": 1.0, "warmup_type": "linear"}
    config: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
    if kind == "json":
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    given = None if kind == "json" else falling
    engine = launcher.initialize(model=nn.Linear(2, 2), config=config, lr_scheduler=given, device=DEVICE)[0]
    with log_lines() as lines:
        engine.load_checkpoint(root, "a")
    rates = [engine.get_lr()[0]]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        rates.append(engine.get_lr()[0])
    return rates, " ".join(lines)


def test_a_schedule_goes_on_at_the_step(pool: WorkerPool, tmp_path: Path) -> None:
    """The stored state is the other program's; the schedule of this run replaces it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    got = {kind: pool.run(_rates, 1, tmp_path, kind)[0] for kind in ("json", "LambdaLR", "SequentialLR")}
    # DeepSpeed's schedules repeat their first rate; torch's go on from the rate of the checkpoint.
    assert got["json"][0] == pytest.approx([0.2, 0.3, 0.4])
    assert got["LambdaLR"][0] == pytest.approx([0.5, 1 / 5, 1 / 6])
    assert "continues at step 3 with learning rate 0.2" in got["json"][1]
    assert "continues at step 3 with learning rate 0.5" in got["LambdaLR"][1]
    assert "starts at its first step" in got["SequentialLR"][1]
