"""Real configurations of other projects: each is taken, or refused with the place of each problem."""

import os
from pathlib import Path

import pytest

from launcher.config import ConfigProblems, load
from launcher.errors import ConfigError

CORPUS = os.environ.get("LAUNCHER_CONFIG_CORPUS")


@pytest.mark.skipif(CORPUS is None, reason="LAUNCHER_CONFIG_CORPUS names no directory of configurations")
def test_corpus() -> None:
    files = sorted(Path(CORPUS or "").glob("*.json"))
    assert files
    for path in files:
        try:
            config = load(path)
        except ConfigProblems as error:
            assert error.problems
            assert all(problem.path and problem.what for problem in error.problems)
            assert str(error).count(f"{path}:") >= len(error.problems)
        except ConfigError as error:
            assert error.where and error.where.startswith(f"{path}:")
        else:
            assert load(config.to_dict()) == config
