"""`DeepSpeedConfigModel` and names of DeepSpeed's files that programs use without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import Field, ValidationError

from launcher.errors import ArgumentsError, ConfigError
from launcher.integrations import files
from launcher.integrations.config_model import DeepSpeedConfigModel
from launcher.integrations.configuration import DeepSpeedConfig
from launcher.integrations.sections import DeepSpeedZenFlowConfig, DeepSpeedZeroConfig


class Inner(DeepSpeedConfigModel):
    size: int = 1


class Settings(DeepSpeedConfigModel):
    words: list[str] = Field(default_factory=list)
    word: str = Field(
        "",
        json_schema_extra={"deprecated": True, "new_param": "words", "new_param_fn": lambda word: [word]},  # type: ignore[dict-item]
    )
    size: int = Field(0, json_schema_extra={"deprecated": True, "new_param": "inner.size"})
    inner: Inner = Inner()
    dtype: torch.dtype = torch.float32


def test_a_field_that_was_replaced_gives_its_value(caplog: pytest.LogCaptureFixture) -> None:
    made = Settings(word="a", size=3)
    assert made.words == ["a"] and made.inner.size == 3 and not hasattr(made, "word")
    assert "word is deprecated; use words" in caplog.text
    with pytest.raises(ArgumentsError, match=r"both .* and its replacement .* are given"):
        Settings(word="a", words=["b"])


def test_values_are_checked_and_auto_is_left_out() -> None:
    assert (
        Settings(words="auto").words == [] and Settings().model_dump(mode="json")["dtype"] == "torch.float32"
    )
    for wrong in ({"words": 3}, {"wrods": []}):
        with pytest.raises(ValidationError):
            Settings(**wrong)
    with pytest.raises(ValidationError):
        Settings(strict=True, words="auto")
    with pytest.raises(ValidationError):
        Settings().words = 3  # type: ignore[assignment]


def test_the_first_line_of_a_wrong_json_names_its_keys() -> None:
    with pytest.raises(ConfigError, match=r"^Invalid gradient_allreduce_op: config has 1 problem"):
        DeepSpeedConfig({"train_batch_size": 1, "gradient_allreduce_op": "max"})


def test_a_key_without_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    DeepSpeedZeroConfig(stage=3, elastic_checkpoint=True)
    assert "elastic checkpointing is deprecated" in caplog.text


def test_files_of_ranks_come_in_their_order(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    for name in (*names, "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        (tmp_path / name).touch()
    directory = str(tmp_path)
    assert files.get_optim_files(directory) == [str(tmp_path / name) for name in names]
    assert files.get_model_state_file(directory, 2) == str(tmp_path / "mp_rank_00_model_states.pt")
    assert Path(files.get_model_state_file(directory, 3)).name.startswith("zero_pp_rank_0")
    assert len(files.get_model_state_files(directory)) == 2
    with pytest.raises(FileNotFoundError, match="a checkpoint of this engine has different files"):
        files.get_optim_files(str(tmp_path / "none"))


def test_zenflow_is_a_section_of_its_own() -> None:
    """Scripts check their configuration with DeepSpeed's class of that name."""
    zero = DeepSpeedZeroConfig(stage=2, zenflow={"topk_ratio": 0.25, "select_interval": 4})
    assert isinstance(zero.zenflow, DeepSpeedZenFlowConfig)
    assert (zero.zenflow.topk_ratio, zero.zenflow.select_interval) == (0.25, 4)
