"""Shard groups smaller than dp: MiCS and hpZ train like one process, and their traffic stays in the groups."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from launcher.comm import CollectiveRecord
from launcher.errors import LauncherError
from tests.engine.driving import advance, engine_of, microbatches, whole_weights
from tests.engine.driving import config_of as stack_config
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.zero.test_memory_and_communication import PARAMETERS, UNITS, assert_bytes, padding
from tests.zero.test_parity import FP32_GRADIENTS, assert_same, truth
from tests.zero.training import Case, Trained, train

WORLD = 4
ALL_SHARDED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
MICS = {"mics_shard_size": 2, **ALL_SHARDED}
HPZ = {"zero_hpz_partition_size": 2, **ALL_SHARDED}


def sent(records: list[CollectiveRecord], axis: str, op: str) -> float:
    """Return the bytes that a rank sent along an axis, in units of the parameters' bytes, without the norm."""
    own = [r for r in records if r.axis == axis and r.op == op and r.tag != "root/norm"]
    return sum(r.sent for r in own) / (4 * PARAMETERS)


def near(bytes_sent: float) -> object:
    return pytest.approx(bytes_sent, abs=4 * padding(WORLD) / (4 * PARAMETERS))


@pytest.mark.key("zero_optimization.mics_shard_size")
@pytest.mark.parametrize(("accumulation", "stage"), [
    (1, 1), (3, 2), (1, 3), *(pytest.param(*case, marks=pytest.mark.full) for case in ((3, 1), (1, 2), (3, 3))),
])  # fmt: skip
def test_mics_is_zero_inside_groups_and_a_sum_across_them(
    pool: WorkerPool, stage: int, accumulation: int
) -> None:
    """State is sharded over the group's 2 ranks, not over 4; only gradients leave a group, once per step."""
    case = Case(stage, accumulation, zero=MICS)
    ranks = pool.run(train, WORLD, case)
    for rank in ranks:
        assert_same(rank, truth("llama", False, "fp32", WORLD * accumulation))
        assert_bytes(rank.held["optimizer"], 2 * PARAMETERS / 2, WORLD)
        assert_bytes(rank.held["parameters"], PARAMETERS / (2 if stage == 3 else 1), WORLD)
    records = ranks[0].records
    across = Counter(r.op for r in records if r.axis == "replicate")
    assert across == {"all_reduce": UNITS}
    assert sent(records, "replicate", "all_reduce") == near(2 * 1 / 2 * 1 / 2)  # half of P, over 2 groups
    assert sent(records, "shard", "reduce_scatter") == near((accumulation if stage > 1 else 1) / 2)
    assert {r.tag for r in records if r.axis == "dp"} == {"root/norm"}


@pytest.mark.key("zero_optimization.zero_hpz_partition_size")
def test_hpz_gathers_the_backward_inside_groups(pool: WorkerPool) -> None:
    """One gather over dp per step fills the secondary shard.

    All others stay in the group, at the cost of P/2 more memory.
    """
    for accumulation in (1, 3):
        plain = pool.run(train, WORLD, Case(3, accumulation, zero=ALL_SHARDED))[0]
        ranks = pool.run(train, WORLD, Case(3, accumulation, zero=HPZ))
        for rank in ranks:
            assert_same(rank, truth("llama", False, "fp32", WORLD * accumulation))
            assert_bytes(rank.held["parameters"], PARAMETERS / 4 + PARAMETERS / 2, WORLD)
            assert_bytes(rank.held["optimizer"], 2 * PARAMETERS / 4, WORLD)
        assert [rank.losses for rank in ranks] == [plain.losses] * WORLD  # bit for bit
        before, after = plain.records, ranks[0].records
        gathers = sent(before, "dp", "all_gather") / (3 / 4)
        assert sent(after, "dp", "all_gather") == near(3 / 4)
        assert sent(after, "shard", "all_gather") == near((gathers - 1) / 2)
        assert sent(after, "dp", "reduce_scatter") == sent(before, "dp", "reduce_scatter")


TOGETHER = {
    "MiCS, bf16, checkpointing": Case(
        3, 3, "bf16", tied=True, checkpointing="json", zero=MICS, config=FP32_GRADIENTS
    ),
    "hpZ, bf16, checkpointing": Case(
        3, 3, "bf16", tied=True, checkpointing="json", zero=HPZ, config=FP32_GRADIENTS
    ),
}


@pytest.mark.parametrize(
    "name",
    [*list(TOGETHER)[:1], *(pytest.param(name, marks=pytest.mark.full) for name in list(TOGETHER)[1:])],
)
def test_with_everything_else(pool: WorkerPool, name: str) -> None:
    case = TOGETHER[name]
    for got in pool.run(train, WORLD, case):
        assert_same(got, truth("llama", True, "bf16", WORLD * 3), "bf16")


def test_hpz_with_quantised_weights(pool: WorkerPool) -> None:
    """The forward's gather is quantized; the secondary shard keeps its result, and the backward uses the same."""
    plain = pool.run(train, WORLD, Case(3, zero=ALL_SHARDED))[0]
    both = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    alone = pool.run(train, WORLD, Case(3, zero={**ALL_SHARDED, **both}))[0]
    got = pool.run(train, WORLD, Case(3, zero={**HPZ, **both}))[0]
    assert got.losses == alone.losses
    assert got.losses == pytest.approx(plain.losses, rel=2e-2)
    mics = pool.run(train, WORLD, Case(3, zero={**MICS, **both}))[0]
    assert mics.losses == pytest.approx(plain.losses, rel=2e-2)


@pytest.mark.key("zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size")
@pytest.mark.parametrize("key", ["mics_shard_size", "zero_hpz_partition_size"])
def test_a_group_must_divide_the_ranks(pool: WorkerPool, key: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        pool.run(train, 2, Case(3, zero={key: 3}))
    assert "the group size 3 does not divide the data-parallel degree 2" in str(
        failed.value
    ) and "use one of 1, 2" in str(failed.value)


@pytest.mark.parametrize("size", [1, 2])
def test_the_ends_of_the_scale(pool: WorkerPool, size: int) -> None:
    """A group of one rank is plain data parallelism, a group of all is plain ZeRO."""
    case = Case(3, zero={"mics_shard_size": size, **ALL_SHARDED})
    (got, _) = pool.run(train, 2, case)
    assert_same(got, truth("llama", False, "fp32", 2))
    assert {r.op for r in got.records if r.tag != "root/norm"} == (
        {"all_reduce"} if size == 1 else {"all_gather", "reduce_scatter"}
    )


def two_backwards(ctx: RankContext) -> str:
    engine = engine_of(stack_config(3, zero_optimization={"stage": 3, "mics_shard_size": 1}))
    ((x, y),) = microbatches(ctx, 0)
    engine.backward(engine(x, y))
    try:
        engine.backward(engine(x, y))
    except LauncherError as error:
        return str(error)
    return ""


def test_a_second_backward_after_the_sum_over_groups_is_refused(pool: WorkerPool) -> None:
    """It would count the first one's gradients once per group."""
    for said in pool.run(two_backwards, 2):
        assert "the last microbatch of a step had two backward passes" in said


def on_nodes_of_two(ctx: RankContext, case: Case) -> Trained:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return train(ctx, case)


@pytest.mark.key("zero_optimization.mics_hierarchical_params_gather")
def test_hierarchical_gathers_cross_nodes_once(pool: WorkerPool) -> None:
    """Two nodes of two: in one hop a rank sends its quarter to both remote ranks, in two hops to one of them."""
    zero = {"mics_shard_size": 4, **ALL_SHARDED}
    flat, *_ = pool.run(on_nodes_of_two, WORLD, Case(3, steps=3, zero=zero))
    zero["mics_hierarchical_params_gather"] = True
    levels, *_ = pool.run(on_nodes_of_two, WORLD, Case(3, steps=3, zero=zero))
    assert levels.losses == flat.losses
    gathers = sent(flat.records, "dp", "all_gather") / (3 / 4)
    assert sent(levels.records, "dp", "all_gather") == 0
    assert sent(levels.records, "across", "all_gather") == near(gathers / 4)  # in one hop: 2 / 4
    assert sent(levels.records, "inside", "all_gather") == near(gathers / 2)


def resume(ctx: RankContext, directory: Path, first: dict[str, object], then: dict[str, object]) -> bool:
    engine = engine_of(stack_config(3, zero_optimization={"stage": 3, **first}))
    advance(engine, ctx, range(3))
    engine.save_checkpoint(directory)
    want = advance(engine, ctx, range(3, 6)), whole_weights(engine)
    other = engine_of(stack_config(3, zero_optimization={"stage": 3, **then}))
    other.load_checkpoint(directory)
    got = advance(other, ctx, range(3, 6)), whole_weights(other)
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    for name, value in want[1].items():
        assert got[1][name].sub(value).abs().max() < 1e-5, name
    return True


def test_checkpoints_do_not_know_of_groups(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(resume, WORLD, tmp_path / "a", MICS, HPZ)
    pool.run(resume, WORLD, tmp_path / "b", HPZ, MICS)
