"""DeepSpeed checkpoints: every element is loaded correctly, on any topology, and no code in them is run."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import runpy
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import launcher
from launcher.checkpoint.deepspeed import meta
from launcher.checkpoint.deepspeed.content import open_content
from launcher.checkpoint.deepspeed.reader import check_bytes
from launcher.checkpoint.fp32 import get_fp32_state_dict_from_zero_checkpoint
from launcher.checkpoint.store import load_meta
from launcher.comm.plain import decode
from launcher.errors import CheckpointError
from tests.checkpoint import deepspeed_files
from tests.checkpoint.deepspeed_files import STATES, STEPS, theirs, values_of, write
from tests.engine.driving import config_of, whole_state
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, share, tiny_llama

FROZEN = "model.embed_tokens.weight"


def model_of(kind: str) -> nn.Module:
    model = tiny_llama(tied=kind == "tied", layers=2, vocab=61)  # 61: parts of no even size
    if kind == "frozen":
        model.get_parameter(FROZEN).requires_grad_(False)
    return model


def assembled(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, under the names of `values_of`."""
    found = {}
    for full_name, stored in open_content(directory).stored.items():
        name = full_name.partition("/")[2]
        whole = torch.full(stored.shape, torch.nan)
        for part in stored.parts:
            box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
            assert whole[box].isnan().all()  # nothing is there twice
            whole[box] = part.data.float()
        found[name] = whole
    return found


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"stage": 0, "ranks": 1}),
    ("tied", {"stage": 0, "ranks": 1, "bits": torch.bfloat16}),
    ("plain", {"stage": 1, "ranks": 3}),
    ("tied", {"stage": 2, "ranks": 4, "groups": 2, "bits": torch.bfloat16}),
    ("frozen", {"stage": 2, "ranks": 1, "groups": 2, "paddings": True}),
    ("plain", {"stage": 2, "ranks": 3, "paddings": True}),
    ("plain", {"stage": 3, "ranks": 1}),
    ("tied", {"stage": 3, "ranks": 3, "groups": 2}),
    ("frozen", {"stage": 3, "ranks": 4, "bits": torch.bfloat16}),
    ("frozen", {"stage": 3, "ranks": 2, "sub_groups": 4}),
]


def test_every_element_is_in_its_place(tmp_path: Path) -> None:
    for number, (kind, options) in enumerate(KINDS):
        model = model_of(kind)
        values = values_of(model)
        directory = write(tmp_path / str(number), model, values, **options)
        got = assembled(directory)
        if options["stage"]:
            groups = open_content(directory).meta["optimizer"]["names"]
            trained = [name for name, p in model.named_parameters() if p.requires_grad]
            assert len(groups) == options.get("groups", 1)
            assert sorted(name for group in groups for name in group) == sorted(trained)
        bits = options.get("bits", torch.float32)
        want = values | ({FROZEN: values[FROZEN].to(bits).float()} if kind == "frozen" else {})
        assert set(got) == set(want), (kind, options)
        assert all(torch.equal(got[name], value.float()) for name, value in want.items()), (kind, options)


def test_the_record_of_the_run(tmp_path: Path) -> None:
    model = model_of("plain")
    written = open_content(write(tmp_path, model, values_of(model), stage=2, ranks=2)).meta
    said = {key: decode(value) for key, value in written.items()}
    assert (said["global_steps"], said["micro_steps"], said["global_samples"], said["skipped_steps"]) == (
        7,
        14,
        56,
        1,
    )
    assert said["client_state"] == {"epoch": 4, "best": {"loss": 1.5}}
    assert said["scheduler"] == {"last_batch_iteration": 6, "last_lr": [0.005]}
    assert said["optimizer"]["param_groups"] == [
        {"lr": 0.005, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    ]


def load(
    ctx: RankContext, directory: Path, kind: str, stage: int
) -> tuple[dict[str, Tensor], list[Any], float]:
    """Load, inspect, and take one more step."""
    engine = launcher.initialize(model=model_of(kind), config=config_of(stage), device=DEVICE)[0]
    path, client = engine.load_checkpoint(directory)
    state = whole_state(engine)
    said = [Path(path or "").name, client, engine.global_steps, engine.get_lr()]
    (ids,) = share(batch(0), ctx.rank, ctx.world)
    loss = engine(input_ids=ids % 61, labels=ids % 61).loss
    engine.backward(loss)
    engine.step()
    return state, said, float(loss.detach())


@pytest.mark.parametrize(
    ("number", "stage", "ranks"), [(3, 3, 2), (8, 1, 2), (7, 0, 1), (1, 3, 2), (9, 2, 1)], ids=str
)
def test_a_run_goes_on(pool: WorkerPool, tmp_path: Path, number: int, stage: int, ranks: int) -> None:
    kind, options = KINDS[number]
    if options.get("groups"):
        options = {**options, "groups": 1}  # as `config_of` has them
    model = model_of(kind)
    values = values_of(model)
    write(tmp_path, model, values, **options)
    for state, said, loss in pool.run(load, ranks, tmp_path, kind, stage):
        assert said == ["global_step7", {"epoch": 4, "best": {"loss": 1.5}}, STEPS, [0.005]]
        for name, value in values.items():
            bits = (
                options.get("bits", torch.float32) if name == FROZEN and kind == "frozen" else torch.float32
            )
            assert torch.equal(state[name], value.to(bits).float().flatten().view(state[name].shape)), name
        assert loss == loss


def test_weights_in_one_process(tmp_path: Path) -> None:
    model = model_of("tied")
    values = values_of(model)
    write(tmp_path, model, values, stage=3, ranks=2)
    got = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert all(torch.equal(got[name], values[name]) for name, _ in model.named_parameters())


class Runs:
    """Run a command when unpickled."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    model = model_of("plain")
    mark = tmp_path / "ran"
    attacks = {
        "posix.system": Runs(os.system, f"touch {mark}"),
        "builtins.eval": Runs(eval, f"open({str(mark)!r}, 'w')"),
        "builtins.exec": Runs(exec, f"open({str(mark)!r}, 'w')"),
        "shutil.rmtree": Runs(shutil.rmtree, str(tmp_path / "none")),
        "posix.remove": Runs(os.remove, str(tmp_path / "none")),
        "subprocess.Popen": Runs(subprocess.Popen, ["touch", str(mark)]),
        "importlib.import_module": Runs(importlib.import_module, "antigravity"),
        "runpy.run_path": Runs(runpy.run_path, str(mark)),
        "socket.create_connection": Runs(socket.create_connection, ("127.0.0.1", 1)),
        "_pickle.loads": Runs(pickle.loads, b"cposix\nsystem\n(S'touch it'\ntR."),
    }
    for place in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        for name, attack in attacks.items():
            root = tmp_path / f"{place}{name}"
            file = write(root, model, values_of(model), stage=2, ranks=2) / place
            with deepspeed_files.theirs():
                content = torch.load(file, weights_only=False)
                torch.save({**content, "more": attack}, file)
            with pytest.raises(CheckpointError) as refused:
                open_content(file.parent)
            assert name in str(refused.value) and str(file) in str(refused.value)
    file.write_bytes(f"cposix\nsystem\n(S'touch {mark}'\ntR.".encode())  # without torch.save's archive
    with pytest.raises(CheckpointError, match="does not consist of tensors and plain values only"):
        open_content(file.parent)
    assert not mark.exists()


def test_damage_is_told_by_its_file(tmp_path: Path) -> None:
    model = model_of("plain")

    def spoilt(number: int, place: str, spoil: Any, **options: Any) -> str:
        options = {"stage": 2, "ranks": 3} | options
        file = write(tmp_path / str(number), model, values_of(model), **options) / place
        spoil(file)
        with pytest.raises(CheckpointError) as refused:
            check_bytes(file.parent)
            open_content(file.parent)
        return re.sub(r"\s+", " ", str(refused.value))

    def truncate(file: Path) -> None:
        os.truncate(file, file.stat().st_size // 2)

    def flip(file: Path) -> None:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)

    def change(**more: Any) -> Any:
        def spoil(file: Path) -> None:
            with deepspeed_files.theirs():
                content = torch.load(file, weights_only=False)
                content["optimizer_state_dict"] |= more
                torch.save(content, file)

        return spoil

    first, second, last = (f"zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in range(3))
    assert first in spoilt(0, first, truncate)
    assert second in spoilt(1, second, flip)
    assert f"{second} is missing" in spoilt(2, second, Path.unlink)
    assert f"{last} is missing" in spoilt(3, last, Path.unlink)
    assert "mp_rank_00_model_states.pt" in spoilt(4, "mp_rank_00_model_states.pt", truncate)
    assert f"{second} belongs to another run" in spoilt(5, second, change(partition_count=[2]))
    base = {"state": {0: {"step": 2}}, "param_groups": []}
    assert f"{second} belongs to another save" in spoilt(6, second, change(base_optimizer_state=base))
    short = [torch.zeros(4)]
    assert "parts of" in spoilt(7, last, change(single_partition_of_fp32_groups=short))
    assert "lacks elements" in spoilt(8, second, change(fp32_flat_groups=short), stage=3)
    none = [{"exp_avg": torch.zeros(2)}]
    assert "lacks elements" in spoilt(
        10, first, change(base_optimizer_state={"state": {0: {"step": 7, **none[0]}}, "param_groups": []})
    )

    def swap(file: Path) -> None:
        other = file.with_name(second)
        file.rename(file.with_suffix(".x"))
        other.rename(file)
        file.with_suffix(".x").rename(other)

    def twice(file: Path) -> None:
        shutil.copy(file, file.with_name(f"bf16_{file.name}"))

    def pipe(file: Path) -> None:
        file.unlink()
        os.mkfifo(file)

    def other_save(file: Path) -> None:
        with deepspeed_files.theirs():
            content = torch.load(file, weights_only=False)
            torch.save({**content, "global_steps": 9}, file)

    model_1 = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    assert "differ from those in the optimizer state files" in spoilt(11, first, swap)
    assert f"bf16_{first} and {first} belong to the same rank" in spoilt(12, first, twice)
    assert f"{first} is not a file" in spoilt(13, first, pipe)
    assert f"{model_1} is missing" in spoilt(14, model_1, Path.unlink, stage=3, ranks=2)
    assert f"{model_1} belongs to another save" in spoilt(15, model_1, other_save, stage=3)
    text = lambda file: file.write_text("not a checkpoint")  # noqa: E731
    assert first in spoilt(9, first, text)


def test_files_of_the_optimizer_that_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weights alone may be enough; at ZeRO 3 they are in these files, too."""
    model = model_of("plain")
    for stage in (2, 3):
        directory = write(tmp_path / str(stage), model, values_of(model), stage=stage, ranks=2)
        for file in directory.glob("*_optim_states.pt"):
            file.unlink()
    with pytest.raises(
        CheckpointError,
        match=r"has no weights: at ZeRO stage 3 they are in files like zero_pp_rank_0_mp_rank_00_optim",
    ):
        open_content(directory)
    assert open_content(tmp_path / "2" / directory.name).meta["optimizer"] is None
    assert "has no optimizer state files: loading only the weights" in caplog.text


def test_kinds_that_are_not_read_are_named(tmp_path: Path) -> None:
    model = model_of("plain")
    directory = write(tmp_path, model, values_of(model), stage=1, ranks=1)
    file = directory / "mp_rank_00_model_states.pt"
    torch.save(torch.load(file, weights_only=False) | {"ds_autoep_layers": [{"moe_layer_id": 0}]}, file)
    with pytest.raises(CheckpointError, match="experts distributed by AutoEP"):
        open_content(directory)


def test_the_count_of_steps_of_an_old_fused_adam(tmp_path: Path) -> None:
    """The count is only in the param groups. If it is missing there as well, that is an error."""
    model = model_of("plain")
    for number, (count, word) in enumerate(((STEPS, ""), (None, "but no step count"))):
        directory = write(tmp_path / str(number), model, values_of(model), stage=2, ranks=2)
        for file in directory.glob("*_optim_states.pt"):
            with deepspeed_files.theirs():
                content = torch.load(file, weights_only=False)
                base = content["optimizer_state_dict"]["base_optimizer_state"]
                for state in base["state"].values():
                    del state["step"]
                for group in base["param_groups"]:
                    group.pop("step")
                    group |= {} if count is None else {"step": count}
                torch.save(content, file)
        if word:
            with pytest.raises(CheckpointError, match=word):
                open_content(directory)
            continue
        steps = {float(v) for name, v in assembled(directory).items() if name.startswith("step/")}
        assert steps == {float(STEPS)}


class Scaled(nn.Module):
    """A parameter without dims, an unused parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(4)


def test_parameters_without_dims_and_buffers(tmp_path: Path) -> None:
    for stage, ranks in ((0, 1), (2, 2), (3, 3)):
        model = Scaled()
        values = values_of(model)
        got = assembled(write(tmp_path / str(stage), model, values, stage=stage, ranks=ranks))
        buffers = dict(model.named_buffers())
        assert set(got) == {*values, *buffers}
        assert all(torch.equal(got[name], value.float()) for name, value in (values | buffers).items()), stage


def swap_out(directory: Path, first: int) -> None:
    """Store the flat tensors of stage 3 in files, as DeepSpeed does with NVMe offload."""
    model = torch.load(next(directory.glob("*rank_0_*model_states.pt")), weights_only=False)
    at = {name: first + number for number, name in enumerate(model["module"])}
    spans = [(at[next(iter(group))], at[[*group][-1]]) for group in model["param_shapes"]]
    for rank, path in enumerate(sorted(directory.glob("*optim_states.pt"))):
        with theirs():
            content = torch.load(path, weights_only=False)
            state = content["optimizer_state_dict"]
            folder = directory / "offloaded_tensors" / f"rank{rank:02d}"
            folder.mkdir(parents=True)
            for number, (low, high) in enumerate(spans):
                of_group = state["optimizer_state_dict"]["state"][number]
                flats = {"": state["fp32_flat_groups"][number], **{f"{s}-": of_group[s] for s in STATES}}
                for prefix, flat in flats.items():
                    padded = torch.cat([flat, torch.full((7,), torch.nan)])
                    (folder / f"{prefix}{low}_{high}.tensor.swp").write_bytes(padded.numpy().tobytes())
                state["fp32_flat_groups"][number] = torch.empty(0)
                of_group |= {s: torch.empty(0) for s in STATES}
            torch.save(content, path)


def test_state_that_was_on_nvme(tmp_path: Path) -> None:
    model = model_of("plain")
    values = values_of(model)
    directory = write(tmp_path, model, values, stage=3, ranks=2, sub_groups=4)
    swap_out(directory, 21)
    got = assembled(directory)
    assert all(torch.equal(got[name], value.float()) for name, value in values.items())
    folder = directory / "offloaded_tensors" / "rank01"
    one = sorted(folder.glob("exp_avg-*"))[0]
    for path in folder.glob("[0-9]*.swp"):  # what another run has left in its nvme_path
        first, _, last = path.name.removesuffix(".tensor.swp").partition("_")
        shutil.copy(path, folder / f"{int(first) + 50}_{int(last) + 50}.tensor.swp")
    with pytest.raises(CheckpointError, match="rank01 cannot be read: it contains files of several runs"):
        open_content(directory)
    for path in folder.glob("[0-9]*.swp"):
        if int(path.name.partition("_")[0]) > 50:
            path.unlink()
    one.write_bytes(one.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"rank01 cannot be read: {one.name} is missing or too short"):
        open_content(directory)


def test_nothing_to_load_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("plain")
    write(tmp_path, model, values_of(model), stage=1, ranks=1)
    (tmp_path / "latest").unlink()
    assert load_meta(tmp_path, missing_ok=True) is None
    assert "no checkpoint is loaded" in caplog.text


def test_the_optimizer_that_made_the_states() -> None:
    def types(states: str, kind: str = "") -> list[str] | None:
        return meta.types_of(frozenset(states.split()), {"optimizer": {"type": kind}} if kind else {})

    assert types("exp_avg exp_avg_sq") == types("exp_avg exp_avg_sq", "FusedAdam") == ["AdamW", "Adam"]
    assert types("exp_avg exp_avg_sq", "Lamb") == ["Lamb"]
    assert types("momentum_buffer") == ["SGD"]
    assert types("") is None
    assert types("row col") == ["an optimizer with the states col, row"]
