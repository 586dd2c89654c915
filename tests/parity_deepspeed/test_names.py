"""The lists of names match the installed DeepSpeed, and names that are only data or arithmetic have equal values."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from launcher.integrations import (
    accelerator,
    chunked_sequences,
    curriculum,
    indexed_dataset,
    norms,
    pipe_schedule,
    timing,
    utilities,
)
from launcher.integrations.constants import NAMED, VALUES, constants_of
from launcher.integrations.served import NAMES
from launcher.integrations.surface import look_up
from tests.parity_deepspeed import api_names, api_page


def test_the_list_of_names_is_complete() -> None:
    found, kept = api_names.collect(), api_page.names()
    differing = {module for module in found.keys() | kept.keys() if found.get(module) != kept.get(module)}
    assert not differing, "run python -m tests.parity_deepspeed.api_names, and api_page"


def test_constants_have_their_values() -> None:
    wrong = []
    for module in {*NAMED, *VALUES}:
        theirs = importlib.import_module(f"deepspeed.{module}")
        wrong += [
            f"{module}.{name}"
            for name, value in constants_of(module).items()
            if getattr(theirs, name) != value
        ]
    assert wrong == []


@pytest.mark.parametrize("kind", ["TrainSchedule", "InferenceSchedule", "DataParallelSchedule"])
def test_schedules_give_the_same_instructions(kind: str) -> None:
    theirs = importlib.import_module("deepspeed.runtime.pipe.schedule")
    for stages in range(1, 5):
        for number in range(1, 7):
            for stage in range(stages):
                one = getattr(theirs, kind)(number, stages, stage)
                mine = getattr(pipe_schedule, kind)(number, stages, stage)
                assert [[repr(i) for i in now] for now in mine] == [
                    [repr(i) for i in now] for now in one.steps()
                ]
                assert mine.num_pipe_buffers() == one.num_pipe_buffers()


def test_helpers_answer_the_same() -> None:
    theirs = importlib.import_module("deepspeed.runtime.utils")
    assert norms.call_to_str("f", 1, b=2) == theirs.call_to_str("f", 1, b=2)
    assert norms.prefix_sum_inc([1, 2, 3]) == theirs.prefix_sum_inc([1, 2, 3])
    for weights, parts in (([1, 2, 3, 4, 5], 2), ([5, 1, 1, 1], 3), ([1, 1], 2)):
        mine, other = utilities.partition_balanced(weights, parts), theirs.partition_balanced(weights, parts)
        assert _heaviest(mine, weights) == _heaviest(other, weights)  # cuts of equal weight may differ
    trim = importlib.import_module("deepspeed.utils.timer").trim_mean
    for data in ([1.0, 2.0, 3.0, 100.0], [5.0]):
        assert timing.trim_mean(data, 0.1) == pytest.approx(trim(data, 0.1))


def test_sequences_in_chunks_are_the_same() -> None:
    theirs = importlib.import_module("deepspeed.sequence.fpdt_layer")
    torch.manual_seed(1)
    sizes = ((8, 2, 4), (6, 4), (6,), (4, 6), (4,))
    x, w1, b1, w2, b2 = given = [torch.randn(*size, requires_grad=True) for size in sizes]
    outputs = [make.FPDT_FFN.apply(x, w1, b1, w2, b2, True, 4)[0] for make in (chunked_sequences, theirs)]
    torch.testing.assert_close(*outputs)
    slopes = [
        torch.autograd.grad(out.square().sum(), given) for out in outputs
    ]  # theirs overwrites x, so it comes last
    torch.testing.assert_close(*slopes)
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=6)
    tokens = torch.arange(24).view(2, 12)
    for rank in range(3):
        mine, other = (
            make.FPDT_InputConstruct(tokens, tokens + 1, tokens, None, tokens[:1], args, 3, rank).generate()
            for make in (chunked_sequences, theirs)
        )
        torch.testing.assert_close(mine, other)


def _heaviest(bounds: list[int], weights: list[int]) -> int:
    return max(sum(weights[begin:end]) for begin, end in pairwise(bounds))


def test_a_curriculum_is_the_same() -> None:
    theirs = importlib.import_module(
        "deepspeed.runtime.data_pipeline.curriculum_scheduler"
    ).CurriculumScheduler
    ends = {"min_difficulty": 8, "max_difficulty": 64}
    pace = {"total_curriculum_step": 10, "difficulty_step": 8}
    for config in (
        {**ends, "schedule_type": "fixed_linear", "schedule_config": pace},
        {**ends, "schedule_type": "fixed_root", "schedule_config": {**pace, "root_degree": 2}},
        {
            **ends,
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [8, 16, 64], "max_step": [3, 6]},
        },
    ):
        one, mine = theirs(dict(config)), curriculum.CurriculumScheduler(config)
        for step in range(1, 14):
            assert mine.update_difficulty(step) == one.update_difficulty(step)


def test_rows_of_tokens_have_the_same_files(tmp_path: Path) -> None:
    """Our files are byte-identical to DeepSpeed's, and each side reads the other's."""
    theirs = importlib.import_module("deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset")
    rows = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]
    for name, home in (("mine", indexed_dataset), ("other", theirs)):
        builder = home.MMapIndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), np.int32)
        for row in rows:
            builder.add_item_numpy(row)
            builder.end_document()
        builder.finalize(str(tmp_path / f"{name}.idx"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"mine.{ending}").read_bytes() == (tmp_path / f"other.{ending}").read_bytes()
    read = indexed_dataset.MMapIndexedDataset(str(tmp_path / "other"))
    assert [row.tolist() for row in read[:]] == [row.tolist() for row in rows]


def test_the_accelerator_of_a_cpu_answers_the_same() -> None:
    theirs = importlib.import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator()
    mine = accelerator.get_accelerator()
    for name in (
        "device_name",
        "current_device_name",
        "is_synchronized_device",
        "use_host_timers",
        "is_available",
    ):
        assert getattr(mine, name)() == getattr(theirs, name)(), name


def served() -> Iterator[tuple[str, Any, Any]]:
    """Yield every available name that the installed DeepSpeed has: its path, DeepSpeed's object, and ours."""
    for module, names in NAMES.items():
        for name in names:
            try:
                theirs = getattr(importlib.import_module(f"deepspeed.{module}".rstrip(".")), name)
            except (ImportError, AttributeError, RuntimeError):
                continue  # needs a GPU, or exists only in an older version
            yield f"{module}.{name}".lstrip("."), theirs, look_up(module, name)


def both_are_classes(theirs: Any, mine: Any) -> bool:
    return inspect.isclass(theirs) and inspect.isclass(mine) and not issubclass(theirs, Enum)


def kind_of(owner: type, name: str) -> str | None:
    found = inspect.getattr_static(owner, name, None)
    if found is None or isinstance(found, property | cached_property):
        return found and "value"
    return "method" if callable(found) or isinstance(found, staticmethod | classmethod) else "value"


def test_what_is_called_there_is_called_here() -> None:
    """A property must not be a method in DeepSpeed, or vice versa: scripts that use it would break."""
    differing, compared = [], 0
    for below, theirs, mine in served():
        for attribute in dir(theirs) if both_are_classes(theirs, mine) else ():
            kinds = kind_of(theirs, attribute), kind_of(mine, attribute)
            compared += None not in kinds
            if not attribute.startswith("_") and None not in kinds and kinds[0] != kinds[1]:
                differing.append(f"{below}.{attribute}")
    assert differing == [] and compared > 1000


OTHER_PARAMETERS = {
    "log_summary": "the log is printed, and no dict of it is made",
    "single_all_to_all": "what DeepSpeed's own backward passes on",
    "InferenceEngine": "init_inference() makes it",
    "DeepSpeedEngine": "initialize() makes it",
    "PipelineEngine": "initialize() makes it",
    "runner.main": "`launch` has flags of its own",
    "monitor.": "made by position, of a section of the config",
    "FusedAdam.step": "arguments that DeepSpeed refuses, too",
    "FusedLamb.step": "arguments that DeepSpeed refuses, too",
    "FusedLion.step": "arguments that DeepSpeed refuses, too",
    "lr_schedules.": "the number of a step has another name",
}
"""DeepSpeed keywords that are not accepted -> the reason."""


def test_keywords_that_are_taken_there_are_taken_here() -> None:
    differing = set()
    for below, theirs, mine in served():
        pairs = [(below, theirs, mine)] if inspect.isfunction(theirs) else []
        if both_are_classes(theirs, mine):
            methods = [each for each in vars(theirs) if not each.startswith("_") and hasattr(mine, each)]
            pairs = [(f"{below}.{each}", getattr(theirs, each), getattr(mine, each)) for each in methods]
            pairs.append((below, theirs.__init__, mine.__init__))
        differing |= {path for path, there, here in pairs if lost_keywords(there, here)}
    known = {
        below
        for below in differing
        for part in OTHER_PARAMETERS
        if below.endswith(part) or (part.endswith(".") and part in below)
    }
    assert sorted(differing - known) == []


def lost_keywords(theirs: Any, mine: Any) -> set[str]:
    """Return the parameters of a DeepSpeed function that ours does not accept as keywords."""
    if not inspect.isfunction(theirs) or not callable(mine):
        return set()
    there, here = (inspect.signature(function).parameters for function in (theirs, mine))
    if any(one.kind is one.VAR_KEYWORD for one in here.values()):
        return set()
    named = {name for name, one in there.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    return named - {*here, "self"}
