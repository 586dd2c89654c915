"""Streamed safetensors that safetensors and from_pretrained can read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from launcher.checkpoint.export import ExportEntry, write_safetensors
from launcher.errors import CheckpointError
from launcher.models.build import build_on_meta
from tests.models.tiny import config_of
from tests.models.truth import materialize


def _entries(tensors: dict[str, torch.Tensor], log: list[str] | None = None) -> list[ExportEntry]:
    def fetch(name: str) -> Callable[[], torch.Tensor | None]:
        def get() -> torch.Tensor:
            if log is not None:
                log.append(name)
            return tensors[name]

        return get

    return [(name, tensor.dtype, tensor.shape, fetch(name)) for name, tensor in tensors.items()]


MIXED = {
    "odd_bytes": torch.arange(3, dtype=torch.uint8),
    "matrix": torch.randn(5, 7),
    "half": torch.randn(3, 3).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(4, 6).t(),
}


@pytest.mark.parametrize(("limit", "files"), [(5e9, 1), (100, 4), (1, 7)])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, limit: float, files: int) -> None:
    written = write_safetensors(tmp_path, _entries(MIXED), limit)
    weights = [path for path in written if path.suffix == ".safetensors"]
    assert len(weights) == files and {path.name for path in written} == {p.name for p in tmp_path.iterdir()}
    loaded: dict[str, torch.Tensor] = {}
    for path in weights:
        loaded.update(load_file(path))
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert loaded.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


def test_every_tensor_begins_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    """Readers that map the file require this; MIXED starts with three odd bytes."""
    (path,) = write_safetensors(tmp_path, _entries(MIXED))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, tensor in MIXED.items():
        begin = 8 + length + header[name]["data_offsets"][0]
        assert begin % tensor.element_size() == 0, name


def _built(family: str) -> PreTrainedModel:
    model = build_on_meta(config_of(family))
    materialize(model, 3)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("limit", [5e9, 20_000])
def test_from_pretrained_reads_it(tmp_path: Path, family: str, limit: float) -> None:
    """Uses HF's parameter names and stores tied weights once; Mixtral's experts stay fused."""
    model = _built(family).eval()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_safetensors(tmp_path, _entries(parameters), limit)
    assert (tmp_path / "model.safetensors.index.json").exists() == (limit == 20_000)
    model.config.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


def test_one_tensor_at_a_time_and_the_same_order_on_every_rank(tmp_path: Path) -> None:
    writer_log: list[str] = []
    other_log: list[str] = []
    assert write_safetensors(tmp_path / "w", _entries(MIXED, writer_log), 100)
    assert write_safetensors(tmp_path / "o", _entries(MIXED, other_log), 100, writer=False) == []
    assert writer_log == other_log and sorted(writer_log) == sorted(MIXED)
    assert not (tmp_path / "o").exists()


def test_an_earlier_export_does_not_shine_through(tmp_path: Path) -> None:
    write_safetensors(tmp_path, _entries({"a": torch.zeros(10)}))
    write_safetensors(tmp_path, _entries({"a": torch.ones(10), "b": torch.ones(10)}), 40)
    assert {p.name for p in tmp_path.iterdir()} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 80
    assert index["weight_map"]["b"] == "model-00002-of-00002.safetensors"
    write_safetensors(tmp_path, _entries({"a": torch.zeros(10)}))
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors"}


@pytest.mark.parametrize("wrong", [None, torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)])
def test_a_failing_writer_still_takes_part_and_leaves_the_old_files(
    tmp_path: Path, wrong: torch.Tensor | None
) -> None:
    write_safetensors(tmp_path, _entries({"a": torch.ones(2, 2)}))
    log: list[str] = []
    entries = _entries({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2), "c": torch.zeros(1)}, log)
    entries[1] = ("b", torch.float32, (2, 2), lambda: log.append("b") or wrong)  # type: ignore[func-returns-value]
    with pytest.raises(CheckpointError, match=r"Expected b as \(2, 2\) of torch\.float32, but got"):
        write_safetensors(tmp_path, entries)
    assert log == ["a", "b", "c"], "the other ranks wait for every fetch"
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors"}
    assert load_file(tmp_path / "model.safetensors")["a"].sum() == 4


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log: list[str] = []
    with pytest.raises(CheckpointError, match="could not be written"):
        write_safetensors(tmp_path / "file", _entries(MIXED, log))
    assert len(log) == len(MIXED)


def test_a_dtype_that_the_format_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex64"):
        write_safetensors(tmp_path, _entries({"a": torch.zeros(2, dtype=torch.complex64)}))
