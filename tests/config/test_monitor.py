"""Messages about the sections that monitor a run."""

from __future__ import annotations

import pytest

from launcher.config import load
from launcher.errors import ConfigError

SECTIONS = ["tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "comms_logger"]


@pytest.mark.parametrize("section", SECTIONS)
def test_off_is_the_default(section: str) -> None:
    assert getattr(load({}), section).enabled is False


@pytest.mark.key("flops_profiler.enabled", "wall_clock_breakdown")
def test_the_flops_profiler_turns_the_times_on_and_says_so() -> None:
    notes = [str(note) for note in load({"flops_profiler": {"enabled": True}}).notes]
    assert any("wall_clock_breakdown" in note and "is enabled, because" in note for note in notes)
    quiet = load({"flops_profiler": {"enabled": True}, "wall_clock_breakdown": True}).notes
    assert not any("wall_clock_breakdown" in str(note) for note in quiet)


@pytest.mark.key("flops_profiler.recompute_fwd_factor")
def test_the_factor_of_the_forward_is_said_to_have_no_effect() -> None:
    notes = load({"flops_profiler": {"recompute_fwd_factor": 1.0}}).notes
    assert any("recompute_fwd_factor" in str(note) for note in notes)
    assert not any("recompute_fwd_factor" in str(note) for note in load({"flops_profiler": {}}).notes)


@pytest.mark.key("comet.api_key")
def test_a_secret_in_the_json_is_remarked_on() -> None:
    assert any("COMET_API_KEY" in str(note) for note in load({"comet": {"api_key": "secret"}}).notes)


@pytest.mark.key("comet.mode")
def test_comet_knows_three_modes() -> None:
    with pytest.raises(ConfigError, match=r"comet\.mode"):
        load({"comet": {"mode": "resume"}})


@pytest.mark.key("comms_logger.prof_ops", "comms_logger.prof_all")
def test_operations_have_deepspeeds_names_and_ours() -> None:
    def chosen(**keys: object) -> frozenset[str] | None:
        return load({"comms_logger": {"enabled": True, **keys}}).comms_logger.operations

    assert chosen() is None and chosen(prof_ops=["broadcast"]) is None
    names = ["all_gather_into_tensor", "reduce_scatter"]
    assert chosen(prof_all=False, prof_ops=names) == {"all_gather", "reduce_scatter"}
    with pytest.raises(ConfigError, match=r'prof_ops: .*"all_redduce"'):
        chosen(prof_all=False, prof_ops=["all_redduce"])
    with pytest.raises(ConfigError, match="prof_ops names no operation"):
        chosen(prof_all=False)
