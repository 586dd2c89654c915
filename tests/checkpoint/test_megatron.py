"""Megatron-Core's torch_dist format, without Megatron: names, rows, and what is refused."""

from __future__ import annotations

import pickle
import shutil
from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import launcher
from launcher.checkpoint import store
from launcher.checkpoint.megatron.names import tensors_of
from launcher.checkpoint.megatron.opened import MegatronFiles
from launcher.checkpoint.source import SourceCheckpoint
from launcher.cli.main import main
from launcher.errors import CheckpointError
from tests.checkpoint.test_deepspeed import Runs
from tests.parity_megatron.runs import MODELS, write_config
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.pool.device import DEVICE

STEP = 7


def _model(kind: str) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[kind]))


def _save(kind: str, place: Path, dtype: str = "", frozen: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Write a checkpoint as the engine does; return its tensors. Names with a part of `frozen` have no states."""
    model = _model(kind)
    decayed: list[str] = []
    vectors: list[str] = []
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = torch.randn(parameter.shape)
        if any(part in name for part in frozen):
            continue
        (decayed if parameter.dim() > 1 else vectors).append(name)
        for state in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer/{state}/{name}"] = torch.randn(parameter.shape)
        tensors[f"scalar/step/{name}"] = torch.tensor(float(STEP))
    options = [{"lr": 0.1, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": decay} for decay in (0.2, 0.0)]
    meta = {
        "global_steps": STEP, "global_samples": 0, "micro_steps": STEP, "skipped_steps": 0, "world_size": 1,
        "scheduler": None, "optimizer": {"type": "AdamW", "param_groups": options, "names": [decayed, vectors]},
        "loss_scale": None, "config": {dtype: {"enabled": True}} if dtype else {}, "model": None, "tied": {},
        "client_state": {},
    }  # fmt: skip
    store.save(place, "seven", tensors, meta)
    return tensors


@cache
def _made(
    kind: str, dtype: str, frozen: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], TemporaryDirectory[str]]:
    """Return (saved tensors, directory of the checkpoint and export).

    The directory is deleted when this process ends.
    """
    kept = TemporaryDirectory()
    root = Path(kept.name)
    tensors = _save(kind, root / "ours", dtype, frozen)
    args = ["export", str(root / "ours"), str(root / "out"), "--format", "megatron"]
    assert main([*args, "--model", str(write_config(kind, root))]) == 0
    return tensors, kept


def _exported(
    kind: str, root: Path, dtype: str = "", frozen: Sequence[str] = ()
) -> tuple[dict[str, torch.Tensor], Path, str]:
    """Return (saved tensors, a copy of the checkpoint in Megatron's format, the model's config)."""
    tensors, kept = _made(kind, dtype, tuple(frozen))
    shutil.copytree(kept.name, root, dirs_exist_ok=True)
    return tensors, root / "out" / f"iter_{STEP:07d}", str(write_config(kind, root))


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_there_and_back_every_bit_is_the_same(tmp_path: Path, kind: str, dtype: str) -> None:
    tensors, _, model = _exported(kind, tmp_path, dtype)
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "in"), "--model", model]) == 0
    back = SourceCheckpoint.open(tmp_path / "in")
    assert back.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back.tensor(name), tensor), name
    first = SourceCheckpoint.open(tmp_path / "ours")
    assert [set(group) for group in back.groups] == [set(group) for group in first.groups]
    assert [options["weight_decay"] for options in back.options] == [0.2, 0.0]
    assert back.options[0]["lr"] == 0.1 and tuple(back.options[0]["betas"]) == (0.9, 0.98)
    assert back.meta["global_steps"] == STEP and back.dtype == first.dtype


def test_rows_lie_by_group_of_heads_and_the_gate_first() -> None:
    tensors = {t.names[0]: t for t in tensors_of(_model("llama")) if t.layer in (None, 0)}
    qkv = tensors["self_attention.linear_qkv.weight"]
    q, k, v = (torch.arange(n).view(-1, 1) + at for n, at in ((32, 1000), (16, 2000), (16, 3000)))
    # Two groups of two heads of q, one of k, and one of v, of 8 rows each.
    wanted = torch.cat((q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]))
    assert torch.equal(qkv.joined([q, k, v]), wanted)
    parts = qkv.parts(wanted)
    assert [torch.equal(*pair) for pair in zip(parts.values(), (q, k, v), strict=True)] == [True] * 3
    gate, up = torch.zeros(48, 1), torch.ones(48, 1)
    assert torch.equal(tensors["mlp.linear_fc1.weight"].joined([gate, up]), torch.cat((gate, up)))


def test_the_same_values_are_written_once(tmp_path: Path) -> None:
    tensors, out, _ = _exported("llama", tmp_path)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert (out / "__0_0.distcp").stat().st_size < size + 1000 * len(tensors)
    files = MegatronFiles.open(out)
    assert {"param", "fp32_param", "exp_avg", "exp_avg_sq", "model"} == files.keys.keys()


def test_a_padded_vocabulary_is_cut(tmp_path: Path) -> None:
    tensors, _, model = _exported("llama", tmp_path)
    smaller = AutoConfig.from_pretrained(model)
    smaller.vocab_size = 90
    smaller.save_pretrained(tmp_path / "smaller")
    assert (
        main(["import", str(tmp_path / "out"), str(tmp_path / "in"), "--model", str(tmp_path / "smaller")])
        == 0
    )
    name = "model/model.embed_tokens.weight"
    assert torch.equal(SourceCheckpoint.open(tmp_path / "in").tensor(name), tensors[name][:90])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.find(b"iteration") if path.suffix == ".pt" else len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "how"),
    [
        *((file, how) for file in ("__0_0.distcp", "common.pt") for how in ("flipped", "cut", "missing")),
        (".metadata", "cut"),
        (".metadata", "missing"),
    ],
)
def test_damage_is_told_by_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, how: str
) -> None:
    _, out, model = _exported("llama", tmp_path)
    path = out / file
    if how == "flipped":
        _flip(path)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-300])
    else:
        path.unlink()
    capsys.readouterr()
    assert main(["import", str(out), str(tmp_path / "in"), "--model", model]) == 2
    told = capsys.readouterr().err
    assert file in told or (how == "missing" and str(out) in told), told
    assert not (tmp_path / "in").exists() or not any((tmp_path / "in").glob("*/meta.json"))


def test_no_code_of_the_files_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, model = _exported("llama", tmp_path)
    mark = tmp_path / "ran"
    for file in ("common.pt", ".metadata"):
        kept = (out / file).read_bytes()
        evil = Runs(exec, f"open({str(mark)!r}, 'w')")
        (torch.save if file == "common.pt" else _dump)({"args": evil}, out / file)
        assert main(["import", str(out), str(tmp_path / "in"), "--model", model]) == 2
        told = capsys.readouterr().err
        assert "exec" in told.partition("contains" if file == "common.pt" else "refers to")[2]
        assert not mark.exists()
        (out / file).write_bytes(kept)


def _dump(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def _with_args(out: Path, **args: Any) -> None:
    common = torch.load(out / "common.pt", weights_only=False)
    torch.save({**common, "args": Namespace(**args)}, out / "common.pt")


def test_the_arguments_of_the_run_are_heeded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, model = _exported("llama", tmp_path)
    heads = {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2}
    _with_args(out, **heads, consumed_train_samples=99)
    assert main(["import", str(out), str(tmp_path / "in"), "--model", model]) == 0
    assert SourceCheckpoint.open(tmp_path / "in").meta["global_samples"] == 99
    # The same shapes, and other rows.
    _with_args(out, **heads | {"num_attention_heads": 8, "num_query_groups": 4})
    assert main(["import", str(out), str(tmp_path / "again"), "--model", model]) == 2
    assert "num_attention_heads 8, not 4; num_query_groups 4, not 2" in capsys.readouterr().err
    for key in ("apply_layernorm_1p", "rotary_interleaved"):
        _with_args(out, **heads, **{key: True})
        assert main(["import", str(out), str(tmp_path / "again"), "--model", model]) == 2
        assert f"{key} True, not False" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": 3}, "has shape [4, 32], expected [3, 32]"),
        ({"num_hidden_layers": 5}, "has shape [4, 32], expected [5, 32]"),
        ({"intermediate_size": 40}, "decoder.layers.0.mlp.linear_fc1.weight has shape"),
        ({"tie_word_embeddings": True}, "output_layer.weight is not a tensor of the model"),
        ({"attention_bias": True}, "decoder.layers.0.self_attention.linear_qkv.bias is missing"),
        ({"vocab_size": 97}, "embedding.word_embeddings.weight has shape [96, 32], expected [97, 32]"),
    ],
)
def test_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], told: str
) -> None:
    _, out, _ = _exported("llama", tmp_path)
    AutoConfig.for_model(**{**MODELS["llama"], **change}).save_pretrained(tmp_path / "other")
    capsys.readouterr()
    assert main(["import", str(out), str(tmp_path / "in"), "--model", str(tmp_path / "other")]) == 2
    assert told in capsys.readouterr().err


def test_what_megatron_has_no_place_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save("llama", tmp_path / "ours")
    told = []
    for kind in ("opt", "olmo2"):
        AutoConfig.for_model(kind).save_pretrained(tmp_path / kind)
        out = ["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--format", "megatron"]
        assert main([*out, "--model", str(tmp_path / kind)]) == 2
        told.append(capsys.readouterr().err)
    assert all(
        "is not supported for Megatron checkpoints" in text
        and "supported model types: llama, mistral" in text
        for text in told
    )
    model = _model("llama")
    model.model.layers[0].self_attn.odd = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="2 parameters of the model have no counterpart in Megatron"):
        tensors_of(model)


def test_the_latest_iteration_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, model = _exported("llama", tmp_path)
    latest = out.parent / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == str(STEP)
    assert main(["inspect", str(out.parent), "--verify"]) == 0
    assert main(["inspect", str(out.parent), "--tag", out.name]) == 0
    told = capsys.readouterr().out
    assert "a checkpoint of Megatron-Core" in told and "verified: no file is damaged" in told
    for text in ("12", "../evil", "", "\0\0"):
        latest.write_text(text)
        assert main(["import", str(out.parent), str(tmp_path / "in"), "--model", model]) == 2
        assert "latest_checkpointed_iteration.txt names" in capsys.readouterr().err


def _load(ctx: RankContext, place: Path, tag: str | None) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine = launcher.initialize(model=_model("llama"), config=config, device=DEVICE)[0]
    engine.load_checkpoint(place, tag)


def test_a_load_says_what_to_do(pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _exported("llama", tmp_path)
    older, nano = tmp_path / "older" / "iter_0000001", tmp_path / "nano" / "10"
    (older / "mp_rank_00").mkdir(parents=True)
    (older / "mp_rank_00" / "model_optim_rng.pt").touch()
    nano.mkdir(parents=True)
    for name in ("checkpoint_metadata.json", "model_config.json"):
        (nano / name).write_text("{}")
    places = [
        (out.parent, None, "launch import .* OUT --model M"),
        (out.parent, out.name, "launch import .* OUT --model M"),
        (older.parent, older.name, "older format"),
        (nano.parent, nano.name, "nanotron"),
    ]
    for place, tag, told in places:
        with pytest.raises(RanksFailed, match=told):
            pool.run(_load, 1, place, tag)
    assert main(["import", str(out), str(tmp_path / "in")]) == 2
    assert "needs --model" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_frozen_layers_come_back(tmp_path: Path, dtype: str) -> None:
    """Their parts are missing in the stacked states, so the values there are undefined."""
    tensors, _, model = _exported("llama", tmp_path, dtype, [".layers.0.", ".layers.2.", "embed_tokens"])
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "in"), "--model", model]) == 0
    back = SourceCheckpoint.open(tmp_path / "in")
    assert back.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        frozen = f"optimizer/exp_avg/{name.removeprefix('model/')}" not in tensors
        rounded = tensor.bfloat16().float() if dtype and frozen and name.startswith("model/") else tensor
        assert torch.equal(back.tensor(name, torch.float32), rounded), name
    assert sorted(back.frozen) == sorted(SourceCheckpoint.open(tmp_path / "ours").frozen)


def test_what_megatron_has_as_one_tensor_is_trained_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_config("llama", tmp_path))
    for part in ("q_proj", "v_proj", "up_proj"):
        _save("llama", tmp_path / part, frozen=[part])
        out = [
            "export",
            str(tmp_path / part),
            str(tmp_path / "out"),
            "--format",
            "megatron",
            "--model",
            model,
        ]
        assert main(out) == 2
        assert "some are trained; Megatron stores them in one tensor" in capsys.readouterr().err


def test_layers_that_differ_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = AutoConfig.for_model(**{**MODELS["qwen3_moe"], "mlp_only_layers": [1]})
    config.save_pretrained(tmp_path / "mixed")
    model = AutoModelForCausalLM.from_config(config)
    tensors = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    _save("qwen3_moe", tmp_path / "like")
    meta = store.load_meta(tmp_path / "like")[1]
    store.save(tmp_path / "ours", "seven", tensors, meta | {"optimizer": None})
    out = ["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--format", "megatron"]
    assert main([*out, "--model", str(tmp_path / "mixed")]) == 2
    assert "layers of the model differ" in capsys.readouterr().err


def _without(entry: Any, how: str) -> None:
    if how == "lost":
        entry.chunks.pop()
    elif how == "twice":
        entry.chunks[1] = entry.chunks[0]
    elif how == "outside":
        entry.chunks[0] = type(entry.chunks[0])(torch.Size([9, 0, 0]), entry.chunks[0].sizes)
    else:
        entry.size = None


@pytest.mark.parametrize("how", ["lost", "twice", "outside", "none"])
def test_parts_make_up_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    _, out, model = _exported("llama", tmp_path)
    metadata = pickle.loads((out / ".metadata").read_bytes())
    for prefix in ("", "optimizer.state.param.", "optimizer.state.fp32_param."):
        _without(metadata.state_dict_metadata[f"{prefix}decoder.layers.mlp.linear_fc2.weight"], how)
    _dump(metadata, out / ".metadata")
    assert main(["import", str(out), str(tmp_path / "in"), "--model", model]) == 2
    assert ".metadata is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"iteration": "seven"},
        {"iteration": -1},
        {"optimizer": None},
        {"optimizer": {"optimizer": {"param_groups": ["x"]}}},
        {"optimizer": {"optimizer": {"param_groups": 5}}},
        {"optimizer": {"optimizer": {"param_groups": [{"lr": "fast"}]}}},
        {"optimizer": {"optimizer": {"param_groups": [{"lr": 0.1, "step": "x"}]}}},
    ],
)
def test_strange_values_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    _, out, model = _exported("llama", tmp_path)
    common = torch.load(out / "common.pt", weights_only=False)
    torch.save({**common, **change}, out / "common.pt")
    for command in (["import", str(out), str(tmp_path / "in"), "--model", model], ["inspect", str(out)]):
        assert main(command) == 2
        assert "common.pt does not contain what Megatron-Core writes" in capsys.readouterr().err


def test_numbers_may_lie_in_tensors(tmp_path: Path) -> None:
    _, out, model = _exported("llama", tmp_path)
    common = torch.load(out / "common.pt", weights_only=False)
    common["iteration"] = torch.tensor(STEP)
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group["lr"] = torch.tensor(0.5)
    torch.save(common, out / "common.pt")
    assert main(["import", str(out), str(tmp_path / "in"), "--model", model]) == 0
    back = SourceCheckpoint.open(tmp_path / "in")
    assert back.meta["global_steps"] == STEP and back.options[0]["lr"] == 0.5
    assert back.schedule == {"last_batch_iteration": STEP - 1}  # where the run's schedule goes on


def test_every_format_is_written_of_it(tmp_path: Path) -> None:
    tensors, out, model = _exported("qwen2", tmp_path)
    for stage in range(4):
        place = tmp_path / f"stage{stage}"
        kind = ["--format", "deepspeed", "--stage", str(stage), "--ranks", "2" if stage else "1"]
        assert main(["export", str(out), str(place), *kind, "--model", model]) == 0
        back = SourceCheckpoint.open(place)
        assert back.tied == {"lm_head.weight": "model.embed_tokens.weight"}
        assert back.config["zero_optimization"]["stage"] == stage
        for name, tensor in tensors.items():
            assert torch.equal(back.tensor(name).reshape(tensor.shape), tensor), name
    for kind in ("fp32", "hf"):
        assert main(["export", str(out), str(tmp_path / kind), "--format", kind, "--model", model]) == 0
        written = load_file(tmp_path / kind / "model.safetensors")
        name = "model.layers.1.self_attn.k_proj.weight"
        assert torch.equal(written[name], tensors[f"model/{name}"])


def test_two_programs_in_one_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, model = _exported("llama", tmp_path)
    ours = str(tmp_path / "ours")
    assert main(["export", ours, ours, "--format", "megatron", "--model", model]) == 2
    assert "has checkpoints of another program" in capsys.readouterr().err
    (out.parent / "latest").write_text("seven")
    assert main(["import", str(out.parent), str(tmp_path / "in"), "--model", model]) == 2
    assert "choose the checkpoint with --tag" in capsys.readouterr().err


def test_what_changes_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _save("llama", tmp_path / "like")
    tag, meta = store.load_meta(tmp_path / "like")
    tensors = SourceCheckpoint.open(tmp_path / "like")
    made = {name: tensors.tensor(name) for name in tensors.entries}
    made["scalar/step/lm_head.weight"] += 1
    names = [[name for group in meta["optimizer"]["names"] for name in group]]
    options = [{"lr": 0.1, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.2}]
    optimizer = {"type": "AdamW", "param_groups": options, "names": names}
    store.save(
        tmp_path / "ours", tag, made, meta | {"optimizer": optimizer, "config": {"fp16": {"enabled": True}}}
    )
    model = str(write_config("llama", tmp_path))
    capsys.readouterr()
    assert (
        main(
            [
                "export",
                str(tmp_path / "ours"),
                str(tmp_path / "out"),
                "--format",
                "megatron",
                "--model",
                model,
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    for line in (
        "9 biases and norms had weight decay in this run",
        "the parameters have different step counts",
        "not written: loss scale",
    ):
        assert line in told


def test_a_model_is_named_only_where_it_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _save("llama", tmp_path / "ours")
    for kind in ("universal", "deepspeed", "fp32"):
        out = [
            "export",
            str(tmp_path / "ours"),
            str(tmp_path / "out"),
            "--format",
            kind,
            "--model",
            "default",
        ]
        assert main(out) == 2
        assert "--model applies only to" in capsys.readouterr().err
