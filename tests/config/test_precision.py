"""Errors and notes for `fp16`, `bf16`, `torch_autocast` and `data_types`."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config import ConfigProblems, load

ON: dict[str, Any] = {"enabled": True}


@pytest.mark.key(
    "fp16.enabled",
    "bf16.enabled",
    "torch_autocast.enabled",
    "data_types.param_dtype",
    "bf16.bf16_optimizer_states",
)
@pytest.mark.parametrize(("config", "names", "fix"), [
    ({"fp16": ON, "bf16": ON}, ["fp16.enabled", "bf16.enabled"], "to false"),
    ({"torch_autocast": {**ON, "dtype": "fp16"}, "bf16": ON}, ["torch_autocast.enabled", "bf16.enabled"],
     "set bf16.enabled to false"),
    ({"torch_autocast": ON, "fp16": ON}, ["torch_autocast.enabled", "fp16.enabled"], "set fp16.enabled to false"),
    ({"bf16": ON, "data_types": {"param_dtype": "fp16"}}, ["data_types.param_dtype", "fp16.enabled"],
     "remove param_dtype, or make it agree with fp16.enabled"),
    ({"bf16": ON, "data_types": {"param_dtype": "torch.float32"}}, ["data_types.param_dtype", "bf16.enabled"],
     "make it agree with bf16.enabled"),
    ({"data_types": {"param_dtype": "bfloat16"}}, ["data_types.param_dtype", "bf16.enabled"],
     "make it agree with bf16.enabled"),
    ({"bf16": {**ON, "bf16_optimizer_states": True}}, ["bf16_optimizer_states", "bf16_master_weights_and_grads"],
     "set bf16_master_weights_and_grads to true"),
    ({"fp16": {**ON, "min_loss_scale": 0}}, ["min_loss_scale", "loss_scale"], "of at least 1"),
    ({"torch_autocast": {**ON, "dtype": "float32"}}, ["torch_autocast.dtype"], "one of"),
    ({"torch_autocast": {**ON, "lower_precision_safe_modules": "torch.nn.Linear"}}, ["lower_precision"], "list"),
    ({"data_types": {"keep_in_fp32_modules": [1]}}, ["keep_in_fp32_modules"], "list of names"),
], ids=str)  # fmt: skip
def test_what_cannot_stand_together_names_both_and_the_way_out(
    config: dict[str, Any], names: list[str], fix: str
) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load(config)
    (problem,) = caught.value.problems
    assert all(name in str(caught.value) for name in names)
    assert fix in f"{problem.what} {problem.fix}"


@pytest.mark.parametrize("config", [
    {"bf16": ON, "data_types": {"param_dtype": "bf16"}},
    {"bf16": ON, "torch_autocast": ON},
    {"fp16": {**ON, "min_loss_scale": 1e-10}},
    {"bf16": {"bf16_optimizer_states": "auto", "enabled": True}},
    {"fp16": {**ON, "min_loss_scale": 0, "loss_scale": 128}},
    {"torch_autocast": {**ON, "dtype": "torch.bfloat16", "lower_precision_safe_modules": []}},
    {"data_types": {"keep_in_fp32_modules": "auto", "buffer_dtype": "half"}},
    {"torch_autocast": {"enabled": False}, "bf16": ON},
], ids=str)  # fmt: skip
def test_what_can(config: dict[str, Any]) -> None:
    loaded = load(config)
    assert load(loaded.to_dict()) == loaded
    assert loaded.resolve(dp_degree=2, auto={"train_micro_batch_size_per_gpu": 1})


def test_an_auto_that_becomes_a_conflict_is_found() -> None:
    config = load({"fp16": {"enabled": "auto"}, "data_types": {"param_dtype": "fp16"}, "train_batch_size": 2})
    with pytest.raises(ConfigProblems, match="param_dtype"):
        config.resolve(dp_degree=2, auto={"fp16.enabled": False})
    assert config.resolve(dp_degree=2, auto={"fp16.enabled": True}).dtype == "fp16"


@pytest.mark.key("torch_autocast.dtype")
def test_autocast_without_a_dtype_says_which() -> None:
    notes = [str(note) for note in load({"torch_autocast": ON, "gradient_clipping": 0}).notes]
    assert len(notes) == 1 and "torch_autocast.dtype" in notes[0] and "bfloat16" in notes[0]
    assert not load({"torch_autocast": {**ON, "dtype": "bf16"}, "gradient_clipping": 0}).notes
    assert not load({"bf16": ON, "gradient_clipping": 0}).notes  # check_grad_overflow speaks when it acts


def test_bounds_of_a_dynamic_scale_hold_where_it_is_used() -> None:
    wrong = {"loss_scale_window": 0, "min_loss_scale": -1}
    fixed = {"enabled": True, **wrong}
    for section in (
        {"enabled": False, **wrong},
        {**fixed, "loss_scale": 128},
        {**fixed, "loss_scale": "128"},
    ):
        config = load({"fp16": section, "train_batch_size": 1})
        assert [note.kind for note in config.notes if note.path[-1] in wrong] == ["no effect", "no effect"]
        assert config.fp16.loss_scale_window == 0  # as written
        assert config.resolve(dp_degree=1).fp16 == config.fp16
    with pytest.raises(ConfigProblems, match=r"(?s)loss_scale_window: must be at least 1.*min_loss_scale"):
        load({"fp16": {"enabled": True, **wrong}})
    with pytest.raises(ConfigProblems, match="loss_scale_window: must be a whole number"):
        load({"fp16": {"enabled": False, "loss_scale_window": "much"}})
    with pytest.raises(
        ConfigProblems, match="loss_scale_window: must be at least 1"
    ):  # it scales losses, too
        load({"fp16": wrong, "torch_autocast": {"enabled": True, "dtype": "float16"}})
    with pytest.raises(ConfigProblems, match="initial_scale_power: must be at most 127"):
        load({"fp16": {"enabled": True, "initial_scale_power": 5000}})
