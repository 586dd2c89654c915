"""A ZeRO-3 step runs in few files, and docs/architecture.md lists them."""

from __future__ import annotations

import ast
import gc
import os
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import launcher
from launcher.comm.choose import TRANSPORT
from tests.pages.packages import PACKAGE, ROOT
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.zero.models import points, stack

LIMIT = 18
COLLECTIVES = "comm/collectives.py"
"""Below it each transport has files of its own, as NCCL does."""
WARM_UP = 3  # steps: the order of use is recorded, states are made, buffers are taken for the first time
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def files_of_a_step(ctx: RankContext, transport: str) -> set[str]:
    """Return the files of launcher/ in which a function runs during one step of training, after a few others."""
    os.environ[TRANSPORT] = transport
    try:
        engine, *_ = launcher.initialize(model=stack(), config=CONFIG, device=DEVICE)
    finally:
        del os.environ[TRANSPORT]
    ran: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    for step in range(WARM_UP + 1):
        x, y = (part.chunk(ctx.world)[ctx.rank] for part in points(step))
        if step == WARM_UP:
            gc.collect()  # finalizers of engines that were here before are no part of the step
            gc.disable()
            sys.setprofile(note)
        engine.backward(engine(x, y))
        engine.step()
    sys.setprofile(None)
    gc.enable()
    inside = (
        Path(name).relative_to(PACKAGE).as_posix() for name in ran if Path(name).is_relative_to(PACKAGE)
    )
    return {path for path in inside if not path.startswith("comm/") or path == COLLECTIVES}


def listed() -> list[str]:
    """Return the files that the page lists."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("\n## The files of a ZeRO-3 step\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`: ", section, re.MULTILINE)


def test_a_reader_of_a_step_opens_few_files(pool: WorkerPool) -> None:
    ran = set.union(*pool.run(files_of_a_step, 2, "sockets"))
    assert len(ran) <= LIMIT, f"{len(ran)} files: {', '.join(sorted(ran))}"
    assert ran == set(listed()), f"not in the list: {ran - set(listed())}; not run: {set(listed()) - ran}"
    of_memory = set.union(*pool.run(files_of_a_step, 2, ""))
    assert {Path(name).parts[0] for name in of_memory - ran} <= {"comm"}, (
        "another transport, and nothing else"
    )


def test_the_core_knows_no_feature() -> None:
    """The files of a step do not import features, which are added to their lists from outside."""
    core = [path for path in listed() if path.startswith("zero/") and path != "zero/model.py"]
    found = []
    for path in (*core, "zero/layout.py", "zero/pool.py", "zero/policy.py", "zero/axes.py", "zero/slot.py"):
        for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("launcher.zero.features"):
                found.append(f"{path} imports {node.module}")
    assert found == []
