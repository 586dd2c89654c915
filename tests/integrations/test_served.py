"""DeepSpeed names that work here: device, collectives, configuration, schedules, random numbers, estimates, tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

import launcher
from launcher.engine.fragments import safe_get_full_fp32_param
from launcher.errors import ConfigError, LauncherError
from launcher.integrations import (
    accelerator,
    collectives,
    curriculum,
    elastic,
    experts,
    memory_needs,
    norms,
    pipe_schedule,
    sections,
)
from launcher.integrations.accelerator import get_accelerator
from launcher.integrations.configuration import DeepSpeedConfig, load_ds_config
from launcher.integrations.enumerations import DtypeEnum, OffloadDeviceEnum, ZeroParamStatus
from launcher.integrations.loading import DeepSpeedDataLoader
from launcher.integrations.monitors import MonitorMaster, csvMonitor
from launcher.integrations.profiles import FlopsProfiler, get_model_profile
from launcher.integrations.refused import NotHere
from launcher.integrations.rng_trackers import CudaRNGStatesTracker
from launcher.integrations.sections import DeepSpeedMonitorConfig
from launcher.integrations.tiling import TiledLinear, TiledLinearReturnBias
from launcher.integrations.timing import SynchronizedWallClockTimer, ThroughputTimer, trim_mean
from launcher.pipeline.sequential.grid import PipelineParallelGrid
from launcher.pipeline.sequential.topology import PipeModelDataParallelTopology, ProcessTopology
from launcher.zero import GatheredParameters
from tests.engine.driving import config_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import tiny_llama

# ---- the device ------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_a_cpu_has_a_device_for_each_rank_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert get_accelerator().device_count() == 1
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert get_accelerator().device_count() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert get_accelerator().device_count() == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_a_cpu_answers_what_is_asked_of_an_accelerator() -> None:
    device = get_accelerator()
    assert (device.device_name(), device.device_name(1), device.current_device_name()) == (
        "cpu",
        "cpu",
        "cpu",
    )
    assert device.communication_backend_name() == "gloo" and device.device_count() == 1
    assert device.on_accelerator(torch.ones(1)) and torch.bfloat16 in device.supported_dtypes()
    assert 0 < device.memory_allocated() <= device.max_memory_allocated() <= device.total_memory()
    assert device.FloatTensor([1, 2]).dtype == torch.float32
    with device.stream(device.Stream()), device.device(0):
        begin, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
        begin.record()
        end.record()
        assert begin.elapsed_time(end) >= 0
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    with pytest.raises(NotHere, match="no graph was captured"):
        device.replay_graph(None)
    with pytest.raises(
        NotHere, match=r"get_accelerator\(\).build_extension is not available: .* DeepSpeed's C\+\+"
    ):
        device.build_extension  # noqa: B018
    assert not hasattr(device, "op_builder_dir")


def test_what_a_gpu_answers_is_in_torch() -> None:
    lacking = [
        name for name in accelerator.ON_CPU if not hasattr(torch.cuda, accelerator.IN_TORCH.get(name, name))
    ]
    assert lacking == []
    assert accelerator._on_cuda("Stream") is torch.cuda.Stream
    assert accelerator._call(lambda *given, **more: (given, more), device_index=3, b=1) == ((3,), {"b": 1})
    assert accelerator._call(lambda *given, **more: (given, more), 4) == ((4,), {})


# ---- collectives -----------------------------------------------------------------------------------


def talk(ctx: RankContext) -> list[Any]:
    launcher.init_distributed()
    mine = torch.full((2,), float(ctx.rank + 1))
    collectives.inference_all_reduce(summed := mine.clone())
    outs = [torch.zeros(4), torch.zeros(4)]
    collectives.all_gather_coalesced(outs, [mine, mine * 10])
    many = [mine.clone(), mine * 2]
    collectives.all_reduce_coalesced(many, prof=True, log_name="both")
    exchanged = torch.zeros(2)
    if dist.get_backend() != "gloo":
        collectives.all_to_all_single(exchanged, mine)
    collectives.barrier()
    collectives.monitored_barrier(log_name="here")
    mesh = collectives.initialize_mesh_device((2,), ("data",))
    group = collectives.new_group([0, 1])
    return [
        summed.tolist(),
        [out.tolist() for out in outs],
        [one.tolist() for one in many],
        collectives.get_all_ranks_from_group(group),
        collectives.get_global_rank(group, 1),
        mesh.size(),
        collectives.get_local_rank() >= 0 and collectives.has_all_gather_into_tensor(),
    ]


def test_collectives_of_deepspeed_comm(pool: WorkerPool) -> None:
    same = [[3.0, 3.0], [[1, 1, 2, 2], [10, 10, 20, 20]], [[3, 3], [6, 6]], [0, 1], 1, 2, True]
    assert pool.run(talk, 2) == [same, same]
    with pytest.raises(LauncherError, match="comms_logger"):
        collectives.configure(enabled=True)


def grid(ctx: RankContext) -> list[Any]:
    launcher.init_distributed()
    made = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1))
    total = torch.ones(1)
    dist.all_reduce(total, group=made.get_pipe_parallel_group())
    return [
        made.stage_id,
        made.stage_to_global(1),
        made.is_last_stage,
        made.get_data_parallel_world_size(),
        total.item(),
    ]


def grid_of_stages(ctx: RankContext) -> list[Any]:
    launcher.init_distributed()
    made = PipelineParallelGrid(ProcessTopology(["pipe"], [2]))
    return [made.get_data_parallel_world_size(), made.get_model_parallel_world_size(), made.stage_id]


def test_a_grid_of_stages_alone(pool: WorkerPool) -> None:
    assert pool.run(grid_of_stages, 2) == [[1, 2, 0], [1, 2, 1]]


def test_a_grid_of_a_topology(pool: WorkerPool) -> None:
    assert pool.run(grid, 2) == [[0, 1, False, 1, 2.0], [1, 1, True, 1, 2.0]]


def grid_of_an_engine(ctx: RankContext, axes: dict[str, Any]) -> list[Any]:
    """Return this rank's position, and the ranks of its groups."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, **axes}
    engine = launcher.initialize(model=tiny_llama(layers=2), config=config, device=DEVICE)[0]
    made = engine.grid
    said = [
        made.get_pipe_parallel_rank(), made.get_data_parallel_rank(), made.get_slice_parallel_rank(),
        made.get_data_parallel_world_size(), made.stage_to_global(made.pipe_parallel_size - 1),
        made.dp_group, made.pp_group, made.slice_group, made.is_last_stage,
    ]  # fmt: skip
    assert made.topology().world_size() == ctx.world
    assert made.stage_to_global(made.stage_id) == ctx.rank and made.dp_group in made.dp_groups
    groups = (made.get_data_parallel_group(), made.get_pipe_parallel_group(), made.get_slice_parallel_group())
    assert [group.size() for group in groups] == [len(ranks) for ranks in said[5:8]]
    try:
        assert made.get_model_parallel_group().size() == made.get_model_parallel_world_size()
    except LauncherError:
        said.append("no such group")
    engine.destroy()
    return said


STAGES, SLICES = {"pipeline": {"stages": 2}}, {"tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize(("axes", "want"), [
    ({}, [[0, 0, 0, 4, 0, [0, 1, 2, 3], [0], [0], True], [0, 3, 0, 4, 3, [0, 1, 2, 3], [3], [3], True]]),
    (STAGES, [[0, 0, 0, 2, 2, [0, 1], [0, 2], [0], False], [1, 1, 0, 2, 3, [2, 3], [1, 3], [3], True]]),
    ({"sequence_parallel_size": 2}, [[0, 0, 0, 2, 0, [0, 2], [0], [0], True], [0, 1, 0, 2, 3, [1, 3], [3], [3], True]]),
    ({**STAGES, **SLICES}, [[0, 0, 0, 1, 2, [0], [0, 2], [0, 1], False, "no such group"],
                            [1, 0, 1, 1, 3, [3], [1, 3], [2, 3], True, "no such group"]]),
], ids=["dp", "pp", "cp", "pp tp"])  # fmt: skip
def test_a_grid_of_an_engine(pool: WorkerPool, axes: dict[str, Any], want: list[list[Any]]) -> None:
    """Checks the first and the last of four ranks."""
    found = pool.run(grid_of_an_engine, 4, axes)
    assert [found[0], found[-1]] == want


# ---- parameters --------------------------------------------------------------------------------------


def marked(ctx: RankContext) -> list[Any]:
    from launcher.integrations import stand_ins  # noqa: F401  (what a script has imported by then)

    config = config_of(3, train_batch_size=2)
    model = tiny_llama(layers=1)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    engine = launcher.initialize(model=model, config=config, device=DEVICE)[0]
    params = dict(engine.module.named_parameters())
    sharded = {name: param for name, param in params.items() if hasattr(param, "ds_id")}
    found = [
        all(tuple(param.ds_shape) == shapes[name] for name, param in sharded.items()),
        len({param.ds_id for param in sharded.values()}) == len(sharded) > 0,
        {param.ds_status for param in sharded.values()} == {ZeroParamStatus.NOT_AVAILABLE},
        any(hasattr(param, "ds_tensor") for param in sharded.values()),
        hasattr(nn.Parameter(torch.ones(1)), "ds_id"),
    ]
    one = next(iter(sharded.values()))
    with GatheredParameters([one]):  # as scripts of others take weights out
        found.append(one.data.detach().cpu().clone().shape == one.ds_shape)
    engine.destroy()
    return found


def test_a_sharded_parameter_is_known_by_its_marks(pool: WorkerPool) -> None:
    assert pool.run(marked, 2) == [[True, True, True, False, False, True]] * 2


# ---- the JSON ----------------------------------------------------------------------------------------


def test_a_config_by_the_attributes_that_scripts_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "bf16": {"enabled": true},'
        '"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7, "offload_param": {"device": "cpu"}},'
        '"communication_data_type": "fp32", "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}} // a comment'
    )
    config = DeepSpeedConfig(str(path))
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (8, 4)
    assert (
        config.zero_enabled and config.zero_config.stage == 3 and config.zero_config.prefetch_bucket_size == 7
    )
    assert config.zero_config.offload_param.device == OffloadDeviceEnum.cpu
    assert config.bfloat16_enabled and not config.fp16_enabled and config.gradient_clipping == 0.5
    assert config.optimizer_name.lower() == "adamw" and config.communication_data_type == torch.float32
    with pytest.raises(NotHere, match=r"DeepSpeedConfig\.pld_enabled"):
        config.pld_enabled  # noqa: B018
    with pytest.raises(ConfigError, match="stage"):
        DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 9}})
    assert load_ds_config(str(path))["gradient_clipping"] == 0.5
    assert DtypeEnum.from_str("half") is DtypeEnum.fp16


def test_sections_as_classes() -> None:
    zero = sections.DeepSpeedZeroConfig(stage=3, cpu_offload_param=True, stage3_prefetch_bucket_size=7)
    assert zero.prefetch_bucket_size == zero.stage3_prefetch_bucket_size == 7
    assert isinstance(zero.offload_param, sections.DeepSpeedZeroOffloadParamConfig)
    assert zero.offload_param.device == OffloadDeviceEnum.cpu and zero.offload_optimizer is None
    assert zero.leaf_module.classes == sections.DEFAULT_LEAF_MODULE_CLASSES
    assert sections.DeepSpeedZeroConfig(leaf_module={"names": "a"}).leaf_module.names == ["a"]
    assert sections.DeepSpeedZeroConfig(zero_hpz_partition_size=4).stage == 0
    offload = sections.DeepSpeedZeroOffloadOptimizerConfig
    assert not offload(pipeline_read=False, pipeline_write=False).pipeline and offload(ratio=0.3).pipeline
    assert sections.DeepSpeedZeroConfig(stage=2).model_dump()["reduce_bucket_size"] == 500_000_000
    with pytest.raises(NotHere, match=r"DeepSpeedZeroConfig\.nothing"):
        zero.nothing  # noqa: B018
    with pytest.raises(ValidationError, match=r"zero_optimization\.stage\n.*not 7"):
        sections.DeepSpeedZeroConfig(stage=7)


def test_precision_as_classes() -> None:
    fp16 = sections.get_float16_config({"fp16": {"enabled": True, "loss_scale": "3"}})
    assert fp16.enabled and fp16.loss_scale == 3 and fp16.loss_scale_window == 1000
    assert sections.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert not sections.get_bfloat16_config({}).enabled
    with pytest.raises(ValidationError, match="must be a number"):
        sections.DeepSpeedFP16Config(loss_scale=[])


def test_an_elastic_batch_is_that_of_the_section() -> None:
    json = {
        "elasticity": {
            "enabled": True,
            "max_train_batch_size": 100,
            "micro_batch_sizes": [2, 4],
            "version": 0.1,
        }
    }
    batch, ranks = elastic.compute_elastic_config(json, "0.19.8")
    assert elastic.compute_elastic_config(json, world_size=ranks[1])[0] == batch <= 100
    with pytest.raises(elastic.ElasticityIncompatibleWorldSize, match="are not allowed"):
        elastic.compute_elastic_config(json, world_size=max(ranks) + 1)
    with pytest.raises(elastic.ElasticityConfigError):
        elastic.compute_elastic_config({})


def test_metrics_are_written_without_an_engine(tmp_path: Path) -> None:
    sections = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    master = MonitorMaster(DeepSpeedConfig({"train_batch_size": 1, **sections}).monitor_config)
    master.write_events([("Train/loss", 1.5, 3)])
    master.close()
    assert master.enabled and any("1.5" in path.read_text() for path in tmp_path.rglob("*.csv"))
    assert not MonitorMaster({}).enabled
    one = csvMonitor(DeepSpeedConfig({"train_batch_size": 1, **sections}).monitor_config.csv_monitor)
    one.write_events([("Train/alone", 2.5, 4)])
    one.close()
    assert one.enabled and one.job_name == "job" and any("alone" in path.name for path in tmp_path.rglob("*"))
    assert (
        not csvMonitor({}).enabled
        and csvMonitor({}).output_path == DeepSpeedMonitorConfig().csv_monitor.output_path
    )


# ---- helpers -----------------------------------------------------------------------------------------


def test_one_forward_one_backward_by_hand() -> None:
    """Two stages, three microbatches: the first stage follows the textbook 1F1B schedule."""
    first = [[repr(one) for one in now] for now in pipe_schedule.TrainSchedule(3, 2, 0)]
    assert len(first) == 8
    computed = [[name.partition("(")[0][0] for name in now if "Pass" in name] for now in first]
    assert computed == [["F"], [], ["F"], ["B"], ["F"], ["B"], [], ["B"]]
    assert first[3] == ["RecvGrad(buffer_id=0)", "SendActivation(buffer_id=1)", "BackwardPass(buffer_id=0)"]
    assert first[-1][-3:] == ["ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()"]


def test_random_numbers_of_a_stream_of_their_own() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("mine", 5)
    torch.manual_seed(1)
    before = torch.get_rng_state() if not torch.cuda.is_available() else get_accelerator().get_rng_state()
    with tracker.fork("mine"):
        first = torch.rand(2, device=get_accelerator().device_name())
    assert torch.equal(get_accelerator().get_rng_state(), before)
    with tracker.fork("mine"):
        second = torch.rand(2, device=get_accelerator().device_name())
    get_accelerator().manual_seed(5)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(2), torch.rand(2)]).to(first.device))
    with pytest.raises(LauncherError, match="seed 5"):
        tracker.add("other", 5)
    with pytest.raises(LauncherError, match="has no state named"), tracker.fork("unknown"):
        pass


def test_norms_and_clipping_are_torchs() -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    one.grad, other.grad = torch.full((3,), 2.0), torch.full((2,), -1.0)
    want = torch.nn.utils.get_total_norm([one.grad, other.grad]).item()
    assert norms.get_global_norm_of_tensors([one.grad, other.grad]) == pytest.approx(want)
    assert norms.clip_grad_norm_([one, other], 1.0) == pytest.approx(want)
    assert norms.get_grad_norm([one, other]) == pytest.approx(1.0, abs=1e-5)
    assert norms.get_grad_norm([one, other], norm_type=float("inf")) == pytest.approx(2 / want, rel=1e-5)
    assert norms.get_global_norm([3.0, 4.0]) == 5.0 and norms.prefix_sum_inc([1, 2, 3]) == [1, 3, 6]
    assert norms.get_global_norm_of_tensors([torch.tensor([float("nan")])]) == -1.0
    assert norms.call_to_str("f", 1, b="c") == "f(1, b='c')"


def test_a_linear_layer_in_tiles_is_the_layer() -> None:
    whole = nn.Linear(10, 7)
    x = torch.randn(4, 10)
    tiled = TiledLinear(10, 7, in_splits=3, out_splits=2, init_linear=whole)
    torch.testing.assert_close(tiled(x), whole(x))
    assert [[part.bias is not None for part in row] for row in tiled.linears] == [[False, False, True]] * 2
    parts = TiledLinear(10, 7, out_splits=2, combine_out_splits=False, init_linear=whole)(x)
    assert [part.shape[-1] for part in parts] == [4, 3]

    class Apart(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return nn.functional.linear(x, self.weight), self.bias

    apart = TiledLinearReturnBias(10, 7, in_splits=2, out_splits=2, linear_cls=Apart, init_linear=whole)
    product, bias = apart(x)
    torch.testing.assert_close(product + bias, whole(x))
    with pytest.raises(ConfigError, match="out_splits: 7 features cannot be split into 8") as caught:
        TiledLinear(10, 7, out_splits=8)
    assert isinstance(caught.value, RuntimeError)


def test_estimates_count_shards(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_needs.estimate_zero3_model_states_mem_needs(1000, 100, 2, 1, False, False)[1] == 400 + 8000
    assert memory_needs.estimate_zero3_model_states_mem_needs(1000, 100, 2, 1, True, True)[1:] == (400, 400)
    assert memory_needs.estimate_zero2_model_states_mem_needs(1000, 2, 1, cpu_offload=False) == (
        0,
        2000 + 7000,
    )
    memory_needs.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1000, 1000), 2)
    told = capsys.readouterr().out
    assert "1M total params" in told and told.count("zero_init=") == 6


def test_operations_of_a_forward(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    flops, macs, params = get_model_profile(model, (5, 8), as_string=False)
    assert (flops, macs, params) == (
        2 * 5 * (8 * 16 + 16 * 4),
        5 * (8 * 16 + 16 * 4),
        8 * 16 + 16 + 16 * 4 + 4,
    )
    assert "Linear" in capsys.readouterr().out
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(1, 8))
    profiler.stop_profile()
    assert profiler.get_total_flops() == 2 * (8 * 16 + 16 * 4) and profiler.get_total_duration() > 0


def test_timers_add_up() -> None:
    timers = SynchronizedWallClockTimer()
    timers("a").start()
    timers("a").stop(record=True)
    assert timers("a").elapsed(reset=False) > 0 and timers.get_mean(["a"])["a"] > 0
    assert trim_mean([1, 2, 3, 100], 0.25) == 2.5
    speed = ThroughputTimer(None, batch_size=4, start_step=0)
    speed.start()
    speed.stop(global_step=True)
    assert speed.avg_samples_per_sec() > 0


def test_a_curriculum_rises_and_stays() -> None:
    config = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear"}
    pace = {"total_curriculum_step": 10, "difficulty_step": 8}
    schedule = curriculum.CurriculumScheduler({**config, "schedule_config": pace})
    assert [schedule.update_difficulty(step) for step in (1, 5, 10, 20)] == [8, 32, 64, 64]
    with pytest.raises(ConfigError, match="difficulty_step"):
        curriculum.CurriculumScheduler({**config, "schedule_config": {"total_curriculum_step": 3}})


def test_a_dense_model_has_no_experts() -> None:
    params = [nn.Parameter(torch.ones(2))]
    assert experts.has_moe_layers(nn.Linear(1, 1)) == (False, 0)
    assert experts.split_params_into_different_moe_groups_for_optimizer({"params": params}) == [
        {"params": params}
    ]


def test_parameters_of_experts_are_told_apart() -> None:
    layer = experts.MoE(4, nn.Linear(4, 4), num_experts=2)
    assert experts.has_moe_layers(nn.Sequential(layer)) == (True, 2)
    shared, own = experts.split_params_into_shared_and_expert_params(list(layer.parameters()))
    assert [p.shape for p in shared] == [(2, 4)] and [p.shape for p in own] == [(2, 4, 4), (2, 4)]
    groups = experts.configure_moe_param_groups(list(layer.parameters()))
    assert [experts.is_moe_param_group(group) for group in groups] == [False, True]
    assert experts.configure_moe_param_groups(groups) == groups
    cut = experts.split_params_into_different_moe_groups_for_optimizer(
        {"params": list(layer.parameters()), "name": "all", "lr": 0.1}, max_group_size=32
    )
    assert [(len(group["params"]), group["lr"]) for group in cut] == [(1, 0.1), (1, 0.1), (1, 0.1)]
    layer(torch.ones(3, 4))[0].sum().backward()
    assert [len(part) for part in experts.split_params_grads_into_shared_and_expert_params(
        list(layer.parameters())
    )] == [1, 2]  # fmt: skip


def test_a_loader_deals_out_by_rank() -> None:
    mine = DeepSpeedDataLoader(
        list(range(8)),
        2,
        False,
        0,
        None,
        data_parallel_world_size=2,
        data_parallel_rank=1,
        dataloader_drop_last=True,
    )
    assert len(mine) == 2 and len({int(item) for batch in mine for item in batch}) == 4


# ---- the engine --------------------------------------------------------------------------------------


def put_away(ctx: RankContext) -> list[Any]:
    from launcher.integrations import stand_ins  # noqa: F401

    config = config_of(3, train_batch_size=2, bf16={"enabled": True})
    engine = launcher.initialize(model=tiny_llama(layers=1), config=config, device=DEVICE)[0]
    batch = {"input_ids": torch.arange(8).view(1, 8), "labels": torch.arange(8).view(1, 8)}

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    first = step()
    engine._puts_away_on_cpu = True  # as on a GPU
    state = next(iter(engine.optimizer.inner.state.values()))["exp_avg"]  # type: ignore[union-attr]
    before, bytes_before = state.clone(), state.untyped_storage().nbytes()
    engine.offload_states()
    found: list[Any] = [first > 0, bytes_before > 0 == state.untyped_storage().nbytes()]
    with pytest.raises(LauncherError, match="reload_states"):
        engine(**batch)
    with pytest.raises(LauncherError, match="reload_states"):
        engine.offload_states()
    engine.reload_states()
    found += [torch.equal(state, before), step() < first]
    with pytest.raises(LauncherError, match="nonsense"):
        engine.offload_states(include=["nonsense"])
    engine.set_train_micro_batch_size(2)
    found.append(engine.get_batch_info())
    found.append(len(engine.deepspeed_io(list(range(8)))))
    with pytest.raises(AttributeError, match="gradients of embeddings are always dense"):
        engine.sparse_allreduce  # noqa: B018
    with pytest.raises(ConfigError, match="stage 3 shards them"):
        engine.module_state_dict()
    engine.destroy()
    return found


def test_states_go_away_and_come_back(pool: WorkerPool) -> None:
    assert pool.run(put_away, 2) == [[True, True, True, True, (4, 2, 1), 2]] * 2


def weights(ctx: RankContext) -> list[bool]:
    engine = launcher.initialize(
        model=tiny_llama(layers=1), config=config_of(2, train_batch_size=1), device=DEVICE
    )[0]
    state = engine.module_state_dict()
    same = all(torch.equal(state[name], param) for name, param in engine.module.named_parameters())
    engine.destroy()
    return [same, not engine.has_moe_layers, not engine.zero_cpu_offload()]


def test_the_state_dict_of_an_engine(pool: WorkerPool) -> None:
    assert pool.run(weights, 1) == [[True, True, True]]


def loaded(ctx: RankContext, stage: int) -> list[bool]:
    model = tiny_llama(layers=1, tied=True)
    wanted = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    engine = launcher.initialize(model=model, config=config_of(stage, train_batch_size=2), device=DEVICE)[0]
    wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    engine.load_module_state_dict({"module": wanted})
    found = [
        torch.equal(safe_get_full_fp32_param(param), wanted[name])  # type: ignore[arg-type]
        for name, param in engine.module.named_parameters()
    ]
    with GatheredParameters(list(engine.module.parameters())):
        found += [torch.equal(param, wanted[name]) for name, param in engine.module.named_parameters()]
    del wanted["model.norm.weight"]
    engine.load_module_state_dict({"module": wanted}, allowed_missing_keys=["model.norm.weight"])
    for keywords in ({}, {"allowed_missing_keys": []}):
        with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
            engine.load_module_state_dict({"module": wanted}, **keywords)  # type: ignore[arg-type]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_of_a_state_dict_reach_the_optimizer(pool: WorkerPool, stage: int) -> None:
    assert all(all(found) for found in pool.run(loaded, 2, stage))
