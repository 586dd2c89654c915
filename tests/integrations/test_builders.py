"""`deepspeed.ops.op_builder`: nothing is compiled, and builders without a counterpart raise."""

from __future__ import annotations

import pytest

from launcher.integrations import surface
from launcher.integrations.accelerator import get_accelerator
from launcher.integrations.builders import BUILDERS, COMPATIBLE_OPS, OpBuilder
from launcher.integrations.optimizers import MultiTensorApply
from launcher.integrations.refused import NotHere


def test_a_builder_loads_where_the_engine_does_the_work() -> None:
    kind = surface.look_up("ops.op_builder", "CPUAdamBuilder")
    assert issubclass(kind, OpBuilder) and COMPATIBLE_OPS[kind.NAME] and kind().is_compatible()
    loaded = kind().load()
    with pytest.raises(NotHere, match="create_adam of the operator cpu_adam is not available"):
        loaded.create_adam()


@pytest.mark.parametrize("name", [name for name, kind in BUILDERS.items() if not kind().is_compatible()])
def test_a_builder_without_a_counterpart_is_not_compatible(name: str) -> None:
    made = BUILDERS[name]()
    assert COMPATIBLE_OPS[made.name] is False and get_accelerator().get_op_builder(name) is None
    with pytest.raises(NotHere, match=f"{made.name} is not available"):
        made.load()


def test_a_builder_of_a_script_is_not_compiled() -> None:
    class Mine(OpBuilder):
        NAME = "mine"

    with pytest.raises(NotHere, match="the operator mine is not available"):
        Mine().load()
    assert OpBuilder.is_rocm_pytorch() in (True, False) and len(OpBuilder.installed_rocm_version()) == 2


def test_the_accelerator_gives_builders_by_name() -> None:
    device = get_accelerator()
    assert device.get_op_builder("AsyncIOBuilder") is BUILDERS["AsyncIOBuilder"]
    made = device.create_op_builder("FusedAdamBuilder")
    assert made is not None and made.NAME == "fused_adam"
    assert device.create_op_builder("NobodysBuilder") is None


def test_many_tensors_are_given_to_a_function_of_the_scripts_own() -> None:
    assert MultiTensorApply(8)(lambda *given: given, None, [[1], [2]], 3) == (8, None, [[1], [2]], 3)
