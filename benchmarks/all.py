"""Run the benchmarks for docs/speed.md and for the README's speed table, and generate both: about two hours.

python -m benchmarks.all
python -m benchmarks.all --only tensor-small --repeat 5

Old records of a suite are replaced; they remain in the git history.
"""

from __future__ import annotations

import argparse

from benchmarks import offload, pipeline, speed_page, tensor, zero
from benchmarks.report import wrong_losses
from benchmarks.suite import results_file, run_suite

SUITES = {suite.name: suite for suite in (zero.SUITE, tensor.SUITE, pipeline.SUITE, offload.SUITE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="turns over all rows")
    parser.add_argument(
        "--only", action="append", choices=speed_page.SECTIONS, help="a section to run; may be repeated"
    )
    args = parser.parse_args()
    wrong = []
    for section in args.only or speed_page.SECTIONS:
        name, _, model = section.partition("-")
        old, out = speed_page.records(section), results_file(SUITES[name], model)
        run_suite(SUITES[name], model, args.repeat, out)
        wrong += wrong_losses(out)
        for file in old:
            if file != out:
                file.unlink()
    speed_page.write()
    if wrong:
        parser.exit(1, f"other losses than plain PyTorch's: {', '.join(wrong)}\n")


if __name__ == "__main__":
    main()
