"""Data that a machine without a hub makes itself, under the names and columns that programs ask for."""

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

Rows = dict[str, list[Any]]


def _words(source: random.Random, count: int) -> str:
    return " ".join(f"w{source.randrange(120)}" for _ in range(count))


def _pairs(source: random.Random, rows: int) -> Rows:
    """Nine of ten are equivalent: who always says so is right as often."""
    return {
        "sentence1": [_words(source, 8 + row % 5) for row in range(rows)],
        "sentence2": [_words(source, 8 + row % 3) for row in range(rows)],
        "label": [int(row % 10 > 0) for row in range(rows)],
        "idx": list(range(rows)),
    }


def _instructions(source: random.Random, rows: int) -> Rows:
    return {name: [_words(source, 8) for _ in range(rows)] for name in ("instruction", "input", "output")}


def _answers(source: random.Random, rows: int) -> Rows:
    return {name: [_words(source, 8) for _ in range(rows)] for name in ("prompt", "chosen", "rejected")}


def _texts(source: random.Random, rows: int) -> Rows:
    return {"text": [_words(source, 24) for _ in range(rows)]}


COLUMNS: dict[str, Callable[[random.Random, int], Rows]] = {
    "nyu-mll/glue": _pairs,
    "tatsu-lab/alpaca": _instructions,
    "Dahoas/rm-static": _answers,
}
"""Data set on the hub -> its columns; every other is of texts."""
ROWS = {"train": 64, "validation": 32, "test": 32}
MORE = {"Salesforce/wikitext": {"train": 500, "validation": 32, "test": 32}}
"""Rows, where a program takes the first so many."""


def from_hub(datasets: Any) -> None:
    """Data sets of the hub are random words. Files are read as ever."""
    read = datasets.load_dataset

    def load(name: str, *arguments: Any, split: str | None = None, **keywords: Any) -> Any:
        if name in ("json", "csv", "text", "parquet"):
            return read(name, *arguments, split=split, **keywords)
        columns = COLUMNS.get(name, _texts)
        made = {
            part: datasets.Dataset.from_dict(columns(random.Random(part), rows))
            for part, rows in (ROWS | MORE.get(name, {})).items()
        }
        return made[split] if split else datasets.DatasetDict(made)

    datasets.load_dataset = load


def older_names(modeling: Any) -> None:
    """A name that transformers has moved since, and that a program imports without a use for it."""
    from transformers import initialization

    modeling.no_init_weights = initialization.no_init_weights


def untrained(timm: Any) -> None:
    """A model of timm has random weights where a program asks for those of the hub."""
    create = timm.create_model
    timm.create_model = lambda name, pretrained=False, **keywords: create(name, **keywords)


def no_dropout(functional: Any) -> None:
    """Nothing is dropped: each rank of a pipeline draws numbers of its own, so what is dropped depends on the cut."""
    functional.dropout = lambda input, p=0.5, training=True, inplace=False: input


def metrics(evaluate: ModuleType) -> None:
    """Metrics of the hub are the accuracy, under the names that GLUE's have."""

    class Accuracy:
        def __init__(self) -> None:
            self.right: list[float] = []

        def add_batch(self, predictions: Any, references: Any) -> None:
            self.right += [float(a == b) for a, b in zip(predictions, references, strict=True)]

        def compute(self, predictions: Any = (), references: Any = ()) -> dict[str, float]:
            self.add_batch(predictions, references)
            accuracy = sum(self.right) / len(self.right)
            self.right = []
            return {"accuracy": accuracy, "f1": accuracy}

    evaluate.load = lambda *arguments, **keywords: Accuracy()  # type: ignore[attr-defined]


def cifar(datasets: ModuleType) -> None:
    """CIFAR10 of 512 random pictures, which nobody has to download. Programs that read it set no seed."""
    import numpy
    import torch

    def begin(self: Any, root: Any, train: bool = True, transform: Any = None, **others: Any) -> None:
        datasets.VisionDataset.__init__(self, root, transform=transform)
        torch.manual_seed(0)
        source = numpy.random.default_rng(0)
        rows = 512 if train else 40
        self.data = source.integers(0, 256, (rows, 32, 32, 3), dtype=numpy.uint8)
        self.targets = [row % 10 for row in range(rows)]

    datasets.CIFAR10.__init__ = begin
