"""The JSON's `compile` section and Engine.compile: compiled blocks train like uncompiled ones, and are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.config import Config, ConfigProblems, load
from launcher.errors import ConfigError
from launcher.integrations.compiler_passes import add_z3_gather_release
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
    """Also inside activation checkpointing: the recomputation runs the forward's code."""

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
    """Return the number of graphs that a backend gets in one step of a Stack with 3 blocks."""
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
    """kwargs reach torch.compile: with its `disable`, nothing is compiled."""
    (said, graphs), _ = pool.run(count_graphs, 2, section)
    assert said == (compiled is not False)
    assert (graphs > 0) == bool(compiled)


def by_hand(ctx: RankContext) -> tuple[bool, bool]:
    engine = engine_of(config_of(2))
    before = engine.is_compiled
    with pytest.raises(ConfigError, match="inductr"):
        engine.compile("inductr")
    said: list[str] = []
    engine.telemetry.say = said.append  # type: ignore[method-assign]
    engine.compile("eager", {"fullgraph": True}, schedule=[(0, [add_z3_gather_release])])
    assert "schedule= has no effect" in said[0] and len(said) == 1
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
    with pytest.raises(ConfigProblems, match="contains a backend, which has its own key"):
        load({"compile": {"kwargs": {"backend": "eager"}}})
    assert load({"compile": KEYS}).to_dict()["compile"]["backend"] == "aot_eager"
    assert load(load({"compile": KEYS}).to_dict()) == load({"compile": KEYS}) != Config()


@pytest.mark.key("compile.deepcompile", "compile.passes")
def test_deepcompile_has_no_effect_and_says_so() -> None:
    section = {"deepcompile": True, "passes": ["z3"], "free_activation": True, "sync_before_reduce": True}
    config = load({"compile": section, "train_batch_size": 1})
    assert not config.compile.on
    said = {note.path: note.what for note in config.notes if note.path[0] == "compile"}
    assert set(said) == {("compile", key) for key in section}
    assert "engine.compile()" in said["compile", "deepcompile"]


@pytest.mark.key("compile.offload_activation")
def test_deepcompile_that_offloads_is_refused_and_says_what_to_write() -> None:
    with pytest.raises(ConfigProblems) as caught:
        load({"compile": {"deepcompile": True, "offload_activation": True}})
    (problem,) = caught.value.problems
    assert problem.fix is not None and "activation_checkpointing.cpu_checkpointing" in problem.fix
