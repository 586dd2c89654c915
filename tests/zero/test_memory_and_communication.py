"""Bytes held match the table of the ZeRO paper, and bytes sent its section 7, up to padding."""

from __future__ import annotations

import pytest

import launcher
from launcher.comm import CollectiveRecord
from launcher.zero.flat import ALIGN
from launcher.zero.reduce import UNITS_IN_FLIGHT
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, tiny_llama
from tests.zero.training import LAYERS, SEQUENCES, Case, config_of, train, watch_in_flight

PARAMETERS = sum(p.numel() for p in tiny_llama(layers=LAYERS).parameters())
SLOTS = len(list(tiny_llama(layers=LAYERS).parameters()))
UNITS = 3 + LAYERS  # embedding, blocks, head, root
WHOLE = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def padding(world: int) -> int:
    """Return the maximum number of elements added by alignment of slots and shards."""
    return SLOTS * ALIGN + UNITS * world * ALIGN


def assert_bytes(held: int, elements: float, world: int, bytes_each: int = 4) -> None:
    # Padding lies at the end: the last rank may own as much less as the others own more.
    assert abs(held - elements * bytes_each) <= padding(world) * bytes_each


@pytest.mark.pairwise
@pytest.mark.key("zero_optimization.stage")
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("stage", "sharded"), [(0, ""), (1, "o"), (2, "og"), (3, "ogp")])
def test_bytes_held(pool: WorkerPool, stage: int, sharded: str, world: int) -> None:
    """Parameters 4P, gradients 4P, Adam's moments 8P, each divided by the ranks if sharded (fp32)."""
    for rank in pool.run(train, world, Case(stage, steps=2, zero=WHOLE)):
        share = {kind: PARAMETERS / (world if kind in sharded else 1) for kind in "ogp"}
        assert_bytes(rank.held["parameters"], share["p"], world)
        assert_bytes(rank.held["gradients"], share["g"], world)
        assert_bytes(rank.held["optimizer"], 2 * share["o"], world)
        assert rank.held["master"] == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_held_in_bf16(pool: WorkerPool, stage: int) -> None:
    """2P + 2P + 12P: parameters and gradients of 2 bytes, fp32 master weights and moments."""
    for rank in pool.run(train, 2, Case(stage, steps=2, dtype="bf16", zero=WHOLE)):
        assert_bytes(rank.held["parameters"], PARAMETERS / (2 if stage == 3 else 1), 2, 2)
        assert_bytes(rank.held["gradients"], PARAMETERS / (2 if stage >= 2 else 1), 2, 2)
        assert_bytes(rank.held["master"], PARAMETERS / (2 if stage >= 1 else 1), 2)
        assert_bytes(rank.held["optimizer"], 2 * PARAMETERS / (2 if stage >= 1 else 1), 2)


def sent(records: list[CollectiveRecord], op: str, phase: str) -> int:
    return sum(r.sent for r in records if r.op == op and r.tag.endswith(phase))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("stage", "expected"), [
    (0, {("all_reduce", "backward"): 2}),
    (1, {("reduce_scatter", "backward"): 1, ("all_gather", "publish"): 1}),
    (2, {("reduce_scatter", "backward"): 1, ("all_gather", "publish"): 1}),
])  # fmt: skip
def test_bytes_sent(pool: WorkerPool, stage: int, expected: dict[tuple[str, str], int], world: int) -> None:
    """In units of P (N - 1) / N elements; the root unit stays gathered from forward to backward."""
    records = pool.run(train, world, Case(stage, steps=3, zero=WHOLE))[0].records
    once = 4 * PARAMETERS * (world - 1) // world
    slack = 4 * padding(world)
    for (op, phase), times in expected.items():
        assert times * once - slack <= sent(records, op, phase) <= times * once + times * slack
    others = [r for r in records if (r.op, r.tag.split("/")[-1]) not in expected]
    assert [r.tag for r in others] == ["root/norm"]


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_sent_at_stage_3(pool: WorkerPool, world: int) -> None:
    """Gathered for the forward and again for the backward, reduced once: 3 P (N - 1) / N; at most the root once."""
    records = pool.run(train, world, Case(3, steps=3, zero=WHOLE))[0].records
    once, slack = 4 * PARAMETERS * (world - 1) // world, 8 * padding(world)
    gathered = sum(r.sent for r in records if r.op == "all_gather")
    assert 1.9 * once - slack <= gathered <= 2 * once + slack
    assert once <= sent(records, "reduce_scatter", "backward") <= once + slack


@pytest.mark.parametrize(("stage", "reductions"), [(0, 1), (1, 1), (2, 3), (3, 3)])
def test_gradients_are_reduced_once_a_step_unless_they_are_sharded(
    pool: WorkerPool, stage: int, reductions: int
) -> None:
    """Stages 0 and 1 accumulate locally; stages 2 and 3 reduce at every microbatch, since they store only a shard."""
    records = pool.run(train, 2, Case(stage, accumulation=3, steps=2, zero=WHOLE))[0].records
    phase = [r for r in records if r.tag.endswith("/backward") and r.op != "all_gather"]
    assert len(phase) == reductions * UNITS


@pytest.mark.key("zero_optimization.stage3_param_persistence_threshold")
def test_small_parameters_persist_as_one_collective(pool: WorkerPool) -> None:
    """The norm weights of 32 elements are gathered together once per step, not before every use."""
    case = Case(3, steps=3, zero={"stage3_param_persistence_threshold": 33, "stage3_max_reuse_distance": 0})
    records = pool.run(train, 2, case)[0].records
    assert [r.numel for r in records if r.tag == "root/publish"] == [(2 * LAYERS + 1) * 32]
    assert not [
        r for r in records if r.tag.startswith("root") and r.op == "all_gather" and "publish" not in r.tag
    ]


@pytest.mark.key("zero_optimization.stage3_model_persistence_threshold")
def test_persistence_is_capped(pool: WorkerPool) -> None:
    zero = {"stage3_param_persistence_threshold": 33, "stage3_model_persistence_threshold": 100}
    records = pool.run(train, 2, Case(3, steps=2, zero=zero))[0].records
    assert [r.numel for r in records if r.tag.endswith("/publish")] == [3 * 32]


@pytest.mark.key("zero_optimization.reduce_bucket_size")
def test_reduce_bucket_size_bounds_each_collective(pool: WorkerPool) -> None:
    for stage in (0, 1, 2, 3):
        records = pool.run(train, 2, Case(stage, steps=2, zero={"reduce_bucket_size": 2000}))[0].records
        sizes = [r.numel for r in records if r.op in ("reduce_scatter", "all_reduce") and "backward" in r.tag]
        assert max(sizes) <= 2000
        assert sum(sizes) >= PARAMETERS


@pytest.mark.key("zero_optimization.allgather_bucket_size")
def test_allgather_bucket_size_bounds_each_collective(pool: WorkerPool) -> None:
    records = pool.run(train, 2, Case(2, steps=2, zero={"allgather_bucket_size": 2000}))[0].records
    sizes = [r.numel for r in records if r.tag.endswith("/publish")]
    assert max(sizes) <= 2000 and sum(sizes) >= PARAMETERS


@pytest.mark.key("zero_optimization.allgather_partitions")
@pytest.mark.parametrize("stage", [1, 2])
def test_allgather_partitions_false_broadcasts(pool: WorkerPool, stage: int) -> None:
    records = pool.run(train, 2, Case(stage, steps=2, zero={"allgather_partitions": False}))[0].records
    assert {r.op for r in records if r.tag.endswith("/publish")} == {"broadcast"}


@pytest.mark.key("zero_optimization.reduce_scatter")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reduce_scatter_false_all_reduces(pool: WorkerPool, stage: int) -> None:
    records = pool.run(train, 2, Case(stage, steps=2, zero={"reduce_scatter": False}))[0].records
    assert {r.op for r in records if r.tag.endswith("/backward") and r.op != "all_gather"} == {"all_reduce"}


@pytest.mark.key("zero_optimization.stage3_max_reuse_distance")
def test_max_reuse_distance_keeps_units_for_the_backward(pool: WorkerPool) -> None:
    """Once the order is known, a unit that is reused within the distance is not gathered again."""
    zero = {"stage3_param_persistence_threshold": 0}
    kept = pool.run(train, 2, Case(3, steps=3, zero={**zero, "stage3_max_reuse_distance": 10**9}))[0].records
    freed = pool.run(train, 2, Case(3, steps=3, zero={**zero, "stage3_max_reuse_distance": 0}))[0].records
    gathers = [len([r for r in records if r.op == "all_gather"]) for records in (kept, freed)]
    assert gathers[0] == UNITS  # once each
    assert gathers[1] >= 2 * UNITS - 3


@pytest.mark.key("communication_data_type")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_communication_data_type_is_what_gradients_travel_in(pool: WorkerPool, stage: int) -> None:
    """Half the bytes, and errors within the 8 significant bits of bf16."""
    plain = pool.run(train, 2, Case(stage, steps=4, zero=WHOLE))[0]
    short = pool.run(train, 2, Case(stage, steps=4, zero=WHOLE, config={"communication_data_type": "bf16"}))[
        0
    ]
    op = "all_reduce" if stage == 0 else "reduce_scatter"
    assert 2 * sent(short.records, op, "backward") == sent(plain.records, op, "backward")
    assert short.losses != plain.losses
    assert short.losses == pytest.approx(plain.losses, rel=1e-2)
    assert short.grad_norms == pytest.approx(plain.grad_norms, rel=2e-2)


def test_few_units_are_reduced_at_a_time(pool: WorkerPool) -> None:
    """However large the bucket, the full gradients at a time are limited to the units in flight."""
    block = sum(p.numel() for p in tiny_llama().model.layers[0].parameters())
    for most in pool.run(most_in_flight, 2):
        assert block < most <= (UNITS_IN_FLIGHT + 1) * (block + 9 * ALIGN)


def most_in_flight(ctx: RankContext) -> int:
    config = config_of(Case(2), ctx.world)
    engine, *_ = launcher.initialize(model=tiny_llama(layers=8), config=config, device=DEVICE)
    seen = watch_in_flight(engine)
    ids = batch(0, SEQUENCES)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    return max(seen)
