import pytest
import torch

from launcher.engine.curriculum import cut, rising, stepped
from launcher.errors import LauncherError


def test_the_length_rises_along_a_line_in_steps() -> None:
    lengths = [rising(step, 8, 64, 7, 8) for step in range(1, 9)]
    assert lengths == [16, 24, 32, 40, 48, 56, 64, 64]
    assert [rising(step, 8, 64, 14, 16) for step in (1, 3, 14)] == [16, 16, 64]
    assert rising(1, 10, 20, 100, 8) == 16 and rising(100, 10, 20, 100, 8) == 16
    assert rising(1, 10, 12, 100, 8) == 12  # no multiple lies between the two


def test_a_root_rises_faster_at_first() -> None:
    line, root = ([rising(step, 8, 808, 100, 1, degree) for step in range(1, 101)] for degree in (1, 2))
    assert all(r > li for r, li in zip(root[:98], line[:98], strict=True))
    assert root[24] == 408 and line[49] == 408 and root[-1] == line[-1] == 808


def test_written_steps() -> None:
    assert [stepped(step, (8, 16, 32), (2, 3), 32) for step in range(1, 6)] == [8, 8, 16, 32, 32]
    assert [stepped(step, (8, 32, 16), (2, 3), 32) for step in range(1, 6)] == [8, 8, 32, 32, 32]


def test_everything_along_the_sequence_is_cut() -> None:
    ids = torch.arange(24).view(2, 12)
    batch = {
        "attention_mask": torch.ones(2, 1, 12, 12),
        "rows": torch.ones(2, 1, 1, 12),
        "input_ids": ids,
        "labels": ids,
        "embeddings": torch.ones(2, 12, 12),
        "weight": torch.ones(2),
        "classes": torch.ones(2, 3, dtype=torch.long),
        "use_cache": False,
    }
    short = cut(batch, 5)
    assert {key: tuple(value.shape) for key, value in short.items() if key != "use_cache"} == {
        "attention_mask": (2, 1, 5, 5),
        "rows": (2, 1, 1, 5),
        "input_ids": (2, 5),
        "labels": (2, 5),
        "embeddings": (2, 5, 12),
        "weight": (2,),
        "classes": (2, 3),
    }
    assert torch.equal(short["input_ids"], ids[:, :5])
    assert cut(batch, 12) is batch and cut(batch, 99) is batch


def test_arguments_without_names() -> None:
    ids = torch.arange(24).view(2, 12)
    (first, second), _ = cut(((torch.ones(2, 12), ids), {}), 4)
    assert first.shape == second.shape == (2, 4)
    with pytest.raises(LauncherError, match="no token ids"):
        cut(((torch.ones(2, 12),), {}), 4)
