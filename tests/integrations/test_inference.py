"""`deepspeed.init_inference` returns the model itself, in a dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import ConfigError
from launcher.integrations import surface
from launcher.integrations.enumerations import DtypeEnum
from launcher.integrations.inference import InferenceEngine, init_inference
from tests.pool.reference import tiny_llama


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", DtypeEnum.bf16, "torch.bfloat16"])
def test_the_model_runs_in_its_dtype(dtype: Any) -> None:
    model, tokens = tiny_llama(), torch.arange(6)[None]
    want = tiny_llama().bfloat16().eval()(tokens).logits
    engine = init_inference(model, dtype=dtype, mp_size=1, replace_with_kernel_inject=True)
    assert isinstance(engine, InferenceEngine) and engine.module is model and not engine.training
    assert torch.equal(engine(tokens).logits, want)
    assert engine.config is model.config and engine.generate(tokens, max_new_tokens=2).shape == (1, 8)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        engine.nothing_like_it()


def test_the_dtype_is_half_where_none_is_said(tmp_path: Path) -> None:
    assert next(init_inference(torch.nn.Linear(2, 2)).parameters()).dtype == torch.float16
    path = tmp_path / "inference.json"
    path.write_text(json.dumps({"dtype": "fp32", "tensor_parallel": {"tp_size": 1}}))
    assert next(init_inference(torch.nn.Linear(2, 2), str(path)).parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"mp_size": 2}, "mp_size=2 is not supported"),
        ({"tensor_parallel": {"tp_size": 4}}, "tensor_parallel="),
        ({"quant": {"enabled": True}}, "quant="),
        ({"checkpoint": "weights.json"}, "checkpoint='weights.json'"),
        ({"dtyp": "fp32"}, "dtyp is not a key"),
    ],
)
def test_what_is_not_here_is_an_error(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        init_inference(torch.nn.Linear(2, 2), keys)


def test_two_values_of_a_key_are_an_error() -> None:
    with pytest.raises(ConfigError, match="dtype is given twice"):
        init_inference(torch.nn.Linear(2, 2), {"dtype": "fp32"}, dtype="bf16")


def test_scripts_find_it() -> None:
    assert surface.look_up("", "init_inference") is init_inference
    assert surface.look_up("inference.engine", "InferenceEngine") is InferenceEngine
