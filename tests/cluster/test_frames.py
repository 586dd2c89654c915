"""The display of a traceback on the terminal."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import nn

import launcher
from launcher.cluster.frames import folded, last_own_line, package_of

LIBRARY = "/x/.venv/lib/python3.11/site-packages/torch/nn/module.py"
OURS = str(Path(launcher.__file__).parent / "engine" / "engine.py")


def text_of(*files: str, error: str = "TypeError: no") -> str:
    frames = [
        f'  File "{file}", line {n}, in f{n}\n    code{n}()\n    ^^^^^^^' for n, file in enumerate(files)
    ]
    return "\n".join(["Traceback (most recent call last):", *frames, error])


def shown(text: str) -> list[str]:
    """Return the functions, and the folded lines."""
    lines = [line for line in folded(text) if line.startswith("  ") and not line.startswith("    ")]
    return [line.split(" in ")[-1] if "File" in line else line.strip() for line in lines]


def test_libraries_between_the_users_own_frames_are_one_line() -> None:
    text = text_of("/home/me/train.py", LIBRARY, LIBRARY, OURS, LIBRARY, "/home/me/model.py")
    assert shown(text) == ["f0", "... 4 frames of torch, launcher: all are in the log", "f5"]
    assert last_own_line(text) == "/home/me/model.py:5, in f5"
    assert folded(text)[-1] == "TypeError: no"


def test_few_frames_and_the_last_ones_stay() -> None:
    assert shown(text_of("/me/a.py", LIBRARY, "/me/b.py")) == ["f0", "f1", "f2"]
    raised = text_of("/me/a.py", *[OURS] * 6)
    assert shown(raised) == ["f0", "... 4 frames of launcher: all are in the log", "f5", "f6"]
    assert shown(text_of(*[OURS] * 6)) == [f"f{n}" for n in range(6)]  # a recipe: there is no other code
    assert last_own_line(text_of(OURS, LIBRARY)) is None


def test_a_chain_is_folded_link_by_link() -> None:
    between = "\nDuring handling of the above exception, another exception occurred:\n\n"
    one, two = text_of("/me/a.py", *[LIBRARY] * 5, error="KeyError: 1"), text_of("/me/b.py", "/me/c.py")
    lines = folded(f"{one}\n{between}{two}")
    assert "KeyError: 1" in lines and lines[-1] == "TypeError: no"
    assert sum("frames of torch" in line for line in lines) == 1
    assert [line for line in folded(two) if "..." in line] == []


def test_real_frames() -> None:
    class Mine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros(3)

    try:
        nn.Sequential(nn.Sequential(Mine()))(torch.zeros(2, 4))
    except RuntimeError:
        text = traceback.format_exc()
    lines = folded(text)
    assert len(lines) < len(text.splitlines()) and "frames of torch" in "\n".join(lines)
    assert "return x + torch.zeros(3)" in "\n".join(lines)
    assert package_of(traceback.__file__) == "Python" and package_of(__file__) is None
