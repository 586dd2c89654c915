"""The JSON's `compile` section and Engine.compile: compiled blocks train like plain ones, and are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.config import Config, ConfigProblems, load
from launcher.errors import ConfigError
from tests.engine.driving import config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack
from tests.zero.training import Case, Trained, train

KEYS = {"disable": False, "backend": "aot_eager"}
LIMIT = 1e-5


@pytest.mark.pairwise
@pytest.mark.key("compile", "compile.disable", "compile.backend")
@pytest.mark.parametrize("checkpointing", ["", "json"])
@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2)), 3])
def test_compiled_blocks_train_like_plain_ones(pool: WorkerPool, stage: int, checkpointing: str) -> None:
    """Also inside of a checkpoint: the recomputation runs what the forward ran."""

    def run(compile: dict[str, Any]) -> Trained:
        case = Case(stage, 2, checkpointing=checkpointing, steps=4, config={"compile": compile})
        trained: Trained = pool.run(train, 2, case)[0]
        return trained

    got, want = run(KEYS), run({**KEYS, "disable": True})
    assert got.losses == pytest.approx(want.losses, rel=LIMIT)
    assert got.grad_norms == pytest.approx(want.grad_norms, rel=LIMIT)
    for name, value in want.weights.items():
        torch.testing.assert_close(got.weights[name], value, rtol=1e-4, atol=2e-6)
    assert [(r.op, r.tag, r.sent) for r in got.records] == [(r.op, r.tag, r.sent) for r in want.records]


def count_graphs(ctx: RankContext, section: dict[str, Any] | None) -> tuple[bool, int]:
    """Graphs that a backend gets in one step of a Stack with 3 blocks."""
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(counting, name=f"counting_{id(graphs)}")
    if section is not None:
        section = {**section, "backend": f"counting_{id(graphs)}"}
    engine = engine_of(config_of(3, **({} if section is None else {"compile": section})), stack())
    x = torch.ones(4, 4)
    engine.backward(engine(x, x.sum(1)))
    return engine.is_compiled, len(graphs)


@pytest.mark.key("compile.enabled", "compile.kwargs")
@pytest.mark.parametrize(("section", "compiled"), [
    (None, False), ({}, True), ({"enabled": True}, True), ({"enabled": False}, False), ({"disable": True}, False),
    ({"disable": False, "kwargs": {"dynamic": True}}, True), ({"kwargs": {"disable": True}}, None),
], ids=str)  # fmt: skip
def test_what_the_section_compiles(
    pool: WorkerPool, section: dict[str, Any] | None, compiled: bool | None
) -> None:
    """kwargs reach torch.compile: its own `disable` makes it a wrapper that compiles nothing."""
    (said, graphs), _ = pool.run(count_graphs, 2, section)
    assert said == (compiled is not False)
    assert (graphs > 0) == bool(compiled)


def by_hand(ctx: RankContext) -> tuple[bool, bool]:
    engine = engine_of(config_of(2))
    before = engine.is_compiled
    with pytest.raises(ConfigError, match="schedule"):
        engine.compile(schedule=[(0, [])])
    with pytest.raises(ConfigError, match="inductr"):
        engine.compile("inductr")
    engine.compile("eager", {"fullgraph": True})
    forward = engine.module.blocks[0].forward
    engine.compile("aot_eager")
    assert engine.module.blocks[0].forward is forward
    return before, engine.is_compiled


def test_by_hand(pool: WorkerPool) -> None:
    assert pool.run(by_hand, 1) == [(False, True)]


def test_the_section_alone() -> None:
    def on(section: Any) -> bool:
        return load({"compile": section}).compile.on

    assert on({"backend": "inductor"}) and on({"enabled": True}) and on({"disable": False})
    assert not (on({}) or on(None) or on({"deepcompile": False}) or on({"kwargs": {"dynamic": True}}))
    assert not (on({"backend": "inductor", "disable": True}) or on({"backend": "inductor", "enabled": False}))
    auto = load({"compile": {"backend": "auto"}, "train_batch_size": 1}).resolve(dp_degree=1)
    assert auto.compile.backend is None and not auto.compile.on
    for both in (True, False):
        with pytest.raises(ConfigProblems, match="they are opposites"):
            load({"compile": {"enabled": both, "disable": both}})
    with pytest.raises(ConfigProblems, match="a key of its own"):
        load({"compile": {"kwargs": {"backend": "eager"}}})
    assert load({"compile": KEYS}).to_dict()["compile"]["backend"] == "aot_eager"
    assert load(load({"compile": KEYS}).to_dict()) == load({"compile": KEYS}) != Config()


@pytest.mark.key("compile.deepcompile", "compile.passes", "compile.offload_activation")
@pytest.mark.parametrize(("key", "value", "instead"), [
    ("deepcompile", True, '"enabled": true'), ("passes", ["z3"], "zero_optimization.stage"),
    ("offload_activation", True, "activation_checkpointing.cpu_checkpointing"),
])  # fmt: skip
def test_deepcompile_is_refused_and_says_what_to_write(key: str, value: Any, instead: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load({"compile": {key: value}})
    (problem,) = caught.value.problems
    assert problem.fix is not None and instead in problem.fix
