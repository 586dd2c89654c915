"""The same `optimizer` section and gradients give the same weights after ten steps in DeepSpeed's optimizers and ours.

DeepSpeed's Lamb requires CUDA; its formula is in tests/optim/references.py instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from launcher import initialize
from tests.parity_deepspeed.conftest import run_deepspeed
from tests.parity_deepspeed.fields import REST, Fields, follow
from tests.pool import RankContext, WorkerPool

ADAM = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}


def section(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


BY_ENGINE: dict[str, dict[str, Any]] = {
    "adamw": section("AdamW", **ADAM),
    "adam is adamw": section("Adam", **ADAM),
    "adam with L2": section("Adam", **ADAM, adam_w_mode=False),
    "adamw, uncorrected": section("AdamW", **ADAM, bias_correction=False),
    "adam with L2, uncorrected": section("Adam", **ADAM, adam_w_mode=False, bias_correction=False),
    "adam's defaults": section("Adam"),
    "torch's adamw": section("AdamW", torch_adam=True),
    "adagrad": section("Adagrad", lr=0.05, weight_decay=0.1),
    "rmsprop": section("RMSprop", lr=0.01, momentum=0.5),
    "muon": section("Muon", lr=0.02),
    "muon, standard": section(
        "Muon", muon_lr=0.05, adam_lr=0.01, momentum=0.8, weight_decay=0.1, ns_method="standard"
    ),
    "muon's defaults": section("Muon", torch_adam=True),
}
BY_CLASS: dict[str, dict[str, Any]] = {
    "lion": {**section("Lion", lr=0.003, betas=[0.9, 0.99], weight_decay=0.1), "class": "DeepSpeedCPULion"},
    "lion's defaults": {**section("Lion"), "class": "DeepSpeedCPULion"},
    "adagrad on the CPU": {
        **section("Adagrad", lr=0.05, eps=1e-10, weight_decay=0.1),
        "class": "DeepSpeedCPUAdagrad",
    },
}  # fmt: skip


def ours(ctx: RankContext, cases: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    cpu = torch.device("cpu")
    sections = [{"optimizer": case["optimizer"], **REST} for case in cases]
    return [follow(initialize(model=Fields(), config=one, device=cpu)[0]) for one in sections]


def assert_same(pool: WorkerPool, cases: dict[str, dict[str, Any]], directory: Path) -> None:
    """Assert that weights agree to 1e-5, and that each has moved much further."""
    theirs = run_deepspeed("optimizers", list(cases.values()), 1, directory)
    start = {name: p.detach().flatten() for name, p in Fields().named_parameters()}
    for case, want, got in zip(cases, theirs, pool.run(ours, 1, list(cases.values()))[0], strict=True):
        for name, values in want.items():
            wanted = torch.tensor(values)
            torch.testing.assert_close(
                torch.tensor(got[name]),
                wanted,
                rtol=1e-5,
                atol=2e-6,
                msg=lambda m, c=case, n=name: f"{c}, {n}: {m}",
            )
            assert (wanted - start[name]).abs().mean() > 3e-4


def test_by_the_json(pool: WorkerPool, tmp_path: Path) -> None:
    assert_same(pool, BY_ENGINE, tmp_path)


def test_by_the_class(pool: WorkerPool, tmp_path: Path) -> None:
    assert_same(pool, BY_CLASS, tmp_path)
