"""What an engine imports, a rank holds in memory."""

import subprocess
import sys

import pytest

HEAVY = ("datasets", "pandas", "pyarrow", "matplotlib", "rich", "deepspeed")


@pytest.mark.full
def test_an_engine_imports_nothing_that_it_does_not_need() -> None:
    program = (
        "import sys, launcher; launcher.initialize\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
