"""A recipe's run goes on elsewhere with the same global batch, and with the tokenizer that it was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import launcher
from launcher.cli.recipe_flags import training_parser
from launcher.data.tokenizer import byte_tokenizer
from launcher.run import Run
from launcher.train import Training
from tests.engine.driving import CPU
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.pool.reference import batch, tiny_llama

STEPS, SAVED = 4, 2


class Rows:
    def __init__(self) -> None:
        self.ids = batch(0, 64)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[index]


def train(
    ctx: RankContext, directory: Path, json_: dict[str, Any], steps: int, *flags: str, tokenizer: Any = None
) -> tuple[str, list[float], list[int]]:
    """A run to `steps`: what it said of the batch, its losses, and [global batch, accumulation]."""
    path = directory / f"{ctx.rank}.json"
    path.write_text(json.dumps(json_))
    args = training_parser("pretrain", "").parse_args(
        ["--output-dir", str(directory / "out"), "--device", "cpu", "--save-every", str(SAVED), *flags]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCHER_CONFIG", str(path))
        patch.delenv("LAUNCHER_OUTPUT_DIR", raising=False)
        said: list[str] = []
        patch.setattr(Run, "say", lambda self, text: said.append(text))
        run = Run.start(args)
    run.console = Console(quiet=True)
    engine = launcher.initialize(model=tiny_llama(layers=1), config=run.config, device=CPU)[0]
    training = Training(run, engine, Rows(), None, steps, "tiny", tokenizer)
    losses: list[float] = []
    step = training._step
    training._step = lambda parts: losses.append((record := step(parts))["loss"]) or record  # type: ignore[method-assign,func-returns-value]
    training.fit()
    return "\n".join(said), losses, [engine.train_batch_size(), engine.gradient_accumulation_steps()]


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 1},
}
RESUME = ("--resume", "latest")


def first_half(pool: WorkerPool, directory: Path, config: dict[str, Any] = CONFIG, **more: Any) -> None:
    pool.run(train, 2, directory, config, SAVED, **more)


def test_fewer_ranks_keep_the_global_batch(pool: WorkerPool, tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    for path in (whole, half):
        path.mkdir()
    _, want, batches = pool.run(train, 2, whole, CONFIG, STEPS)[0]
    assert batches == [8, 2]
    first_half(pool, half)
    (said, got, batches), *_ = pool.run(train, 1, half, CONFIG, STEPS, *RESUME)
    assert batches == [8, 4]
    assert "8 sequences a step, as in the checkpoint: gradient_accumulation_steps is 4 in place of 2" in said
    assert got == pytest.approx(want[SAVED:], rel=1e-5)


def test_another_batch_is_told_where_it_is_not_kept(
    pool: WorkerPool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    first_half(pool, tmp_path)
    told = "WARNING a step has {} sequences, and had 8 in the checkpoint (1 data-parallel rank now and 2"
    cases: list[tuple[dict[str, Any], tuple[str, ...], int]] = [
        ({}, ("--no-keep-batch",), 4),
        ({"gradient_accumulation_steps": 3}, (), 6),  # the user has changed the JSON
        ({"train_micro_batch_size_per_gpu": 3}, (), 6),  # it does not divide
        ({"train_batch_size": 4}, (), 4),
    ]
    for number, (change, flags, size) in enumerate(cases):
        with subtests.test(str(change)):
            out = tmp_path / str(number)
            out.mkdir()
            resume = ("--resume", str(tmp_path / "out"), *flags)
            said, _, (batch_size, _) = pool.run(train, 1, out, {**CONFIG, **change}, STEPS, *resume)[0]
            assert batch_size == size and told.format(size) in said
    for change, why in (({"train_micro_batch_size_per_gpu": 3}, "no multiple of 3 x 1 ranks"),
                        ({"train_batch_size": 4}, "train_batch_size 4 is written")):  # fmt: skip
        with pytest.raises(RanksFailed, match=why):
            pool.run(train, 1, tmp_path, {**CONFIG, **change}, STEPS, *RESUME, "--keep-batch")


def with_tokenizer(ctx: RankContext, directory: Path, other: bool, *flags: str) -> Any:
    tokenizer = byte_tokenizer()
    if other:
        tokenizer.add_tokens(["<other>"])
    return train(ctx, directory, CONFIG, STEPS if flags else SAVED, *flags, tokenizer=tokenizer)


def test_another_tokenizer_is_refused_unless_it_is_allowed(pool: WorkerPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pool.run(with_tokenizer, 1, tmp_path, False)
    with pytest.raises(RanksFailed, match="trained with another tokenizer"):
        pool.run(with_tokenizer, 1, tmp_path, True, *RESUME)
    assert len(pool.run(with_tokenizer, 1, tmp_path, True, *RESUME, "--allow-model-changes")[0][1]) == 2
    (tmp_path / "out" / "checkpoints" / "latest").write_text("global_step2\n")
    assert len(pool.run(with_tokenizer, 1, tmp_path, False, *RESUME)[0][1]) == 2
