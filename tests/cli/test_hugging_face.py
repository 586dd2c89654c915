"""`import deepspeed` in a script that `launch` starts: what it finds, its cost, and what is refused."""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from launcher.cli.hugging_face import variables
from launcher.errors import ConfigError
from launcher.integrations.surface import DIRECTORY, NAMES, VERSION
from tests.pool import RankContext, WorkerPool

PROBE = """
import json, sys, time
started = time.process_time()
import deepspeed
seconds = time.process_time() - started
import importlib.metadata
errors = []
for statement in ("import deepspeed.autotuning", "from deepspeed import KV", "deepspeed.zero.MiCS_Init"):
    try:
        exec(statement)
    except (ImportError, AttributeError) as error:
        errors.append(str(error))
heavy = [name for name in ("torch", "numpy") if name in sys.modules]
print(json.dumps([seconds, deepspeed.__file__, importlib.metadata.version("deepspeed"), heavy, errors,
                  deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES[0]]))
"""


def test_the_package_is_light_and_says_what_it_lacks() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(DIRECTORY), str(DIRECTORY.parents[2])])}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, file, version, heavy, errors, schedule = json.loads(done.stdout)
    assert seconds < 0.2  # 0.02 s on an idle machine; the imports are what is guarded
    assert heavy == []
    assert Path(file).is_relative_to(DIRECTORY) and version == VERSION
    for name, error in zip(("autotuning", "KV", "zero.MiCS_Init"), errors, strict=True):
        assert f"deepspeed.{name} is not available" in error and "--no_deepspeed_shim" in error
    assert schedule == "LRRangeTest"


IMPORTS = """
import sys
import accelerate
import deepspeed
from deepspeed.utils import logger
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled
deepspeed.comm.is_initialized(), deepspeed.accelerator.get_accelerator()
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("launcher", "pydantic")))
"""


@pytest.mark.full
def test_a_script_that_imports_is_not_kept_waiting() -> None:
    """Importing the engine takes over a second and is only needed for training. Counts modules instead of time."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(DIRECTORY), str(DIRECTORY.parents[2])])}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == [
        "launcher",
        "launcher.errors",
        "launcher.integrations",
        "launcher.integrations.accelerator",
        "launcher.integrations.constants",
        "launcher.integrations.only_called",
        "launcher.integrations.processes",
        "launcher.integrations.refused",
        "launcher.integrations.served",
        "launcher.integrations.surface",
        "launcher.integrations.whole_modules",
        "launcher.monitor",
        "launcher.monitor.memory",
    ]


def missing_names(ctx: RankContext) -> list[str]:
    """Return the names of the table that are missing, in a separate process."""
    sys.path.insert(0, str(DIRECTORY))
    missing = []
    for module, below in NAMES.items():
        found = importlib.import_module(".".join(filter(None, ["deepspeed", module])))
        missing += [f"{module}.{name}" for name in below if not hasattr(found, name)]
    torch.distributed.destroy_process_group()  # nothing else is to run where this was imported
    return missing


def test_every_name_is_somewhere(pool: WorkerPool) -> None:
    """The modules of the names exist, and the metadata has the version that the table refers to."""
    assert pool.run(missing_names, 1) == [[]]
    (found,) = importlib.metadata.distributions(path=[str(DIRECTORY)])
    assert found.version == VERSION


def test_accelerate_gets_the_json_without_comments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "auto"} // for Hugging Face')
    found = variables(str(path))
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(DIRECTORY)
    assert found["ACCELERATE_USE_DEEPSPEED"] == "true"
    told = json.loads(base64.urlsafe_b64decode(found["ACCELERATE_DEEPSPEED_CONFIG_FILE"]))
    assert told == {"train_batch_size": "auto", "zero_optimization": {"stage": 0}}
    assert "ACCELERATE_USE_DEEPSPEED" not in variables(None)


def test_what_makes_accelerate_pass_the_engine_by_is_refused() -> None:
    with patch.dict(os.environ, ACCELERATE_USE_CPU="true"), pytest.raises(ConfigError, match="without ZeRO"):
        variables(None)
