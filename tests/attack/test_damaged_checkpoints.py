"""Any damage to a checkpoint is reported with the file name, before the run's state is changed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import CheckpointError
from tests.engine.driving import advance, config_of, engine_of, log_lines, whole_state
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

Damage = Callable[[random.Random, Path, list[Path]], None]


def flip_a_bit(dice: random.Random, file: Path, _: list[Path]) -> None:
    content = bytearray(file.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


def cut(dice: random.Random, file: Path, _: list[Path]) -> None:
    file.write_bytes(file.read_bytes()[: -dice.randint(1, file.stat().st_size)])


def zero_a_block(dice: random.Random, file: Path, _: list[Path]) -> None:
    content = bytearray(file.read_bytes())
    while True:
        start = dice.randrange(len(content))
        stop = min(len(content), start + dice.choice([1, 16, 512, 4096]))
        if any(content[start:stop]):
            break
    content[start:stop] = bytes(stop - start)
    file.write_bytes(content)


def delete(_: random.Random, file: Path, __: list[Path]) -> None:
    file.unlink()


def swap(dice: random.Random, file: Path, files: list[Path]) -> None:
    other = dice.choice([each for each in files if each.read_bytes() != file.read_bytes()])
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def append(dice: random.Random, file: Path, _: list[Path]) -> None:
    with file.open("ab") as stream:
        stream.write(dice.randbytes(dice.choice([1, 7, 512])))


DAMAGES: list[Damage] = [flip_a_bit, flip_a_bit, flip_a_bit, cut, zero_a_block, delete, swap, append]


def save(ctx: RankContext, directory: Path) -> None:
    engine = engine_of(config_of(3, bf16={"enabled": True}))
    for tag in ("global_step1", "global_step10", "global_step11"):
        advance(engine, ctx, range(2))
        engine.save_checkpoint(directory, tag, client_state={"note": tag})
    advance(engine, ctx, range(1))
    engine.save_checkpoint(directory, "aside", save_latest=False)


def damage(directory: Path, seed: int) -> tuple[str, set[str]]:
    """Damage one file of the latest checkpoint.

    Return the kind of damage, and the file names that an error may name.
    """
    dice = random.Random(seed)
    tag = directory / "global_step11"
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    of_latest = [path for path in files if path.parent == tag] + [directory / "latest"]
    act, file = dice.choice(DAMAGES), dice.choice(of_latest)
    before = {path: path.read_bytes() for path in files}
    act(dice, file, files)
    changed = {path for path in files if not path.is_file() or path.read_bytes() != before[path]}
    return f"{act.__name__}({file.relative_to(directory)}), seed {seed}", {str(path) for path in changed}


def still_the_latest(directory: Path) -> bool:
    """A line without its newline names the same tag."""
    file = directory / "latest"
    return file.is_file() and file.read_bytes().strip() == b"global_step11"


def attack(ctx: RankContext, directory: Path, work: Path, seeds: range) -> list[str]:
    """Return the damages that were not reported, were reported without the file, or changed the engine."""
    engine = engine_of(config_of(0, bf16={"enabled": True}), stack(seed=1))
    advance(engine, ctx, range(1))
    fresh, wrong = whole_state(engine), []
    for seed in seeds:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(directory, work)
        what, changed = damage(work, seed)
        told, refused = "", True
        with log_lines() as lines:
            try:
                engine.load_checkpoint(work)
                refused = False
            except CheckpointError as error:
                told = str(error)
        told += "".join(lines)
        if not any(file in told for file in changed):
            only_latest = changed == {str(work / "latest")}
            if not (only_latest and still_the_latest(work)):
                wrong.append(f"{what}: {told or 'silence'}")
        if refused and not same(fresh, whole_state(engine)):
            wrong.append(f"{what}: the engine was changed")
        if not refused:  # told, and loaded all the same: begin anew
            engine = engine_of(config_of(0, bf16={"enabled": True}), stack(seed=1))
            advance(engine, ctx, range(1))
            fresh = whole_state(engine)
    return wrong


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("saved") / "checkpoints"
    pool.run(save, 2, directory)
    return directory


def test_no_damage_is_silent(pool: WorkerPool, saved: Path, tmp_path: Path) -> None:
    assert pool.run(attack, 1, saved, tmp_path / "work", range(40))[0] == []


@pytest.mark.full
def test_no_damage_of_a_thousand_is_silent(pool: WorkerPool, saved: Path, tmp_path: Path) -> None:
    for start in range(0, 1000, 100):
        assert pool.run(attack, 1, saved, tmp_path / "work", range(start, start + 100))[0] == []


def told_by(
    ctx: RankContext, directory: Path, latest: bytes | None, tag: str | None, meta: str | None
) -> tuple[str, bool]:
    """Return the message of a load. If `latest` is None, it is a pipe."""
    if latest is None:
        (directory / "latest").unlink()
        os.mkfifo(directory / "latest")
    elif latest:
        (directory / "latest").write_bytes(latest)
    if meta is not None:
        (directory / "global_step11" / "meta.json").write_text(meta)
    engine = engine_of(config_of(0, bf16={"enabled": True}), stack(seed=1))
    try:
        engine.load_checkpoint(directory, tag)
    except CheckpointError as error:
        return str(error), len(str(error)) < 1000
    return "loaded", True


FORGED = {"format": 1, "files": {}, "meta": {"global_steps": "3", "micro_steps": 3}}


def test_what_stands_in_for_a_file_is_told(
    pool: WorkerPool, saved: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    cases: list[tuple[str, bytes | None, str | None, list[str]]] = [
        ("a pipe", None, None, ["/latest does not name a checkpoint", "is a pipe"]),
        ("50 MB", b"x" * 50_000_000, None, ["/latest does not name a checkpoint", "47 MiB"]),
        ("a long name", b"x" * 4000, None, ["/latest does not name a checkpoint", "xxx..."]),
        ("forged", b"", json.dumps(FORGED), [
            "global_step11/meta.json is not valid checkpoint metadata", "global_steps is of type str",
            "optimizer is missing",
        ]),
    ]  # fmt: skip
    for number, (name, latest, meta, told) in enumerate(cases):
        with subtests.test(name):
            work = tmp_path / str(number)
            shutil.copytree(saved, work)
            said, is_short = pool.run(told_by, 1, work, latest, None, meta)[0]
            assert all(part in said for part in told) and is_short, said


def test_a_renamed_checkpoint_is_refused_by_both_names(pool: WorkerPool, saved: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(saved, work)
    shutil.rmtree(work / "global_step11")
    (work / "global_step1").rename(work / "global_step11")
    for tag in ("global_step11", None):
        said, _ = pool.run(told_by, 1, work, b"", tag, None)[0]
        assert f"{work}/global_step11/meta.json belongs to the checkpoint 'global_step1'" in said
        assert "is named 'global_step11'" in said and "rename it to global_step1" in said
    (work / "global_step11").rename(work / "global_step1")
    assert pool.run(told_by, 1, work, b"", "global_step1", None)[0] == ("loaded", True)
