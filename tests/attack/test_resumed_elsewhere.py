"""A recipe resumes on another topology with the same global batch, and with the tokenizer it was trained with."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import launcher
from launcher.checkpoint.deepspeed.write import write_ranks
from launcher.checkpoint.source import SourceCheckpoint
from launcher.checkpoint.store import load_meta
from launcher.cli.recipe_flags import training_parser
from launcher.data.identity import Identity
from launcher.data.tokenizer import byte_tokenizer
from launcher.run import Run
from launcher.train import Training
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.pool.device import DEVICE
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
    """Run to `steps`; return the messages about the batch, the losses, and [global batch, accumulation]."""
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
    run.say = said.append  # type: ignore[method-assign]
    engine = launcher.initialize(model=tiny_llama(layers=1), config=run.config, device=DEVICE)[0]
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
    assert "8 sequences per step, as in the checkpoint: gradient_accumulation_steps is 4 instead of 2" in said
    assert got == pytest.approx(want[SAVED:], rel=1e-5)


def test_a_run_of_deepspeeds_goes_on_in_a_recipe(pool: WorkerPool, tmp_path: Path) -> None:
    """DeepSpeed's checkpoint stores the number of sequences and the batch under different keys."""
    whole, half = tmp_path / "whole", tmp_path / "half"
    for path in (whole, half):
        path.mkdir()
    _, want, _ = pool.run(train, 2, whole, CONFIG, STEPS)[0]
    first_half(pool, half)
    write_ranks(SourceCheckpoint.open(half / "out" / "checkpoints"), tmp_path / "theirs", 2, 2)
    (file,) = (tmp_path / "theirs").rglob("*model_states.pt")
    content = torch.load(file, weights_only=False)
    for key in ("data", "data_of", "tokens", "total_steps", "tokenizer", "batch_keys"):
        del content[key]
    content["ds_config"] = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}
    torch.save(content, file)
    for number, source in enumerate((tmp_path / "theirs", file.parent)):
        out = tmp_path / str(number)
        out.mkdir()
        (said, got, batches), *_ = pool.run(train, 1, out, CONFIG, STEPS, "--resume", str(source))
        assert batches == [8, 4] and got == pytest.approx(want[SAVED:], rel=1e-5)
        assert "8 sequences per step, as in the checkpoint" in said
        assert "does not record its training data: continuing at sequence 16 of epoch 0" in said


def test_another_batch_is_told_where_it_is_not_kept(
    pool: WorkerPool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    first_half(pool, tmp_path)
    told = (
        "WARNING the global batch is {} sequences, but was 8 in the checkpoint (1 data-parallel rank now, 2"
    )
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
    for change, why in (({"train_micro_batch_size_per_gpu": 3}, "not a multiple of 3 x 1 ranks"),
                        ({"train_batch_size": 4}, "the config sets train_batch_size to 4")):  # fmt: skip
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


class Known(Rows):
    """Data with a fingerprint."""

    digest, seq_length = "a", 16

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        vars(self).update(changes)


def test_what_has_changed_of_the_data_is_told(subtests: pytest.Subtests) -> None:
    data, place = Known(), {"epoch": 1, "samples": 40}
    was = Identity.of(data, 0).write()
    assert Identity.of(Known(), 0).changes(was, place) == []
    assert not Identity.of(data, 0).is_other(None) and Identity.of(Known(digest="b"), 0).is_other(was)
    cases: list[tuple[Known, int, Any, list[str]]] = [
        (
            Known(digest="b"),
            1,
            was,
            ["--dataset differs from that of the checkpoint", "starting from its beginning"],
        ),
        (Known(seq_length=8), 0, was, ["--seq-length is 8 and was 16", "sequence 40 of epoch 1"]),
        (Known(ids=data.ids[:50]), 0, was, ["the data set has 50 sequences and had 64"]),
        (data, 7, was, ["--seed is 7 and was 0", "read twice"]),
        (Known(separator=0), 0, was, ["trained without --document-mask", "continues with it"]),
        (data, 0, None, ["does not record its training data"]),
    ]
    for dataset, seed, noted, told in cases:
        with subtests.test(told[0]):
            (line,) = Identity.of(dataset, seed).changes(noted, place)
            assert all(part in line for part in told) and "\n" not in line


def on_other_data(ctx: RankContext, directory: Path, digest: str, *flags: str) -> tuple[str, dict[str, Any]]:
    """Return the messages of a run of one more step, and its final position in the data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.Rows", lambda: Known(digest=digest))
        patch.setattr(logging.getLogger("launcher"), "warning", lambda text, *more: said.append(text % more))
        said: list[str] = []
        steps = STEPS if flags else SAVED
        text, _, _ = train(ctx, directory, CONFIG, steps, *flags)
    meta = load_meta(directory / "out" / "checkpoints")[1]
    return "\n".join([text, *said]), meta["client_state"]["data"]


def test_another_data_set_is_read_from_its_beginning(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(on_other_data, 1, tmp_path, "a")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    resume = ("--resume", str(tmp_path / "out"))
    said, place = pool.run(on_other_data, 1, elsewhere, "b", *resume, "--learning-rate", "0.01")[0]
    assert "WARNING --dataset differs from that of" in said and place["samples"] == (STEPS - SAVED) * 4
    said, place = pool.run(on_other_data, 1, elsewhere, "a", *resume, "--seed", "7", "--overwrite")[0]
    assert "WARNING --seed is 7" in said and place["samples"] == STEPS * 4


def rates(ctx: RankContext, directory: Path, scheduler: dict[str, Any] | None, lr: float | None) -> list[str]:
    """Save (without `lr`), or load with another learning rate; return the messages."""
    said: list[str] = []
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": lr or 0.01}}}
    engine = launcher.initialize(
        model=tiny_llama(layers=1),
        config=config | ({"scheduler": scheduler} if scheduler else {}),
        device=DEVICE,
    )[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("launcher"), "warning", lambda text, *more: said.append(text % more))
        if lr is None:
            engine.save_checkpoint(directory)
        else:
            engine.load_checkpoint(directory)
    return said


def test_a_learning_rate_of_the_json_that_does_not_count_is_told(
    pool: WorkerPool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}}
    step = {"type": "StepLR", "params": {"step_size": 2}}
    cases = [(None, "using the checkpoint's value, 0.01"), (cosine, "continues with the current values of the JSON"),
             (step, "using the value of the checkpoint's schedule")]  # fmt: skip
    for number, (scheduler, told) in enumerate(cases):
        with subtests.test(told):
            directory = tmp_path / str(number)
            pool.run(rates, 1, directory, scheduler, None)
            assert pool.run(rates, 1, directory, scheduler, 0.01)[0] == []
            (line,) = pool.run(rates, 1, directory, scheduler, 0.5)[0]
            assert "optimizer.params.lr was 0.01 in the checkpoint and is now 0.5" in line and told in line
    (line,) = pool.run(rates, 1, tmp_path / "0", cosine, 0.01)[0]
    assert "starts at its first step" in line
    (line,) = pool.run(rates, 1, tmp_path / "1", None, 0.01)[0]
    assert "had a schedule, but this run has none" in line
    for saved, other, name in (("1", step, "StepLR"), ("2", cosine, "WarmupCosineLR")):
        with pytest.raises(RanksFailed, match=f"scheduler state of the checkpoint does not belong to {name}"):
            pool.run(rates, 1, tmp_path / saved, other, 0.01)


def options(ctx: RankContext, directory: Path, save: bool) -> list[str]:
    """Save, or load with another weight decay and the groups in another order; return the messages."""
    said: list[str] = []
    model = tiny_llama(layers=1)
    parts = [[p for p in model.parameters() if (p.dim() > 1) is matrices] for matrices in (True, False)]
    decays = (0.1, 0.0) if save else (0.5, 0.0)
    groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, decays, strict=True)]
    optimizer = torch.optim.AdamW(groups if save else groups[::-1], lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    engine = launcher.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, device=DEVICE
    )[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("launcher"), "warning", lambda text, *more: said.append(text % more))
        if save:
            engine.save_checkpoint(directory)
        else:
            engine.load_checkpoint(directory)
            assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.0, 0.1]
    return said


def test_options_that_the_checkpoint_changes_are_told(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(options, 1, tmp_path, True)
    changed, order = pool.run(options, 1, tmp_path, False)[0]
    assert "options of the checkpoint: weight_decay 0.1 instead of 0.5." in changed
    assert "the param groups differ from those in the checkpoint" in order
