"""Configs from every source that a user may name, and models on the meta device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from launcher import hub
from launcher.errors import ConfigError
from launcher.models.build import build_on_meta, load_config
from tests.models.tiny import config_of


def test_default_is_a_small_byte_level_llama() -> None:
    config = load_config("default")
    parameters = sum(p.numel() for p in build_on_meta(config).parameters())
    assert config.model_type == "llama"
    assert 5e6 < parameters < 25e6
    assert config.vocab_size >= 260 and config.eos_token_id < config.vocab_size


def test_bare_config_file_directory_and_saved_model_give_the_same_config(tmp_path: Path) -> None:
    saved = config_of("qwen2")
    saved.save_pretrained(tmp_path)
    from_directory = load_config(str(tmp_path))
    from_file = load_config(str(tmp_path / "config.json"))
    assert type(from_directory) is type(from_file) is type(saved)
    assert from_file.hidden_size == from_directory.hidden_size == 32
    assert from_file.tie_word_embeddings is True


def test_building_takes_no_memory_ties_and_trains() -> None:
    config = config_of("gpt2", use_cache=True)
    model = build_on_meta(config, torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.training
    assert model.config.use_cache is False
    assert config.use_cache is True, "the caller's config is left as it was"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{not json", "not a readable JSON"),
        ('["a", "list"]', "no model_type"),
        ('{"hidden_size": 8}', "no model_type"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
    ],
)
def test_bad_config_file_is_named(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=part) as caught:
        load_config(str(path))
    assert str(path) in str(caught.value)


def test_missing_path_and_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        load_config(str(tmp_path / "absent" / "config.json"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_config(str(tmp_path))


def test_hub_name_that_cannot_be_had_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    monkeypatch.setattr(hub, "_OFFLINE", ())
    for reachable, words in (
        (True, "could not be loaded from the Hugging Face Hub: no network"),
        (False, f"could not be loaded from the Hugging Face Hub: {hub.HUB} cannot be reached"),
    ):
        monkeypatch.setattr(hub, "_has_address", lambda _, known=reachable: known)
        with pytest.raises(ConfigError, match=rf"some/model.*{words}"):
            load_config("some/model")


def test_a_name_without_an_address_is_not_asked_for_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    for name in hub._OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    assert "cannot be reached" in hub.unreachable()
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy"})
    assert not hub.unreachable()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in hub.unreachable()


def test_not_a_causal_model_or_numbers_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="vit"):
        build_on_meta(load_config(str(path)))


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    """transformers writes infinity as {"__float__": "Infinity"}."""
    AutoConfig.for_model("mamba2", time_step_limit=(0.0, float("inf"))).save_pretrained(tmp_path)
    assert '"__float__"' in (tmp_path / "config.json").read_text()
    assert list(load_config(str(tmp_path)).time_step_limit) == [0.0, float("inf")]
