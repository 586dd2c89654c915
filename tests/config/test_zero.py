import sys
from typing import Any

import pytest

from launcher.config import ConfigProblems, ZeroConfig, load
from launcher.errors import ConfigError


def test_defaults() -> None:
    zero = load({}).zero_optimization
    assert zero.stage == 0
    assert zero.overlap_comm is True
    assert (zero.reduce_bucket_size, zero.allgather_bucket_size, zero.sub_group_size) == (5e8, 5e8, 1e9)
    assert (zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold) == (5e7, 1e5)
    assert zero.stage3_model_persistence_threshold == sys.maxsize
    assert (zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance) == (1e9, 1e9)


@pytest.mark.parametrize("stage", range(4))
def test_overlap_is_on_at_every_stage_unless_false_is_said(stage: int) -> None:
    for said, meant in ((None, True), (True, True), (False, False)):
        zero = load({"zero_optimization": {"stage": stage, "overlap_comm": said}}).zero_optimization
        assert zero.overlap_comm is meant


def test_whole_floats_become_ints() -> None:
    zero = load('{"zero_optimization": {"reduce_bucket_size": 2e8, "sub_group_size": 1e9}}').zero_optimization
    assert zero.reduce_bucket_size == 200_000_000
    assert isinstance(zero.reduce_bucket_size, int)
    assert isinstance(zero.sub_group_size, int)


@pytest.mark.parametrize("key", [key for key in ZeroConfig.model_fields if key.startswith("stage3_")])
def test_stage3_keys_are_read_without_their_prefix(key: str) -> None:
    value = True if ZeroConfig.model_fields[key].annotation is bool else 7
    bare = key.removeprefix("stage3_")
    assert getattr(load({"zero_optimization": {bare: value}}).zero_optimization, key) == value
    with pytest.raises(ConfigError, match=f"`{bare}` and `{key}` are two names of the same key"):
        load({"zero_optimization": {key: value, bare: value}})


@pytest.mark.key("zero_optimization.stage3_gather_fp16_weights_on_model_save")
def test_old_names_are_taken_with_a_note() -> None:
    config = load({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}, "bfloat16": {}})
    assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save is True
    assert any(
        "stage3_gather_fp16_weights_on_model_save is obsolete: write" in str(note) for note in config.notes
    )
    assert any("bfloat16 is obsolete: write `bf16`" in str(note) for note in config.notes)


@pytest.mark.key("zero_optimization.offload_param.*", "zero_optimization.offload_optimizer.*")
def test_offload_needs_a_stage_and_a_place() -> None:
    zero = {
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": None,
        "cpu_offload": False,
    }
    assert load({"zero_optimization": zero}).zero_optimization.stage == 0
    for section in ("offload_optimizer", "offload_param"):
        assert load({"zero_optimization": {"stage": 3, section: {"device": "cpu"}}})
        with pytest.raises(ConfigProblems, match=rf'{section}.device: is "nvme", but nvme_path is missing'):
            load({"zero_optimization": {"stage": 3, section: {"device": "nvme"}}})
    with pytest.raises(ConfigProblems, match=r"offload_optimizer moves .* zero_optimization\.stage 0"):
        load({"zero_optimization": {"stage": 0, "cpu_offload": True}})
    with pytest.raises(ConfigProblems, match=r"did you mean `zero_optimization\.offload_param\.pin_memory`"):
        load({"zero_optimization": {"offload_param": {"device": "none", "pin_memry": True}}})


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "auto"])
def test_offloaded_parameters_are_told_to_have_no_effect_below_stage_3(stage: Any) -> None:
    """accelerate writes the section at every stage, and DeepSpeed ignores it."""
    zero = load({"zero_optimization": {"stage": stage, "offload_param": {"device": "cpu"}}})
    told = [str(note) for note in zero.notes if "offload_param" in str(note)]
    assert told == (
        [f"zero_optimization.offload_param: has no effect at stage {stage}: only stage 3 shards parameters"]
        if stage in (0, 1, 2)
        else []
    )
    assert (zero.zero_optimization.parameters_elsewhere is None) == (stage != 3)


@pytest.mark.key("zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload")
@pytest.mark.key("zero_optimization.offload_optimizer.cpuadam_cores_perc")
def test_faster_offloads_of_deepspeeds_are_read_and_told() -> None:
    """Uses the files of DeepSpeed's examples for ZenFlow and SuperOffload."""
    offload = {"device": "cpu", "pin_memory": True}
    zenflow = {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True}
    config = load({"zero_optimization": {"stage": 2, "offload_optimizer": offload, "zenflow": zenflow}})
    (note,) = [note for note in config.notes if note.kind == "no effect"]
    assert note.path == ("zero_optimization", "zenflow") and "every step updates every weight" in note.what
    assert load({"zero_optimization": {"zenflow": {"update_interval": "auto", "select_interval": 3}}})
    faster = {**offload, "ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9}
    config = load({"zero_optimization": {"stage": 3, "offload_optimizer": faster}})
    told = {note.path[-1] for note in config.notes if note.kind == "no effect"}
    assert told == {"super_offload", "cpuadam_cores_perc"}
    with pytest.raises(ConfigProblems, match=r"did you mean `zero_optimization\.zenflow\.topk_ratio`"):
        load({"zero_optimization": {"zenflow": {"topk_ration": 0.1}}})
    with pytest.raises(ConfigProblems, match="must be less than 1"):
        load({"zero_optimization": {"zenflow": {"topk_ratio": 1}}})


def test_keys_without_effect_are_said_to_have_none() -> None:
    notes = load({"zero_optimization": {"round_robin_gradients": True, "contiguous_gradients": False}}).notes
    assert sum("has no effect" in str(note) for note in notes) == 2


@pytest.mark.key("zero_optimization")
@pytest.mark.parametrize("section", [3, [2]])
def test_the_section_is_an_object(section: object) -> None:
    """Null and false mean stage 0; true is the old form of stage 1."""
    with pytest.raises(
        ConfigProblems, match=r'must be an object.*\n.*write "zero_optimization": \{"stage": [0-3]\}'
    ):
        load({"zero_optimization": section})
    assert load({"zero_optimization": None}) == load({"zero_optimization": False}) == load({})
