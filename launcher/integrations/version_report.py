"""`deepspeed.git_version_info` and `deepspeed.env_report`: version information."""

from __future__ import annotations

import platform

import torch

from launcher import __version__ as OURS
from launcher.integrations.builders import COMPATIBLE_OPS
from launcher.integrations.served import VERSION
from launcher.integrations.utilities import TORCH_INFO

version = VERSION
git_hash = git_branch = "launcher"
installed_ops = dict(COMPATIBLE_OPS)
compatible_ops = dict(COMPATIBLE_OPS)
accelerator_name = "cuda" if torch.cuda.is_available() else "cpu"
torch_info = TORCH_INFO


def debug_report() -> None:
    """Print the versions."""
    rows = {
        "deepspeed": f"{VERSION} API, provided by launcher {OURS}",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "device": accelerator_name,
        "Python": platform.python_version(),
    }
    for name, value in rows.items():
        print(f"{name:.<12} {value}")


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report, without a table of operators because nothing has to be built."""
    debug_report()


cli_main = main
