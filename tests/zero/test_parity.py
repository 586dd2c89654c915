"""Every stage, degree, precision, tying, accumulation and checkpointing trains like one process."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import pytest
import torch

from launcher.comm.shared_memory import arena
from tests.pool import RankContext, WorkerPool
from tests.pool.device import ON_GPU
from tests.pool.reference import PlainRun, batch, tiny_gpt2, tiny_llama, train_plain
from tests.zero.training import LAYERS, LR, SEQUENCES, Case, Trained, train

TOLERANCE = 1e-5  # relative, over 10 steps, of losses and gradient norms
# Which kernel a GPU takes for a product depends on its rows, and so does the rounding of bf16.
TOLERANCES = {"fp32": TOLERANCE, "bf16": 2**-8 if ON_GPU else TOLERANCE}
WEIGHT_TOLERANCE = {
    "fp32": 1e-5,
    "bf16": 2**-7 if ON_GPU else 2**-8,
}  # |got - want| / |want| of each tensor; bf16: its rounding
FULL = pytest.mark.full
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}

MATRIX = [
    pytest.param(
        world,
        Case(stage, accumulation, dtype, tied, checkpointing, config=FP32_GRADIENTS if dtype == "bf16" else {}),
        id=f"z{stage}-w{world}-a{accumulation}-{dtype}-{'tied' if tied else 'untied'}-{checkpointing or 'plain'}",
    )
    for world, stage, accumulation, dtype, tied, checkpointing in (
        # 2 ranks: every combination. 4 ranks: more than two terms in a sum, and slices of ranks in the middle; that is
        # the same for every microbatch and every block. 1 rank has nothing to send: everything at once is enough.
        *product((2,), (0, 1, 2, 3), (1, 3), ("fp32", "bf16"), (False, True), ("", "json")),
        *product((4,), (0, 1, 2, 3), (1,), ("fp32", "bf16"), (False,), ("",)),
        *product((1, 4), (0, 1, 2, 3), (3,), ("fp32", "bf16"), (True,), ("json",)),
    )
]  # fmt: skip


@cache
def truth(kind: str, tied: bool, dtype: str, parts: int, clip: float = 0.0, steps: int = 10) -> PlainRun:
    """Run the plain loop with the global batch in `parts` microbatches."""
    model = tiny_llama(tied, LAYERS) if kind == "llama" else tiny_gpt2(tied, LAYERS)
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.01, fused=True)
    precision = torch.float32 if dtype == "fp32" else torch.bfloat16
    return train_plain(model, partial(batch, sequences=SEQUENCES), adamw, steps, parts, clip, precision)


def assert_same(got: Trained, want: PlainRun, dtype: str = "fp32") -> None:
    """Assert that losses, gradient norms and final weights agree within the tolerance."""
    assert got.losses == pytest.approx(want.losses, rel=TOLERANCES[dtype])
    assert got.grad_norms == pytest.approx(want.grad_norms, rel=TOLERANCES[dtype])
    assert got.weights.keys() == want.weights.keys()
    for name, weight in want.weights.items():
        off = (got.weights[name] - weight).norm() / weight.norm()
        assert off <= WEIGHT_TOLERANCE[dtype], f"{name} is off by {off:.2e}"


@pytest.mark.pairwise
@pytest.mark.parametrize(("world", "case"), MATRIX)
def test_matrix(pool: WorkerPool, world: int, case: Case) -> None:
    want = truth(case.kind, case.tied, case.dtype, world * case.accumulation)
    for got in pool.run(train, world, case):
        assert_same(got, want, case.dtype)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_three_ranks(pool: WorkerPool, stage: int) -> None:
    """Padding that is not a power of two. Division by three rounds, and AdamW amplifies that."""
    want = truth("llama", False, "fp32", 3)
    for got in pool.run(train, 3, Case(stage)):
        assert got.losses == pytest.approx(want.losses, rel=TOLERANCE)
        for name, weight in want.weights.items():
            assert (got.weights[name] - weight).norm() <= 3e-5 * weight.norm(), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_rank_is_bit_identical(pool: WorkerPool, stage: int, accumulation: int) -> None:
    (got,) = pool.run(train, 1, Case(stage, accumulation))
    want = truth("llama", False, "fp32", accumulation)
    assert got.losses == want.losses
    for name, weight in want.weights.items():
        assert torch.equal(got.weights[name], weight), name


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_norm_is_the_same_number_at_every_stage(pool: WorkerPool, accumulation: int) -> None:
    runs = [pool.run(train, 2, Case(stage, accumulation, clip=0.5))[0] for stage in (0, 1, 2, 3)]
    for run in runs[1:]:
        assert run.grad_norms == pytest.approx(runs[0].grad_norms, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping(pool: WorkerPool, stage: int) -> None:
    want = truth("llama", False, "fp32", 2, clip=0.3)
    assert max(want.grad_norms) > 0.3  # it does clip
    assert_same(pool.run(train, 2, Case(stage, clip=0.3))[0], want)


@pytest.mark.pairwise
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("checkpointing", ["", "hf", "hf-reentrant", "json"])
@pytest.mark.parametrize("tied", [False, True])
def test_gpt2(pool: WorkerPool, stage: int, checkpointing: str, tied: bool) -> None:
    """Biases, LayerNorms, Conv1D; activation checkpointing of torch and of Hugging Face."""
    case = Case(
        stage,
        tied=tied,
        checkpointing=checkpointing,
        kind="gpt2",
        zero={"stage3_param_persistence_threshold": 0},
    )
    assert_same(pool.run(train, 2, case)[0], truth("gpt2", tied, "fp32", 2))


@pytest.mark.parametrize("zero", [
    {"stage3_max_reuse_distance": 0},
    {"stage3_prefetch_bucket_size": 0},
    {"stage3_max_live_parameters": 0},
    {"stage3_param_persistence_threshold": 64},
    {"stage3_param_persistence_threshold": 10**9},
    {"reduce_bucket_size": 1000},
    {"overlap_comm": False},
    {"reduce_scatter": False},
    {"sub_group_size": 500},
], ids=lambda zero: next(iter(zero)))  # fmt: skip
def test_no_key_of_stage_3_changes_the_numbers(pool: WorkerPool, zero: dict[str, int]) -> None:
    assert_same(pool.run(train, 2, Case(3, 3, zero=zero))[0], truth("llama", False, "fp32", 6))


@pytest.mark.pairwise
@pytest.mark.parametrize("zero", [
    {"allgather_bucket_size": 1000},
    {"allgather_partitions": False},
    {"reduce_bucket_size": 1000},
    {"reduce_scatter": False},
], ids=lambda zero: next(iter(zero)))  # fmt: skip
@pytest.mark.parametrize("stage", [1, 2])
def test_no_key_of_stages_1_and_2_changes_the_numbers(
    pool: WorkerPool, zero: dict[str, int], stage: int
) -> None:
    assert_same(pool.run(train, 2, Case(stage, 3, zero=zero))[0], truth("llama", False, "fp32", 6))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=FULL), 1, pytest.param(2, marks=FULL), 3])
def test_bf16_gradients(pool: WorkerPool, stage: int) -> None:
    """By default gradients are summed in the model's dtype, as in DeepSpeed: 8 significant bits."""
    got = pool.run(train, 4, Case(stage, 3, "bf16"))[0]
    assert got.losses == pytest.approx(truth("llama", False, "bf16", 12).losses, rel=2e-3)


def test_fp16_with_a_dynamic_scale(pool: WorkerPool) -> None:
    runs = [pool.run(train, 2, Case(stage, dtype="fp16"))[0] for stage in (0, 1, 2, 3)]
    want = truth("llama", False, "fp32", 2)
    for run in runs:
        assert run.losses == pytest.approx(want.losses, rel=5e-3)


def train_by_memory(ctx: RankContext, case: Case) -> Trained:
    """Tensors of any size are read directly from another rank's memory, if possible."""
    slot, arena.SLOT = arena.SLOT, 0
    try:
        return train(ctx, case)
    finally:
        arena.SLOT = slot


@pytest.mark.parametrize("stage", [pytest.param(0, marks=FULL), 1, pytest.param(2, marks=FULL), 3])
@pytest.mark.parametrize(("world", "accumulation"), [(2, 3), pytest.param(4, 1, marks=FULL)])
def test_reading_the_memory_of_peers(pool: WorkerPool, world: int, accumulation: int, stage: int) -> None:
    want = truth("llama", False, "fp32", world * accumulation)
    for got in pool.run(train_by_memory, world, Case(stage, accumulation)):
        assert_same(got, want)
