"""The JSON's `checkpoint` section: tags, directories, synchronous and background saves."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launcher.checkpoint import tags
from launcher.checkpoint.snapshot import Snapshot
from launcher.config import ConfigProblems, load
from launcher.errors import CheckpointError, TagsDiffer
from tests.engine.driving import advance, config_of, engine_of, whole_state
from tests.engine.test_killed_save import at_call, die, full
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.zero.models import stack

BEFORE, AFTER = range(2), range(2, 4)


def saving(stage: int = 3, **section: Any) -> Any:
    return engine_of(config_of(stage, checkpoint=section), stack())


# ---- tags ---------------------------------------------------------------------------------------


def disagree(ctx: RankContext, directory: Path, validation: str | None) -> tuple[str, list[str]]:
    engine = saving(**({} if validation is None else {"tag_validation": validation}))
    said = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            engine.save_checkpoint(directory, f"of_rank{ctx.rank}")
        except TagsDiffer as error:
            assert isinstance(error, AssertionError)  # what scripts for DeepSpeed catch
            said = f"error: {error}"
    said += "".join(f"warning: {w.message}" for w in caught if "disagree" in str(w.message))
    return said, sorted(entry.name for entry in directory.iterdir()) if directory.exists() else []


@pytest.mark.key("checkpoint", "checkpoint.tag_validation")
@pytest.mark.parametrize(("validation", "said"), [
    ("Ignore", ""), (None, "warning: The ranks disagree about the tag"), ("WARN", "warning: The ranks disagree"),
    ("fail", "error: The ranks disagree about the tag: ['of_rank0', 'of_rank1']"),
])  # fmt: skip
def test_ranks_with_different_tags(
    pool: WorkerPool, tmp_path: Path, validation: str | None, said: str
) -> None:
    directory = tmp_path / "checkpoints"
    (first, names), (other, _) = pool.run(disagree, 2, directory, validation)
    assert first.startswith(said) and bool(first) == bool(said)
    if said.startswith("error"):
        assert other.startswith(said) and names == []
    else:
        assert other == "" and names == ["latest", "of_rank0"]


def made_up(ctx: RankContext, directory: Path) -> tuple[list[str], list[str]]:
    engine, heard = saving(), Heard()
    logging.getLogger("launcher").addHandler(heard)
    engine.save_checkpoint(directory / f"run-{ctx.rank}")
    logging.getLogger("launcher").removeHandler(heard)
    assert engine.load_checkpoint(directory / "run-0")[0] is not None
    return heard.said, sorted(entry.name for entry in directory.iterdir())


class Heard(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_ranks_with_different_directories_write_to_that_of_rank_0(pool: WorkerPool, tmp_path: Path) -> None:
    (said, names), (other, _) = pool.run(made_up, 2, tmp_path)
    assert names == ["run-0"] and not other
    assert any("rank 1" in text and "run-1" in text and "using the one of rank 0" in text for text in said)


# ---- DeepSpeed's layouts ------------------------------------------------------------------------


def load_foreign(ctx: RankContext, directory: Path) -> list[str]:
    engine, said = saving(load_universal=True), []
    for name in ("universal", "plain"):
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(directory / name)
        said.append(caught.value.what)
    return said


@pytest.mark.key("checkpoint.load_universal")
def test_damaged_files_of_deepspeed_are_named(pool: WorkerPool, tmp_path: Path) -> None:
    """Without the key, test_resume.py loads on every topology; the key adds nothing, and a message says so."""
    (note,) = [n for n in load({"checkpoint": {"load_universal": True}}).notes if n.kind == "no effect"]
    assert "loads on any number of ranks" in note.what
    converted = tmp_path / "universal" / "global_step1_universal"
    (converted / "zero").mkdir(parents=True)
    (converted / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "universal" / "latest_universal").write_text(converted.name)
    data = tmp_path / "plain" / "global_step1"
    data.mkdir(parents=True)
    (tmp_path / "plain" / "latest").write_text("global_step1")
    (data / "mp_rank_00_model_states.pt").touch()
    for universal, plain in pool.run(load_foreign, 2, tmp_path):
        assert "mp_rank_00_model_states.pt cannot be read" in plain
        assert "global_step1_universal/mp_rank_00_model_states.pt cannot be read" in universal


@pytest.mark.key(
    "checkpoint.parallel_write", "checkpoint.parallel_write.pipeline_stage", "checkpoint.writer.data_parallel",
    "checkpoint.checkpoint_serialization", "checkpoint.writer.type", "checkpoint.writer.io_buffer_size",
    "checkpoint.writer.io_buffer_double", "checkpoint.writer.io_multiplier",
)  # fmt: skip
def test_keys_that_tune_deepspeeds_writers_say_that_they_have_no_effect() -> None:
    writer = {"type": "python", "io_buffer_size": 1, "io_buffer_double": False, "io_multiplier": 2}
    section = {
        "writer": {**writer, "data_parallel": "replica"},
        "parallel_write": {"pipeline_stage": True},
        "checkpoint_serialization": False,
    }
    notes = [note for note in load({"checkpoint": section}).notes if note.kind == "no effect"]
    assert len(notes) == 7
    with pytest.raises(ConfigProblems, match="writes no checkpoint"):
        load({"checkpoint": {"writer": {"type": "mock"}}})


# ---- each node has its directory ----------------------------------------------------------------


@contextlib.contextmanager
def node(number: int | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if number is not None:
            patch.setenv("GROUP_RANK", str(number))
        yield


def save_by_node(
    ctx: RankContext, stage: int, directory: Path, decoupled: bool = False
) -> tuple[Any, list[float]]:
    number = ctx.rank // (ctx.world // 2)
    with node(number):
        engine = saving(stage, use_node_local_storage=True, writer={"decoupled": decoupled})
        advance(engine, ctx, BEFORE)
        state = whole_state(engine)
        engine.save_checkpoint(directory / f"node{number}")
        losses = advance(engine, ctx, AFTER)
        engine.destroy()
    return state, losses


def load_by_node(ctx: RankContext, stage: int, directory: Path, section: dict[str, Any]) -> Any:
    number = ctx.rank // (ctx.world // 2) if ctx.world > 1 else 0
    with node(number):
        engine = engine_of(config_of(stage, checkpoint=section), stack(seed=1))
        path, _ = engine.load_checkpoint(directory / f"node{number}")
        assert path == str(directory / f"node{number}" / "global_step2")
        return whole_state(engine), advance(engine, ctx, AFTER)


@pytest.mark.key("checkpoint.use_node_local_storage")
@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 3), (4, 1)])
def test_each_node_has_what_its_ranks_need(pool: WorkerPool, tmp_path: Path, world: int, stage: int) -> None:
    state, losses = pool.run(save_by_node, world, stage, tmp_path)[0]
    for number in range(2):
        own = tmp_path / f"node{number}"
        assert {entry.name for entry in own.iterdir()} == {"latest", "global_step2"}
        files = {entry.name for entry in (own / "global_step2").iterdir()}
        assert {".metadata", "meta.json"} < files
        assert len(files) <= 2 + world // 2
    section = {"use_node_local_storage": True}
    for got, after in pool.run(load_by_node, world, stage, tmp_path, section):
        assert all(torch.equal(got[name], value) for name, value in state.items())
        assert after == losses


def test_a_part_of_the_nodes_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_by_node, 2, 3, tmp_path)
    with pytest.raises(RanksFailed, match=r"missing: model[\s\S]*same ranks on the same nodes"):
        pool.run(load_by_node, 1, 3, tmp_path, {})


def one_directory(ctx: RankContext, directory: Path) -> str:
    with node(ctx.rank):
        engine = saving(use_node_local_storage=True)
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(directory)
    return str(caught.value)


def test_nodes_that_share_their_directory_are_told(pool: WorkerPool, tmp_path: Path) -> None:
    for said in pool.run(one_directory, 2, tmp_path):
        assert "shared by several nodes" in said or "File exists" in said
    assert not (tmp_path / "latest").exists()


def another_tag(ctx: RankContext, directory: Path) -> None:
    with node(ctx.rank):
        engine = saving(use_node_local_storage=True)
        mine = directory / f"node{ctx.rank}"
        for tag in ("a", "b"):
            engine.save_checkpoint(mine, tag)
        if ctx.rank == 1:
            (mine / "latest").write_text("a\n")
        with pytest.raises(CheckpointError, match="disagree about the checkpoint to load"):
            engine.load_checkpoint(mine)
        assert engine.load_checkpoint(mine, "a")[0]


def test_nodes_load_the_same_tag(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(another_tag, 2, tmp_path)


# ---- in the background --------------------------------------------------------------------------


@contextlib.contextmanager
def held(gate: threading.Event) -> Iterator[None]:
    """Block a save just before it finishes until the gate opens."""
    finish = tags.finish

    def wait(*args: Any) -> None:
        assert gate.wait(60)
        finish(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tags, "finish", wait)
        yield


def train_while_it_saves(ctx: RankContext, stage: int, directory: Path) -> tuple[list[float], list[str]]:
    engine = saving(stage, writer={"decoupled": True})
    advance(engine, ctx, BEFORE)
    state, gate = whole_state(engine), threading.Event()
    with held(gate):
        engine.save_checkpoint(directory)
        losses = advance(engine, ctx, AFTER)  # the state goes on while what was saved is a copy
        while not (meanwhile := sorted(entry.name for entry in directory.iterdir())):
            time.sleep(0.01)  # the writer may not have begun
        gate.set()
        engine.saver.wait()
    again = engine_of(config_of(stage), stack(seed=1))
    again.load_checkpoint(directory)
    assert all(torch.equal(value, state[name]) for name, value in whole_state(again).items())
    assert advance(again, ctx, AFTER) == losses
    return losses, meanwhile


@pytest.mark.key("checkpoint.writer", "checkpoint.writer.decoupled")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_decoupled_save_is_of_its_moment(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    for _, meanwhile in pool.run(train_while_it_saves, 2, stage, tmp_path):
        assert meanwhile == [".tmp-global_step2"]  # two steps later it was not finished


def copy_beside_the_forward(ctx: RankContext, stage: int, directory: Path) -> tuple[list[str], float]:
    """Copy weights and moments slowly while the next step computes; its update waits for the copy."""
    engine = saving(stage, writer={"decoupled": True})
    engine.saver.steps_alone_change = True
    copy, threads = Snapshot._copy, set()

    def slowly(snapshot: Snapshot, name: str, tensor: Any) -> Any:
        if name.startswith("model/"):
            time.sleep(0.02)
            threads.add(threading.current_thread().name)
        return copy(snapshot, name, tensor)

    for saved in range(2):  # the second one finds the memory of the first
        advance(engine, ctx, BEFORE)
        state = whole_state(engine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Snapshot, "_copy", slowly)
            engine.save_checkpoint(directory, f"at{saved}")
            losses = advance(engine, ctx, AFTER)
        engine.saver.wait()
        again = engine_of(config_of(stage), stack(seed=1))
        again.load_checkpoint(directory, f"at{saved}")
        assert all(torch.equal(value, state[name]) for name, value in whole_state(again).items())
        assert advance(again, ctx, AFTER) == losses
    return sorted(threads), engine.saver.stalled_s


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_waits_for_the_copy_of_what_it_changes(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    for threads, stall_s in pool.run(copy_beside_the_forward, 2, stage, tmp_path):
        assert threads == ["checkpoint_0"] and stall_s > 0


def choose_after_a_load(ctx: RankContext, directory: Path) -> bool:
    """Like a resuming recipe: the saver is first used for a load, and then saves in the background."""
    engine = saving(1)
    advance(engine, ctx, BEFORE)
    engine.save_checkpoint(directory)
    engine.load_checkpoint(directory)
    engine.saver.in_background = engine.saver.steps_alone_change = True
    for _ in range(3):
        engine.save_checkpoint(directory)
        advance(engine, ctx, AFTER)
    engine.saver.wait()
    group, _ = engine.saver._groups_of_ranks()
    return group is not None and group is not torch.distributed.group.WORLD


def test_a_thread_has_process_groups_of_its_own(pool: WorkerPool, tmp_path: Path) -> None:
    assert all(pool.run(choose_after_a_load, 2, tmp_path))


def keep_some(ctx: RankContext, directory: Path, decoupled: bool) -> None:
    engine = saving(1, keep_last=1, keep_every=2, writer={"decoupled": decoupled})
    for _ in range(5):
        advance(engine, ctx, BEFORE[:1])
        engine.save_checkpoint(directory)
    engine.saver.wait()


@pytest.mark.key("checkpoint.keep_last", "checkpoint.keep_every")
@pytest.mark.parametrize("decoupled", [False, True])
def test_old_checkpoints_are_deleted(pool: WorkerPool, tmp_path: Path, decoupled: bool) -> None:
    pool.run(keep_some, 2, tmp_path, decoupled)
    assert tags.list_tags(tmp_path) == ["global_step2", "global_step4", "global_step5"]


def save_on_a_small_disk(ctx: RankContext, directory: Path) -> str:
    engine = saving(3)
    advance(engine, ctx, BEFORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        try:
            engine.save_checkpoint(directory)
        except CheckpointError as error:
            return str(error)
    return ""


def test_a_disk_without_room_is_told_before_anything_is_written(pool: WorkerPool, tmp_path: Path) -> None:
    for said in pool.run(save_on_a_small_disk, 2, tmp_path):
        assert "the disk has only 0.00 GB free" in said and "keep_last" in said
    assert not list(tmp_path.iterdir())


def fail_in_the_background(ctx: RankContext, directory: Path) -> list[str]:
    engine, said = saving(writer={"decoupled": True}), []
    advance(engine, ctx, BEFORE)
    engine.save_checkpoint(directory, "first")
    engine.saver.wait()
    with at_call("fsync", 1 if ctx.rank == 1 else 10**6, full):
        engine.save_checkpoint(directory, "second")
        with contextlib.suppress(CheckpointError):
            engine.saver.pending[0].result()
    for ask in (lambda: advance(engine, ctx, AFTER), lambda: engine.save_checkpoint(directory, "third")):
        try:
            ask()
        except CheckpointError as error:
            said.append(str(error))
    assert engine.load_checkpoint(directory)[0] == str(directory / "third")
    return said


def test_a_failure_in_the_background_is_told_at_the_next_step(pool: WorkerPool, tmp_path: Path) -> None:
    for said in pool.run(fail_in_the_background, 2, tmp_path):
        assert len(said) == 1 and "No space left on device" in said[0]
    assert {entry.name for entry in tmp_path.iterdir()} == {"first", "third", "latest"}


def die_in_the_background(ctx: RankContext, directory: Path) -> None:
    engine = saving(writer={"decoupled": True})
    engine.save_checkpoint(directory, "first")
    engine.saver.wait()
    advance(engine, ctx, BEFORE)
    with at_call("fsync", 1, die if ctx.rank == 1 else lambda: None):
        engine.save_checkpoint(directory, "second")
        advance(engine, ctx, AFTER)
        engine.destroy()


def test_a_run_that_is_killed_while_it_saves(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="exit code -9"):
        pool.run(die_in_the_background, 2, tmp_path)
    assert (tmp_path / "latest").read_text() == "first\n"
    pool.run(load_first, 1, tmp_path)


def load_first(ctx: RankContext, directory: Path) -> None:
    assert saving(0).load_checkpoint(directory)[0] == str(directory / "first")


def by_node_in_the_background(ctx: RankContext, directory: Path) -> None:
    save_by_node(ctx, 1, directory, decoupled=True)


def test_both_together(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(by_node_in_the_background, 2, tmp_path)
    section = {"use_node_local_storage": True}
    assert pool.run(load_by_node, 2, 1, tmp_path, section)


def statistics(ctx: RankContext, directory: Path, wanted: bool) -> list[str]:
    out = io.StringIO()
    engine = saving(writer={"show_statistics": wanted})
    with contextlib.redirect_stdout(out):
        engine.save_checkpoint(directory)
    written = sum(entry.stat().st_size for entry in (directory / "global_step0").glob("[!m]*"))
    assert not out.getvalue() or f"{written / 1e6:.1f} MB in" in out.getvalue()
    return out.getvalue().splitlines()


@pytest.mark.key("checkpoint.writer.show_statistics")
@pytest.mark.parametrize("wanted", [False, True])
def test_statistics(pool: WorkerPool, tmp_path: Path, wanted: bool) -> None:
    assert [len(lines) for lines in pool.run(statistics, 2, tmp_path, wanted)] == [wanted, 0]


def test_an_error_that_nobody_asked_for_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from concurrent.futures import Future

    from launcher.checkpoint.saver import _say_unread

    failed: Future[None] = Future()
    failed.set_exception(CheckpointError("the disk is full"))
    _say_unread([failed])
    assert "The last checkpoint was not saved: the disk is full" in capsys.readouterr().err
    assert os.environ.get("GROUP_RANK") is None
