"""DeepSpeed checkpoints of split models: tensor-parallel ranks, pipeline stages, the universal layout."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.checkpoint.deepspeed.content import open_content
from launcher.checkpoint.deepspeed.cuts import cut_of
from launcher.checkpoint.store import load_meta
from launcher.errors import CheckpointError
from tests.checkpoint.deepspeed_files import STATES, STEPS, LossScaler, theirs, values_of, write
from tests.checkpoint.test_deepspeed import assembled


class Layer(nn.Module):
    """Parameters that two ranks split in five ways."""

    def __init__(self) -> None:
        super().__init__()
        self.column, self.row = nn.Linear(6, 9, bias=False), nn.Linear(10, 4)
        self.fused = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(6)


WIDTHS = {"column.weight": (0, [[5, 4]]), "row.weight": (1, [[6, 4]]), "fused.weight": (0, [[3, 1], [2, 2]])}
SCALED = "row.bias"  # each of two ranks has half of it


def own_part(name: str, tensor: Tensor, rank: int) -> Tensor:
    """Return a rank's part of a parameter."""
    if name not in WIDTHS:
        return tensor.clone()
    dim, rows = WIDTHS[name]
    parts, at = [], 0
    for row in rows:
        parts.append(tensor.narrow(dim, at + sum(row[:rank]), row[rank]))
        at += sum(row)
    return torch.cat(parts, dim).contiguous()


def power(key: str) -> int:
    return {"exp_avg": -1, "exp_avg_sq": -2}.get(key, 1)


def own_values(values: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    own = {}
    for full_name, tensor in values.items():
        key, _, name = full_name.rpartition("/")
        part = tensor if key == "step" else own_part(name, tensor, rank)
        own[full_name] = part * 0.5 ** power(key) if name == SCALED and key != "step" else part
    return own


def boxes(shape: Sequence[int], name: str, rank: int) -> list[dict[str, Any]]:
    """Return the boxes of a rank in DeepSpeed's format: offsets and strides in the full tensor and in the rank's."""
    strides = list(torch.empty(shape).stride())
    if name not in WIDTHS:
        scale = {"scale": 0.5} if name == SCALED else {}
        place = [0, strides]
        return [{"shape": list(shape), "source": place, "dest": place, "locations": [0, 1], **scale}]
    dim, rows = WIDTHS[name]
    own = list(shape)
    own[dim] = sum(row[rank] for row in rows)
    own_strides, found, at, inside = list(torch.empty(own).stride()), [], 0, 0
    for row in rows:
        box = [*shape[:dim], row[rank], *shape[dim + 1 :]]
        source, dest = (at + sum(row[:rank])) * strides[dim], inside * own_strides[dim]
        found.append(
            {"shape": box, "source": [source, strides], "dest": [dest, own_strides], "locations": [rank]}
        )
        at, inside = at + sum(row), inside + row[rank]
    return found


def affine_map(model: nn.Module) -> dict[str, Any]:
    params = {
        f"^{name}$".replace(".", r"\."): {
            "logical_shape": list(p.shape),
            "ranks": {
                rank: {
                    "shard_shape": list(own_part(name, p.detach(), rank).shape),
                    "pieces": boxes(p.shape, name, rank),
                }
                for rank in range(2)
            },
        }
        for name, p in model.named_parameters()
    }
    return {"affine_map": {"version": 1, "params": params}}


def write_split(root: Path, model: nn.Module, info: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Write the checkpoint of two tensor-parallel ranks; return the full values."""
    values = values_of(model)
    final = root / "global_step7"
    for rank in range(2):
        directory = write(root / f"rank{rank}", model, own_values(values, rank), **options)
        final.mkdir(exist_ok=True)
        for file in sorted(directory.glob("*.pt")):
            with theirs():
                content = torch.load(file, weights_only=False)
                if "module" in content:
                    content["universal_checkpoint_info"] = info
                torch.save(content, final / file.name.replace("mp_rank_00", f"mp_rank_0{rank}"))
    return values


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0, "ranks": 1},
        {"stage": 0, "ranks": 1, "bits": torch.bfloat16},
        {"stage": 1, "ranks": 3},
        {"stage": 2, "ranks": 2, "groups": 2, "paddings": True},
        {"stage": 3, "ranks": 3},
    ],
    ids=str,
)
def test_tensor_parallel_parts_are_joined(tmp_path: Path, options: dict[str, Any]) -> None:
    """Covers uneven parts, fused parts, and a part that each rank holds times one half, with inverse moments."""
    model = Layer()
    values = write_split(tmp_path, model, affine_map(model), **options)
    found = open_content(tmp_path / "global_step7").stored
    got = {}
    for full_name, stored in found.items():
        whole = torch.full(stored.shape, torch.nan)
        for part in stored.parts:
            box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
            assert whole[box].isnan().all()  # nothing is there twice
            whole[box] = part.data.float() / part.scale
        got[full_name.partition("/")[2]] = whole
    assert set(got) == set(values)
    assert all(torch.equal(got[name], value) for name, value in values.items())


def test_patterns_of_names_say_it_too() -> None:
    """Versions before 0.19 have no boxes."""
    info = {
        "tp_replicated_parameter_patterns": ["^norm"],
        "parameter_with_row_parallelism_patterns": ["^row"],
        "vocabulary_parameter_patterns": ["^word"],
        "original_vocab_size": 5,
        "parameter_with_2_sub_params_cat_dim_0": ["^gated"],
        "parameter_with_sub_params": [{"patterns": ["^qkv"], "shape": [[4, 2], -1], "partition_dim": 0}],
    }

    def whole(name: str, parts: list[Tensor]) -> Tensor:
        cut = cut_of(name, info, [tuple(part.shape) for part in parts])
        made = torch.full(cut.shape, -1)
        for part, pieces in zip(parts, cut.pieces, strict=True):
            for piece in pieces:
                at, own = (
                    tuple(slice(o, o + s) for o, s in zip(offsets, piece.sizes, strict=True))
                    for offsets in (piece.offsets, piece.own)
                )
                made[at] = part[own]
        return made

    one, two = torch.arange(6).view(3, 2), torch.arange(6, 12).view(3, 2)
    assert whole("norm.weight", [one, one]).equal(one)
    assert whole("other.weight", [one, two]).equal(torch.cat([one, two]))
    assert whole("row.weight", [one, two]).equal(torch.cat([one, two], 1))
    assert whole("word.weight", [one, two]).equal(torch.cat([one, two])[:5])
    four = [torch.arange(8).view(4, 2), torch.arange(8, 16).view(4, 2)]
    assert whole("gated.weight", four).equal(torch.cat([four[0][:2], four[1][:2], four[0][2:], four[1][2:]]))
    assert whole("qkv.weight", [one, two]).equal(torch.cat([one[:2], two[:2], one[2:], two[2:]]))


def test_what_cannot_be_joined_is_said(tmp_path: Path) -> None:
    model = Layer()

    def refused(number: int, info: dict[str, Any]) -> str:
        root = tmp_path / str(number)
        write_split(root, model, info, stage=1, ranks=1)
        with pytest.raises(CheckpointError) as error:
            open_content(root / "global_step7")
        return str(error.value)

    assert "does not record how its 2 tensor-parallel ranks shard the model" in refused(0, {})
    newer = {"affine_map": {"version": 2, "params": {}}}
    assert "affine_map has version 2" in refused(1, newer)
    averaged = {"parameter_to_average_patterns": ["norm"]}
    assert "norm" in (text := refused(2, averaged)) and "is averaged over the ranks" in text
    other = affine_map(model)
    del other["affine_map"]["params"][r"^column\.weight$"]["ranks"][1]
    assert "the shards of model/column.weight cannot be merged" in refused(3, other)
    write_split(tmp_path / "lost", model, affine_map(model), stage=1, ranks=1)
    (tmp_path / "lost/global_step7/mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt is missing"):
        open_content(tmp_path / "lost/global_step7")


# ---- stages -------------------------------------------------------------------------------------


def row_of(tied: bool) -> nn.Sequential:
    """Return six layers; if tied, the last one is the first one again."""
    layers = [nn.Embedding(7, 4), *(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 7, bias=False)]
    if tied:
        layers[-1].weight = layers[0].weight  # type: ignore[assignment]
    return nn.Sequential(*layers)


def write_stages(root: Path, *, tied: bool, stage: int) -> dict[str, Tensor]:
    """Write the checkpoint of a PipelineModule of two stages; return the full values."""
    whole = row_of(tied)
    values = values_of(whole)
    final = root / "global_step7"
    final.mkdir(parents=True)
    for rank, layers in enumerate((range(3), range(3, 6))):
        part = nn.Module()
        if tied:
            part.tied_modules = nn.ModuleDict({"word": whole[0]})
        for layer in layers:
            if not (tied and layer in (0, 5)):
                part.add_module(str(layer), whole[layer])

        def theirs_of(name: str) -> str:
            return name.replace("tied_modules.word.", "0.")

        own = {
            f"{key}{name}": values[f"{key}{theirs_of(name)}"]
            for name, _ in part.named_parameters()
            for key in ("", *(f"{state}/" for state in STATES), "step/")
        }
        directory = write(root / f"rank{rank}", part, own, stage=stage, ranks=2 if stage else 1)
        for file in sorted(directory.glob("*.pt")):
            with theirs():
                content = torch.load(file, weights_only=False)
                if "module" in content:
                    content["module"] = None
                    content["checkpoint_parallel_dimensions"] = {"pp_degree": 2, "tp_degree": 1}
                torch.save(content, final / file.name.replace("mp_rank_00", f"mp_rank_0{rank}"))
    for number, layer in enumerate(whole):
        state = {
            name: values[f"{0 if tied and number == 5 else number}.{name}"] for name in layer.state_dict()
        }
        torch.save(state, final / f"layer_{number:02d}-model_states.pt")
    return values


@pytest.mark.parametrize(("tied", "stage"), [(False, 0), (False, 1), (True, 1)])
def test_stages_are_joined(tmp_path: Path, tied: bool, stage: int) -> None:
    """Tied layers have the name of the first of them, as in launcher's own PipelineModule."""
    values = write_stages(tmp_path, tied=tied, stage=stage)
    got = assembled(tmp_path / "global_step7")
    assert set(got) == set(values)
    assert all(torch.equal(got[name], value) for name, value in values.items())


def test_ties_at_stage_0_are_refused(tmp_path: Path) -> None:
    write_stages(tmp_path, tied=True, stage=0)
    with pytest.raises(CheckpointError, match="does not record which parameters are tied"):
        open_content(tmp_path / "global_step7")


def test_a_layer_of_another_save(tmp_path: Path) -> None:
    write_stages(tmp_path, tied=True, stage=1)
    file = tmp_path / "global_step7/layer_03-model_states.pt"
    torch.save({name: value + 1 for name, value in torch.load(file).items()}, file)
    with pytest.raises(
        CheckpointError, match=r"weights of 3\.weight in .* differ from those in the optimizer state files"
    ):
        open_content(file.parent)
    for number in (0, 5):
        (file.parent / f"layer_{number:02d}-model_states.pt").unlink()
    file.unlink()
    with pytest.raises(CheckpointError, match="No layer file has the weights of the tied module 'word'"):
        open_content(file.parent)


# ---- universal ----------------------------------------------------------------------------------


def write_universal(root: Path, *, own_steps: bool) -> dict[str, Tensor]:
    model = Layer()
    values = values_of(model)
    directory = write(root, model, values, stage=3, ranks=2, tag="global_step7_universal")
    (root / "latest").rename(root / "latest_universal")
    group = {"lr": 0.005, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    rest: dict[str, Any] = {"loss_scaler": LossScaler(), "dynamic_loss_scale": False, "param_groups": [group]}
    if not own_steps:
        rest["optimizer_state_dict"] = {"state": {0: {"step": STEPS}}}
    for file in directory.glob("*_optim_states.pt"):
        file.unlink()
    for name, _ in model.named_parameters():
        folder = directory / "zero" / name
        folder.mkdir(parents=True)
        for state in ("fp32", *STATES):
            value = values[name if state == "fp32" else f"{state}/{name}"]
            content = (
                {"param": value, "cat_dim": 0} if own_steps else value.flatten()
            )  # as stages 1 and 3 are converted
            torch.save(content, folder / f"{state}.pt")
        if own_steps:
            torch.save(STEPS, folder / "step.pt")
    with theirs():
        torch.save(rest, directory / "zero" / "optimizer_state.pt")
    return values


@pytest.mark.parametrize("own_steps", [True, False])
def test_the_universal_layout(tmp_path: Path, own_steps: bool, caplog: pytest.LogCaptureFixture) -> None:
    values = write_universal(tmp_path, own_steps=own_steps)
    found = load_meta(tmp_path)
    assert "latest is missing. Loading global_step7_universal, which latest_universal names" in caplog.text
    assert found is not None
    tag, meta = found
    assert tag == "global_step7_universal" and meta["global_steps"] == STEPS
    got = assembled(tmp_path / tag)
    assert set(got) == set(values)
    assert all(torch.equal(got[name], value) for name, value in values.items())


def test_damage_in_the_universal_layout(tmp_path: Path) -> None:
    write_universal(tmp_path, own_steps=True)
    folder = tmp_path / "global_step7_universal" / "zero"
    torch.save({"param": torch.zeros(2)}, folder / "row.bias" / "exp_avg.pt")
    with pytest.raises(
        CheckpointError, match=r"exp_avg\.pt has shape \[2\], but the parameter has shape \[4\]"
    ):
        open_content(folder.parent)
    (folder / "row.bias" / "exp_avg.pt").unlink()
    with pytest.raises(CheckpointError, match=r"row\.bias has no exp_avg\.pt"):
        open_content(folder.parent)
    shutil.rmtree(folder / "row.bias")
    with pytest.raises(CheckpointError, match=r"row\.bias has no fp32\.pt"):
        open_content(folder.parent)
    shutil.rmtree(folder.parent)
    write_universal(tmp_path, own_steps=True)
    (folder / "norm.weight" / "exp_avg.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"norm\.weight/exp_avg\.pt cannot be read"):
        open_content(folder.parent)
    (folder / "norm.weight" / "exp_avg.pt").unlink()
    (folder / "norm.bias" / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"norm\.bias has no fp32\.pt"):
        open_content(folder.parent)
    (folder / "optimizer_state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer_state\.pt cannot be read"):
        open_content(folder.parent)
