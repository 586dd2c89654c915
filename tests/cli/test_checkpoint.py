"""`launch inspect`, `launch export` and `launch import`: the report on a checkpoint, and the files written from it."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import launcher
from launcher.checkpoint.deepspeed.content import open_content
from launcher.checkpoint.deepspeed.unpickle import load
from launcher.checkpoint.fp32 import get_fp32_state_dict_from_zero_checkpoint
from launcher.cli.main import main
from launcher.data.tokenizer import byte_tokenizer
from launcher.models import build
from launcher.models.build import load_config
from tests.checkpoint.deepspeed_files import values_of, write
from tests.checkpoint.test_deepspeed import assembled, model_of
from tests.engine.driving import config_of, whole_state
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, tiny_llama


def save(ctx: RankContext, directory: Path) -> dict[str, torch.Tensor]:
    """Train two steps of a tied model with two param groups in fp16; return the saved tensors."""
    model = tiny_llama(tied=True, layers=1)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    config = {**config_of(2), "fp16": {"enabled": True, "initial_scale_power": 4}}
    config.pop("optimizer", None)
    engine = launcher.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config, device=DEVICE
    )[0]
    for step in range(2):
        engine.backward(engine(input_ids=batch(step), labels=batch(step)).loss)
        engine.step()
    engine.save_checkpoint(directory, client_state={"epoch": 4})
    return whole_state(engine)


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    directory = tmp_path_factory.mktemp("saved")
    return directory, pool.run(save, 2, directory)[0]


@pytest.mark.parametrize(
    "arguments",
    [["universal"], *(["deepspeed", "--stage", str(stage), "--ranks", "3"] for stage in (1, 2, 3))],
    ids=" ".join,
)
def test_what_is_exported_is_what_was_saved(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, arguments: list[str]
) -> None:
    directory, state = saved
    assert main(["export", str(directory), str(tmp_path), "--format", *arguments]) == 0
    tag = (tmp_path / "latest").read_text()
    got = assembled(tmp_path / tag)
    assert set(got) == set(state)
    assert all(torch.equal(got[name], value.float().view(got[name].shape)) for name, value in state.items())
    meta = open_content(tmp_path / tag).meta
    assert meta["client_state"] == {"epoch": 4} and meta["global_steps"] == 2
    assert meta["loss_scale"]["scale"] == 16
    assert [group["weight_decay"] for group in meta["optimizer"]["param_groups"]] == [0.1, 0.01]


def test_the_files_name_classes_of_deepspeed(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """They name no other classes except torch's: readers do not need launcher."""
    assert main(["export", str(saved[0]), str(tmp_path), "--format", "deepspeed", "--ranks", "2"]) == 0
    for file in tmp_path.glob("*/*.pt"):
        raw = file.read_bytes()
        assert b"launcher." not in raw
        if "optim" in file.name:
            assert b"cdeepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n" in raw
            state = load(file)["optimizer_state_dict"]
            places = {
                name: vars(place) for group in state["param_slice_mappings"] for name, place in group.items()
            }
            flats = state["single_partition_of_fp32_groups"]
            assert sum(place["numel"] for place in places.values()) == sum(flat.numel() for flat in flats)


def test_weights_alone(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert main(["export", str(saved[0]), str(tmp_path / "out"), "--format", "fp32"]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    want = get_fp32_state_dict_from_zero_checkpoint(saved[0])
    assert all(torch.equal(weights[name], want[name]) for name in weights) and weights


def test_a_checkpoint_of_deepspeeds_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of("tied")
    values = values_of(model)
    theirs = write(tmp_path / "theirs", model, values, stage=3, ranks=3, groups=2)
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    got = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ours")
    assert all(torch.equal(got[name], values[name]) for name, _ in model.named_parameters())
    capsys.readouterr()
    told = []
    for where in (str(theirs), str(tmp_path / "ours")):
        assert main(["inspect", where, "--json", "--verify"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    one, other = told
    assert [one["format"], other["format"]] == [
        "a checkpoint of DeepSpeed 0.19.8",
        "a launcher checkpoint",
    ]
    assert one["checksums_verified"] and one["tensors"] == other["tensors"]
    assert one["optimizer"] == other["optimizer"] and one["global_steps"] == other["global_steps"] == 7


def test_what_inspect_says(
    saved: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(saved[0]), "--tensors"]) == 0
    told = capsys.readouterr().out
    for text in (
        "step                     2, after",
        "AdamW",
        "group 1: lr 0.001",
        "lm_head.weight = model.embed_tokens",
    ):
        assert text in told
    assert "client state             epoch" in told and "optimizer/exp_avg/model.norm.weight" in told


def test_bad_arguments(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        return capsys.readouterr().err

    source, out = str(saved[0]), str(tmp_path)
    assert "--ranks applies only to --format deepspeed, not to --format universal" in refused(
        "export", source, out, "--format", "universal", "--ranks", "2"
    )
    assert "has no file 'latest', which names the latest checkpoint" in refused("inspect", out)
    assert "depend on the class of its optimizer in DeepSpeed" in refused(
        "export", source, out, "--format", "deepspeed", "--stage", "0"
    )
    assert main(["export", source, out, "--format", "deepspeed"]) == 0
    assert "already exists" in refused("export", source, out, "--format", "deepspeed")


def test_damage_is_found_before_anything_is_written(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    file = max(copy.glob("*/*.distcp"), key=lambda path: path.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert main(["export", str(copy), str(tmp_path / "out"), "--format", "universal"]) == 2
    assert file.name in capsys.readouterr().err and not (tmp_path / "out").exists()


class Odd(nn.Module):
    """A parameter without elements, one without gradient, integers, and a name with a slash."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 5), nn.Linear(5, 2)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.whole = nn.Parameter(torch.tensor([16777217, 1 << 40]), requires_grad=False)
        self.register_parameter("a/b", nn.Parameter(torch.ones(3)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.used(inputs * self.get_parameter("a/b"))
        return made


def save_odd(ctx: RankContext, directory: Path, client: dict[str, Any]) -> None:
    engine = launcher.initialize(model=Odd(), config=config_of(1), device=DEVICE)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        engine.step()
    engine.save_checkpoint(directory, client_state=client)


def test_odd_models(pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(save_odd, 1, tmp_path / "odd", {})
    for stage in range(4):
        out = tmp_path / f"out{stage}"
        arguments = [
            "export",
            str(tmp_path / "odd"),
            str(out),
            "--format",
            "deepspeed",
            "--stage",
            str(stage),
        ]
        assert main([*arguments, "--ranks", "2"]) == 0
        assert "parameters of one param group have different step counts" in capsys.readouterr().out
        stored = open_content(out / "global_step2").stored
        (part, *_) = stored["model/whole"].parts
        assert part.data.dtype == torch.int64 and int(part.data.flatten()[0]) == 16777217
    assert main(["export", str(tmp_path / "odd"), str(tmp_path / "u"), "--format", "universal"]) == 2
    assert "'a/b' is not a valid directory name" in capsys.readouterr().err and not (tmp_path / "u").exists()
    pool.run(save_odd, 1, tmp_path / "keys", {"module": "mine"})
    assert main(["export", str(tmp_path / "keys"), str(tmp_path / "k"), "--format", "deepspeed"]) == 2
    assert "keys that DeepSpeed reserves: module" in capsys.readouterr().err


def test_nothing_is_overwritten(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    before = {path: path.read_bytes() for path in sorted(copy.rglob("*")) if path.is_file()}
    assert main(["import", str(copy), str(copy)]) == 2
    assert "already exists" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert main(["export", str(copy), str(tmp_path), "--format", "fp32"]) == 2
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"
    assert {path: path.read_bytes() for path in sorted(copy.rglob("*")) if path.is_file()} == before
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_model_that_from_pretrained_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Covers a mixture of experts, whose tensors the Hub stores one by one, and what is refused."""
    embedded = Path(build.__file__).with_name(build.EMBEDDED["default-moe"])
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 16}
    config = json.loads(embedded.read_text()) | small | {"vocab_size": 300}
    source, saved = tmp_path / "model", tmp_path / "saved"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(source)
    model = AutoModelForCausalLM.from_config(load_config(str(source)))
    values = values_of(model)
    write(saved, model, values, stage=2, ranks=2, bits=torch.bfloat16)
    command = ["export", str(saved), str(tmp_path / "out"), "--format", "hf"]
    assert main([*command, "--model", str(source), "--dtype", "fp32"]) == 0
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, values[name]) for name, p in got.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids == byte_tokenizer()("a").input_ids
    assert any(".experts.3." in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    capsys.readouterr()
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    for flags, told in (
        (["--model", str(source)], "already exists"),
        ([], "--format hf needs --model"),
        (
            ["--model", str(source), "--ranks", "2"],
            "--ranks applies only to --format deepspeed, not to --format hf",
        ),
    ):
        assert main([*command, *flags]) == 2
        assert told in capsys.readouterr().err
    assert main([*command[:2], str(tmp_path / "other"), *command[3:], "--model", str(source)]) == 2
    assert "model.layers.2" in (err := capsys.readouterr().err) and "is missing" in err


def test_a_run_directory_what_a_kill_left_and_weights_alone(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(saved[0], run / "checkpoints")
    assert main(["inspect", str(run)]) == 0
    out.mkdir()
    (out / ".model.safetensors.host.1.tmp").touch()  # of an export that was killed
    assert main(["export", str(run), str(out), "--format", "fp32"]) == 0
    model = nn.Linear(2, 2)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "weights", no_dist=True)
    capsys.readouterr()
    for kind in ("universal", "deepspeed"):
        assert main(["export", str(tmp_path / "weights"), str(tmp_path / kind), "--format", kind]) == 2
        assert "weights but no optimizer state" in capsys.readouterr().err
