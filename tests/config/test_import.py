import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "numpy", "transformers", "datasets", "accelerate", "deepspeed")


def test_a_config_error_needs_no_heavy_import(tmp_path: Path) -> None:
    config = tmp_path / "typo.json"
    config.write_text('{"gradient_cliping": 1.0}')
    program = (
        "import sys, launcher.config\n"
        "try: launcher.config.load(sys.argv[1])\n"
        "except ValueError as error: print(error)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "did you mean `gradient_clipping`?" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
