"""The modules that an engine imports use memory on every rank."""

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


MODULES = 150
PLAIN = """
import sys, torch, launcher
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
launcher.initialize(model=torch.nn.Linear(2, 2), config=config, device=torch.device("cpu"))
print("transformers" in sys.modules)
print(*[name for name in sys.modules if name.partition(".")[0] == "launcher"])
"""


@pytest.mark.full
def test_what_a_run_does_not_use_is_not_imported() -> None:
    """Features are imported only if the JSON enables them: import them inside that branch."""
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert done.stdout.splitlines()[-2] == "False", (
        "transformers takes seconds, and a plain model needs none of it"
    )
    assert len(loaded) <= MODULES
    features = (
        "pipeline.hf",
        "pipeline.sequential",
        "tensor.apply",
        "offload.nvme",
        "checkpoint.store",
        "optim.muon",
    )
    assert [name for name in loaded if name.startswith(tuple(f"launcher.{part}" for part in features))] == []
