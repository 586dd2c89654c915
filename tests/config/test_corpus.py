"""Real configurations of other projects: each is accepted, converted or refused, as determined by hand.

`corpus.tsv` lists, by file name, the verdict and the keys that were converted or refused. The files belong to other
projects; LAUNCHER_CONFIG_CORPUS is their directory.
"""

import csv
import os
from pathlib import Path

import pytest

from launcher.config import load
from launcher.config.problems import dotted
from launcher.config.root import inspect

CORPUS = os.environ.get("LAUNCHER_CONFIG_CORPUS")
with (Path(__file__).parent / "corpus.tsv").open() as table:
    EXPECTED = {row["file"]: row for row in csv.DictReader(table, delimiter="\t")}

pytestmark = pytest.mark.skipif(
    CORPUS is None, reason="LAUNCHER_CONFIG_CORPUS names no directory of configurations"
)


def test_verdicts(subtests: pytest.Subtests) -> None:
    for name in EXPECTED:
        with subtests.test(name):
            check_verdict(name)


def check_verdict(name: str) -> None:
    examined = inspect(Path(CORPUS or "") / name)
    converted = {dotted(note.path) for note in examined.notes if note.kind == "converted"}
    refused = {dotted(examined.document.written(problem.path)) for problem in examined.problems}
    verdict = "refused" if refused else "converted" if converted else "accepted"
    assert verdict == EXPECTED[name]["verdict"]
    assert ",".join(sorted(refused or converted)) == EXPECTED[name]["keys"]
    assert all(problem.path and problem.what for problem in examined.problems)


def test_what_is_taken_means_the_same_when_written_out(subtests: pytest.Subtests) -> None:
    for name, row in EXPECTED.items():
        if row["verdict"] != "refused":
            with subtests.test(name):
                config = load(Path(CORPUS or "") / name)
                assert load(config.to_dict()) == config


def test_every_file_of_the_corpus_has_a_verdict() -> None:
    assert {path.name for path in Path(CORPUS or "").glob("*.json")} == set(EXPECTED)
