"""Read the required elements of safetensors directories, and find them by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from launcher.errors import CheckpointError
from launcher.models.build import build_on_meta
from launcher.models.load import SafetensorsSource
from tests.models.tiny import config_of
from tests.models.truth import materialize


def _model(family: str, **changes: Any) -> PreTrainedModel:
    model = build_on_meta(config_of(family, **changes))
    materialize(model, 3)
    return model


def _assert_loads(model: PreTrainedModel, directory: Path) -> None:
    source = SafetensorsSource(directory)
    names = source.match_names(model)
    assert names is not None
    parameters = dict(model.named_parameters())
    assert parameters.keys() <= names.keys()
    for name, parameter in parameters.items():
        box = (0,) * parameter.dim(), parameter.shape
        assert torch.equal(source.read_box(names[name], *box), parameter)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox", "opt", "mamba"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_saved_model_is_read_back(family: str, max_shard_size: str, tmp_path: Path) -> None:
    model = _model(family)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").is_file() == (max_shard_size == "5GB")
    _assert_loads(model, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_boxes_shapes_and_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {
        "cube": torch.arange(60).view(3, 4, 5).to(dtype),
        "scalar": torch.tensor(7).to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
    }
    save_file(stored, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    info = source.names()["cube"]
    assert (info.shape, info.dtype) == ((3, 4, 5), dtype)
    assert torch.equal(source.read_box("cube", (1, 0, 2), (2, 4, 3)), stored["cube"][1:3, :, 2:])
    assert torch.equal(source.read_box("scalar", (), ()), stored["scalar"])
    assert source.read_box("empty", (0, 1), (0, 2)).shape == (0, 2)
    for offsets, sizes in [((0, 0, 0), (3, 4, 6)), ((0, 0), (3, 4)), ((-1, 0, 0), (1, 1, 1))]:
        with pytest.raises(CheckpointError, match=r"cube.*\(3, 4, 5\)"):
            source.read_box("cube", offsets, sizes)
    with pytest.raises(CheckpointError, match="nothing"):
        source.read_box("nothing", (0,), (1,))


def test_only_the_wanted_elements_are_read(tmp_path: Path) -> None:
    save_file({"experts": torch.zeros(4, 64, 64)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    read = []

    class Counting:
        def __init__(self, file: Any) -> None:
            self.file = file

        def get_slice(self, name: str) -> Any:
            stored = self.file.get_slice(name)

            class Slice:
                def __getitem__(self, index: Any) -> torch.Tensor:
                    read.append(stored[index].numel())
                    return stored[index]

            return Slice()

    source._files = {path: Counting(file) for path, file in source._files.items()}
    source.read_box("experts", (1, 3, 60), (2, 25, 4))
    assert sum(read) == 200


def _rename(directory: Path, change: dict[str, str | None]) -> None:
    """Rewrite the weights with other names; None removes a tensor, "a+b" stores it twice."""
    path = directory / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        for other in (change.get(name, name) or "").split("+"):
            if other:
                stored[other] = tensor.clone()
    save_file(stored, path, metadata={"format": "pt"})


def test_base_model_prefix_may_be_absent(tmp_path: Path) -> None:
    model = _model("gpt2")  # tied: the base model has all the weights
    model.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in SafetensorsSource(tmp_path).names()
    _assert_loads(model, tmp_path)


def test_base_model_prefix_may_be_too_much(tmp_path: Path) -> None:
    model = _model("gpt2")
    model.save_pretrained(tmp_path)
    assert SafetensorsSource(tmp_path).match_names(model.transformer)


@pytest.mark.parametrize("stored_as", ["lm_head.weight", "model.embed_tokens.weight+lm_head.weight"])
def test_tied_weight_under_its_other_name_or_under_both(stored_as: str, tmp_path: Path) -> None:
    model = _model("qwen2")
    model.save_pretrained(tmp_path)
    _rename(tmp_path, {"model.embed_tokens.weight": stored_as})
    _assert_loads(model, tmp_path)


def test_tied_weight_stored_twice_with_different_values(tmp_path: Path) -> None:
    _model("qwen2", tie_word_embeddings=False).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        SafetensorsSource(tmp_path).match_names(_model("qwen2"))


def test_older_names_that_transformers_renames(tmp_path: Path) -> None:
    model = _model("bert")
    model.save_pretrained(tmp_path)
    norm = "bert.embeddings.LayerNorm."
    _rename(tmp_path, {f"{norm}weight": f"{norm}gamma", f"{norm}bias": "embeddings.LayerNorm.beta"})
    names = SafetensorsSource(tmp_path).match_names(model)
    assert names is not None
    assert names[f"{norm}weight"] == f"{norm}gamma"
    assert names[f"{norm}bias"] == "embeddings.LayerNorm.beta"


def test_weights_that_transformers_computes_on_loading_are_found_out(tmp_path: Path) -> None:
    """Mixtral's experts are stored one by one; with several dtypes they are not slices of one tensor."""
    model = _model("mixtral")
    model.save_pretrained(tmp_path)
    assert SafetensorsSource(tmp_path).match_names(model) is not None
    weights = load_file(tmp_path / "model.safetensors")
    one = next(name for name in weights if ".experts.1." in name)
    save_file({**weights, one: weights[one].bfloat16()}, tmp_path / "model.safetensors")
    assert SafetensorsSource(tmp_path).match_names(model) is None


def test_everything_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    _model("llama").save_pretrained(tmp_path)
    _rename(tmp_path, {"model.norm.weight": "model.extra.weight", "model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(tmp_path).match_names(_model("llama", vocab_size=80))
    text = str(caught.value)
    assert "2 missing" in text and "model.norm.weight" in text and "model.layers.1.mlp.up_proj.weight" in text
    assert "1 unexpected: model.extra.weight" in text
    assert "2 with a different shape" in text and "(72, 32) in the file" in text


def test_buffers_of_older_versions_are_no_surprise(tmp_path: Path) -> None:
    model = _model("gpt2")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(stored, tmp_path / "model.safetensors")
    _assert_loads(model, tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:20], b"\xff" * 8 + whole[8:], b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            SafetensorsSource(tmp_path)


def test_directories_that_lack_something(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights in the safetensors format"):
        SafetensorsSource(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    for weight_map, message in (
        ({"a": "one.safetensors", "b": "two.safetensors"}, "two.safetensors"),
        ({"a": "../one.safetensors"}, r"\.\./one"),
        (
            {"a": "one.safetensors", "b": "one.safetensors"},
            "lacks tensors that model.safetensors.index.json lists for it: b",
        ),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            SafetensorsSource(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        SafetensorsSource(tmp_path)
