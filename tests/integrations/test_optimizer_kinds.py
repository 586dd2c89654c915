"""isinstance checks of `engine.optimizer` with DeepSpeed's classes, and expert names without experts."""

from __future__ import annotations

import pytest
import torch

from launcher.errors import (
    ConfigError,
    LauncherError,
    MisplacedCallError,
    TagsDiffer,
    UntestedOptimizerError,
    UnusedParametersError,
)
from launcher.integrations import experts, optimizer_kinds, stand_ins
from launcher.integrations.optimizer_kinds import (
    BF16_Optimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    FP16_Optimizer,
    ZeROOptimizer,
)
from launcher.integrations.optimizers import FusedAdam
from launcher.integrations.processes import init_distributed
from launcher.integrations.utilities import required_torch_version
from launcher.optim.build import from_client
from launcher.optim.sharded import ShardedOptimizer
from tests.engine.driving import advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

KINDS = {
    0: set(),
    1: {DeepSpeedZeroOptimizer, ZeROOptimizer},
    2: {DeepSpeedZeroOptimizer, ZeROOptimizer},
    3: {DeepSpeedZeroOptimizer_Stage3, ZeROOptimizer},
}


def ask(ctx: RankContext) -> None:
    for stage, expected in KINDS.items():
        engine = engine_of(config_of(stage))
        every = KINDS[1] | KINDS[3] | {FP16_Optimizer, BF16_Optimizer}
        assert {kind for kind in every if isinstance(engine.optimizer, kind)} == expected
        assert not isinstance(engine.optimizer.optimizer, tuple(every))
        assert engine.optimizer.optimizer is engine.optimizer.inner
        masters = engine.optimizer.fp32_partitioned_groups_flat
        held = sum(tensor.numel() for tensor in masters)
        whole = sum(slot.shape.numel() for slot in engine.zero.slots.values())
        assert held == whole if stage == 0 else 0 < held < whole
        assert masters[0].data_ptr() == next(iter(engine.zero.slices())).data.data_ptr()
        engine.allreduce_gradients()
        assert engine.sparse_tensor_module_names == set()
        for empty in (None, ""):
            with pytest.raises(ConfigError, match="save_dir is"):
                engine.save_checkpoint(empty)
    engine = engine_of(config_of(0, bf16={"enabled": True}))
    assert isinstance(engine.optimizer, BF16_Optimizer) and not engine.optimizer.needs_scaler()
    assert engine_of(config_of(1, fp16={"enabled": True})).optimizer.needs_scaler()


def ask_for_torch_classes(ctx: RankContext) -> None:
    json, own = engine_of(config_of(0)), stack()
    assert isinstance(json.optimizer, ShardedOptimizer) and isinstance(json.optimizer, torch.optim.AdamW)
    assert isinstance(json.optimizer, FusedAdam) and not isinstance(json.optimizer, torch.optim.SGD)
    engine = engine_of(config_of(0), own, optimizer=torch.optim.SGD(own.parameters(), lr=0.1))
    assert isinstance(engine.optimizer, torch.optim.SGD) and not isinstance(engine.optimizer, FusedAdam)
    assert not isinstance(engine_of(config_of(1)).optimizer, FusedAdam)
    advance(engine, ctx, [0])


def test_an_optimizer_is_of_the_class_that_steps(pool: WorkerPool) -> None:
    pool.run(ask_for_torch_classes, 1)


def test_an_optimizer_is_of_the_class_of_its_stage(pool: WorkerPool) -> None:
    pool.run(ask, 2)


def test_what_is_no_engine_s_is_of_none_and_none_is_made_by_hand() -> None:
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    assert not isinstance(plain, ZeROOptimizer)
    with pytest.raises(LauncherError, match="FP16_UnfusedOptimizer cannot be instantiated"):
        optimizer_kinds.FP16_UnfusedOptimizer(plain)


def test_models_without_experts_pass() -> None:
    group = {"params": [torch.nn.Parameter(torch.ones(1))]}
    split = experts.split_params_into_different_moe_groups_for_optimizer
    assert split(group) == [group] and split((group, group)) == [group, group]
    assert not experts.is_moe_param(group["params"][0])


def test_versions_of_torch() -> None:
    assert required_torch_version(min_version=2.1) and required_torch_version(min_version="1.10")
    assert not required_torch_version(max_version=1.13) and not required_torch_version(min_version="99.0")


def test_what_scripts_for_deepspeed_catch_is_caught() -> None:
    for error in (MisplacedCallError, UntestedOptimizerError, UnusedParametersError, TagsDiffer):
        assert issubclass(error, AssertionError) and issubclass(error, LauncherError)
    with pytest.raises(UntestedOptimizerError, match="zero_allow_untested_optimizer"):
        from_client(type("Own", (torch.optim.SGD,), {})([torch.ones(1)]), untested_allowed=False)


def test_a_process_group_that_must_be_there_is_not_made() -> None:
    with pytest.raises(LauncherError, match="dist_init_required"):
        init_distributed("gloo", dist_init_required=False)
    with pytest.raises(LauncherError, match="dist_init_required"):
        stand_ins.initialize(model=torch.nn.Linear(2, 2), config={}, dist_init_required=False)
