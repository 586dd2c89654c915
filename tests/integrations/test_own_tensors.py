"""Tensors that scripts split, send, scale and write themselves with DeepSpeed's helpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher.errors import ConfigError, LauncherError
from launcher.integrations.surface import look_up
from launcher.optim.loss_scale import LossScaleExhausted
from tests.pool import RankContext, WorkerPool


def cut(ctx: RankContext) -> list[bool]:
    partitioned, gather = (look_up("runtime.utils", n) for n in ("PartitionedTensor", "all_gather_dp_groups"))
    found = []
    for shape in ((4, 3), (5,)):  # [4, 3] is cut evenly, [5] is not
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        part = partitioned(whole, dist.group.WORLD)
        again = partitioned.from_meta(part.to_meta(), part.data(), dist.group.WORLD)
        found += [torch.equal(each.full(), whole) for each in (part, again)]
        found.append(part.local_size().numel() < whole.numel() and part.full_size() == list(shape))
    flat = torch.zeros(6)
    parts = list(flat.chunk(2))
    parts[ctx.rank] += ctx.rank + 1.0
    gather([flat], [parts], [dist.group.WORLD], 1, 4)
    return [*found, flat.tolist() == [1, 1, 1, 2, 2, 2]]


def sent(ctx: RankContext) -> list[Any]:
    topology, grid = (
        look_up("runtime.pipe.topology", n) for n in ("PipeDataParallelTopology", "PipelineParallelGrid")
    )
    send, recv, start = (look_up("runtime.pipe.p2p", n) for n in ("send", "recv", "init_process_groups"))
    start(grid(topology(2, 1)))
    tensor = torch.full((3,), float(ctx.rank))
    if ctx.rank == 0:
        send(tensor, 1)
    else:
        recv(tensor, 0)
    return tensor.tolist()


def test_a_tensor_that_a_script_cuts_itself(pool: WorkerPool) -> None:
    assert pool.run(cut, 2) == [[True] * 7] * 2


def test_a_tensor_goes_to_the_next_stage(pool: WorkerPool) -> None:
    assert pool.run(sent, 2) == [[0.0] * 3] * 2


def test_a_loss_scale_of_ones_own() -> None:
    make = look_up("runtime.fp16.loss_scaler", "CreateLossScaler")
    arguments = {
        "init_scale": 8,
        "scale_window": 2,
        "min_scale": 2,
        "delayed_shift": 1,
        "consecutive_hysteresis": False,
    }
    scaler = make(torch.half, 0, True, arguments)
    weight = torch.ones(2, requires_grad=True)
    scaler.backward((weight * 3).sum())
    assert weight.grad is not None and weight.grad.tolist() == [24, 24]
    assert not scaler.has_overflow_serial([weight])
    scales = []
    for overflow in (True, True, False, False, False):
        scaler.update_scale(overflow)
        scales.append(scaler.cur_scale)
    assert scales == [4, 2, 2, 2, 4]
    scaler.update_scale(True)
    with pytest.raises(LossScaleExhausted):
        scaler.update_scale(True)
    forgiving = make(torch.half, 0, True, {**arguments, "init_scale": 2, "raise_error_at_min_scale": False})
    forgiving.update_scale(True)
    assert (forgiving.loss_scale, make(torch.float32, 9, True, None).loss_scale) == (2, 1)
    assert make(torch.half, 9, False, None).loss_scale == 9


def test_a_dict_in_one_file(tmp_path: Path) -> None:
    files = look_up("runtime.checkpoint_engine.torch_checkpoint_engine", "TorchCheckpointEngine")()
    files.save({"step": 3, "weight": torch.ones(2)}, str(tmp_path / "state.pt"))
    assert files.load(str(tmp_path / "state.pt"), map_location="cpu")["step"] == 3 and files.commit(None)


def test_hosts_of_a_hostfile(tmp_path: Path) -> None:
    fetch, choose = (look_up("launcher.runner", n) for n in ("fetch_hostfile", "parse_inclusion_exclusion"))
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=4\n")
    pool = fetch(str(tmp_path / "hosts"))
    assert dict(pool) == {"one": 2, "two": 4} and fetch(str(tmp_path / "none")) is None
    assert choose(pool, "two:0,2", "") == {"two": [0, 2]} and choose(pool, "", "one") == {"two": [0, 1, 2, 3]}
    with pytest.raises(ConfigError, match="three"):
        choose(pool, "three", "")


def test_a_prefix_that_a_program_adds_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.cluster import environment

    monkeypatch.setattr(environment, "EXTRA_PREFIXES", [])
    monkeypatch.setattr("launcher.integrations.hostfiles.EXPORT_ENVS", environment.EXTRA_PREFIXES)
    assert environment.passed_on({"OURS_X": "1"}) == {}
    look_up("launcher.runner", "EXPORT_ENVS").append("OURS")
    assert environment.passed_on({"OURS_X": "1"}) == {"OURS_X": "1"}


def test_a_checkpointed_function_gives_its_outputs_twice() -> None:
    function = look_up("runtime.activation_checkpointing.checkpointing", "CheckpointFunction")
    given, kept = torch.ones(2, requires_grad=True), []
    out = function.apply(lambda x: x * 2, kept, given)
    out.sum().backward()
    assert kept[0] is out and given.grad is not None and given.grad.tolist() == [2, 2]


def test_p2p_needs_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.integrations.stage_sends._grid", None)
    with pytest.raises(LauncherError, match=r"init_process_groups\(grid\)"):
        look_up("runtime.pipe.p2p", "send")(torch.ones(1), 1)
