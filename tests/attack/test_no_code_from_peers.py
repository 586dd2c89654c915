"""Data from a connection or a file is never unpickled without restrictions, so it cannot run code."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from launcher.checkpoint import fp32
from launcher.checkpoint.store import load, save
from launcher.comm import plain
from launcher.errors import CheckpointError, LauncherError
from launcher.pipeline.crossing import TensorShape
from launcher.pipeline.hf.route import StageInputs
from launcher.pipeline.plain import packed, unpacked
from launcher.pipeline.sequential.staged import BoundaryValues
from tests.checkpoint.forging import agree
from tests.pool import RankContext, WorkerPool

PACKAGE = Path(__file__).resolve().parents[2] / "launcher"
FREE = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "recv_object_list",
    "send_object_list",
}  # fmt: skip


def free_unpickling(path: Path) -> list[str]:
    """Return calls and names in a file that unpickle arbitrary objects."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if name.rpartition(".")[2] in FREE or name in ("pickle.load", "pickle.loads", "pickle.Unpickler"):
            found.append(f"{path.name}:{node.lineno} {name}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = [k for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
            found += [] if safe else [f"{path.name}:{node.lineno} torch.load"]
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            found.append(f"{path.name} allow_pickle")
    return found


def test_the_package_unpickles_nothing_freely() -> None:
    # What scripts call themselves, as in torch.distributed:
    handed_on = PACKAGE / "integrations" / "collectives.py"
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path != handed_on]
    found = [line for path in files for line in free_unpickling(path)]
    assert len(found) == 1 and found[0].startswith("reader.py:") and "pickle.Unpickler" in found[0], found


class Pair(NamedTuple):
    first: Any
    second: Any


class Malice:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_checkpoint_that_would_run_code(tmp_path: Path, subtests: pytest.Subtests) -> None:
    proof = tmp_path / "code-was-run"
    bad_tensor = io.BytesIO()
    torch.save(Malice(proof), bad_tensor)
    for name, content in (
        (".metadata", pickle.dumps(Malice(proof))),
        ("__0_0.distcp", bad_tensor.getvalue()),
    ):
        with subtests.test(name):
            save(tmp_path, "a", {"model/w": torch.ones(300)}, {"step": 1})
            file = tmp_path / "a" / name
            size = file.stat().st_size
            file.write_bytes(content.ljust(size, b"\0") if name == ".metadata" else content)
            agree(tmp_path / "a", name)
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                load(tmp_path, "a", {"model/w": torch.zeros(300)})
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert not proof.exists()


def content_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def test_a_letter_that_would_run_code(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Covers metadata sent between stages, and the header of a batch."""
    proof = tmp_path / "code-was-run"
    file = io.BytesIO()
    torch.save(Malice(proof), file)
    letters = [
        pickle.dumps(Malice(proof)),
        file.getvalue(),
        json.dumps(["named", "posix", "mkdir", str(proof)]).encode(),
        json.dumps(["named", "pathlib", "Path", str(proof)]).encode(),
        json.dumps(["output", "subprocess", "Popen", [["args", "false"]]]).encode(),
        json.dumps(["record", "Popen", 1]).encode(),
        json.dumps(["dtype", "ops"]).encode(),
        json.dumps(["eval", "1"]).encode(),
    ]
    for letter in letters:
        with subtests.test(letter[:20]):
            with pytest.raises((ValueError, KeyError)):
                unpacked(content_of(letter))
            assert not proof.exists()


def test_what_stages_tell_each_other_comes_back() -> None:
    shape = TensorShape(torch.Size([2, 3]), torch.bfloat16)
    learned = StageInputs(
        {"Block": BaseModelOutput(last_hidden_state=shape)}, {"rotary": (shape, None, [1, 2.5, "x"])},
        [[(0, (1, "mask")), (3, (0, 0))]], {(1, "past", 0): 0.5}, (True, 2), shapes=(shape,),
    )  # fmt: skip
    nest = BoundaryValues(structure=OrderedDict(a=(shape, True), b={1: None}), shapes=(shape, shape))
    for value in (learned, nest, Pair(shape, 1e-3), [float("inf")]):
        found = unpacked(packed(value))
        assert found == value and type(found) is type(value)
    with pytest.raises(LauncherError, match="PosixPath cannot be sent between pipeline stages"):
        packed({"ids": Path("x")})


def gather(ctx: RankContext) -> tuple[list[Any], Any]:
    mine = {"rank": ctx.rank, (1, "a"): [None, 1.5, "ü" * 1000 * ctx.rank], "inf": float("inf")}
    return plain.gather_plain(mine), plain.broadcast_from_first(("first", ctx.rank))


def test_plain_values_reach_all_ranks(pool: WorkerPool) -> None:
    answers = pool.run(gather, 2)
    for every, told in answers:
        assert told == ("first", 0) and [each["rank"] for each in every] == [0, 1]
        assert every[1][1, "a"] == [None, 1.5, "ü" * 1000] and every[0]["inf"] == float("inf")
