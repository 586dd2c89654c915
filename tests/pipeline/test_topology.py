"""Ranks by coordinates, and their use in a PipelineModule."""

from __future__ import annotations

import pytest
from torch import nn

from launcher.errors import ConfigError
from launcher.pipe import (
    PipeDataParallelTopology,
    PipelineModule,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


def test_ranks_and_coordinates() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert topology.get_axis_names() == ["pipe", "data", "model"] and topology.world_size() == 12
    assert [topology.get_dim(axis) for axis in ("pipe", "data", "model", "other")] == [2, 3, 2, 0]
    assert topology.get_rank(pipe=1, data=2, model=0) == 10
    for rank in range(12):
        assert topology.get_rank(**topology.get_coord(rank)._asdict()) == rank
    assert topology.get_coord(7).pipe == 1 and topology.get_coord(7).model == 1
    assert topology.get_rank_repr(3) == "model_01" and topology.get_rank_repr(3, inner_sep="") == "model01"
    assert topology.get_rank_repr(3, omit_axes=["model"], outer_sep="+").count("+") == 1
    assert topology.filter_match(pipe=0, model=1) == [1, 3, 5]
    assert topology.get_axis_list("pipe", 1) == list(range(6, 12))


def test_groups_along_an_axis() -> None:
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    assert topology.get_axis_comm_lists("pipe") == [[0, 2], [1, 3]]
    assert topology.get_axis_comm_lists("data") == [[0, 1], [2, 3]]
    assert topology.get_axis_comm_lists("model") == []


def test_wrong_axes_and_coordinates() -> None:
    for axes, dims in ((["a"], [1, 2]), (["a", "a"], [1, 1]), (["a"], [0])):
        with pytest.raises(ConfigError, match="invalid topology: axes"):
            ProcessTopology(axes, dims)
    topology = PipeDataParallelTopology(2, 2)
    with pytest.raises(ConfigError, match="needs the axes pipe, data"):
        topology.get_rank(pipe=0)
    with pytest.raises(ConfigError, match="is out of range for"):
        topology.get_rank(pipe=2, data=0)
    with pytest.raises(ConfigError, match="rank 4 is out of range: the topology has 4 ranks"):
        topology.get_coord(4)


def test_a_module_takes_its_stages_from_it() -> None:
    layers = [nn.ReLU(), nn.ReLU()]
    module = PipelineModule(layers, topology=PipeDataParallelTopology(2, 3))
    assert module.num_stages == 2
    module.check_degrees(pipe=2, data=3, model=4)  # it says nothing of model
    with pytest.raises(ConfigError, match="the topology has degree 3 along data, but the run has 2"):
        module.check_degrees(pipe=2, data=2)
    with pytest.raises(ConfigError, match="num_stages 4 contradicts the topology"):
        PipelineModule(layers, num_stages=4, topology=PipeDataParallelTopology(2, 1))
    for axes in (["data", "pipe"], ["data"], ["pipe", "expert"]):
        with pytest.raises(ConfigError, match="unsupported topology axes"):
            PipelineModule(layers, topology=ProcessTopology(axes, [1] * len(axes)))
