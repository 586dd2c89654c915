"""`launcher.initialize`: builds an engine from a model and a config, with DeepSpeed's signature."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.comm import Axis, Mesh, init_distributed, pick_device
from launcher.config import Config, autos_of_hidden_size
from launcher.config.fault_tolerance import check_replicas_are_started
from launcher.config.ranks import with_spread_experts
from launcher.engine.dtypes import (
    cast_buffers,
    compute_dtype,
    scales_loss,
    state_dtype,
)
from launcher.engine.engine import Engine
from launcher.engine.given import check_mpu, loaded_config
from launcher.engine.offloading import open_placements
from launcher.engine.policy import axes_of, policy_of
from launcher.engine.report import announce
from launcher.engine.same_inputs import CutBy
from launcher.engine.staging import (
    agree,
    holders_of,
    recompute,
    row_in,
    runtime_of,
    stages_of,
    versions_of,
)
from launcher.engine.telemetry import open_monitor
from launcher.errors import ArgumentsError, ConfigError, LauncherError, first_names
from launcher.models.units import SPREAD, SPREAD_OVER, ends_of
from launcher.monitor.memory import trim_malloc
from launcher.monitor.processors import warn_of_slow_products
from launcher.offload.placement import Placements
from launcher.optim.build import choose
from launcher.optim.sharded import OptimizerFactory, ShardedOptimizer
from launcher.pipeline.crossing import StagedPart
from launcher.tensor.split_model import SplitModel, TensorParallelOptions
from launcher.zero import (
    LocalModel,
    MadeOnMeta,
    ModelValues,
    ParamSource,
    PartitionedValues,
    ShardAxes,
    ShardLayout,
    ZeroModel,
    is_partitioned,
    release,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)
from launcher.zero import apply as apply_zero
from launcher.zero.features.leaf import mark_fine_modules
from launcher.zero.source import check_values

if TYPE_CHECKING:
    from launcher.pipeline.sequential.staged import SequentialPipeline


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
    *,
    source: ParamSource | None = None,
    placements: Callable[[Config, Mesh, torch.device], Placements] = open_placements,
    seed: int = 0,
    device: torch.device | None = None,
    auto: Mapping[str, Any] | None = None,
    seq_length: int | None = None,
) -> tuple[Engine, ShardedOptimizer | None, Any, Any]:
    """Create an engine for `model`, as deepspeed.initialize does.

    Args:
        args: if `config` is not given, `args.deepspeed_config` (formerly `args.deepscale_config`) is used. No
            other attribute is read.
        model: any nn.Module. A model on meta is materialized unit by unit, so that no rank ever holds all of
            it. Of a PipelineModule, a rank builds only its own layers.
        optimizer: a torch optimizer or a callable that takes the parameters; overrides the config.
        model_parameters: parameters or param groups to train; default: all that require gradients.
        training_data: a dataset; the engine shards it over the data-parallel ranks.
        lr_scheduler: an object with step(), or a callable that takes the optimizer; overrides the config.
        distributed_port, dist_init_required: ignored; the process group is initialized from the environment.
        collate_fn: for `training_data`.
        config: path, mapping or Config; `config_params` is its old name.
        mpu: model parallelism set up by the script (as in Megatron); its sizes must match the config.
        mesh_param: (data-parallel ranks, sequence-parallel ranks), for a model that splits sequences itself.
        source: provides the parameter values, instead of `model`.
        placements: determines where shards are stored; default: as configured.
        seed: initializes a model on meta, and shuffles `training_data`.
        device: default: this rank's GPU, else the CPU.
        auto: values for keys that are "auto", by dotted path.
        seq_length: tokens per sequence, for balancing the stages of a Hugging Face model; default: 2048, or
            the maximum of the model.

    Returns:
        (engine, optimizer, training dataloader, lr scheduler); the last three may be None.

    Raises:
        ConfigError: the config or the arguments request something impossible; the message suggests a fix.
    """
    if model is None:
        raise ArgumentsError("initialize() needs a model", fix="pass model=...")
    device = device or pick_device()
    init_distributed(device)
    loaded = loaded_config(args, config if config is not None else config_params)
    if loaded.fault_tolerance.replicas > 1:
        check_replicas_are_started(loaded)
    pipeline_module, loaded = row_in(model, loaded)
    cut_by, shared, tiled = CutBy.HOOKS, None, []
    if mpu is not None or mesh_param is not None or loaded.cp_degree > 1:
        from launcher.engine.sharing import sequences_of

        loaded, cut_by = sequences_of(loaded, mpu, mesh_param, model)
    if sizes := {size for module in model.modules() if (size := getattr(module, SPREAD_OVER, 1)) > 1}:
        loaded = with_spread_experts(loaded, sizes)
    dp = loaded.dp_degree(dist.get_world_size())
    mesh = Mesh.build(
        device, pp=loaded.pipeline.degree, dp=dp, cp=loaded.cp_degree, tp=loaded.tensor_parallel.degree
    )
    check_mpu(mpu, mesh, model)
    resolved = resolve(loaded, mesh, model, auto or {})
    monitor = open_monitor(resolved, mesh)
    if device.type == "cpu" and mesh.rank == 0:
        warn_of_slow_products(compute_dtype(resolved))
    own_stage: SequentialPipeline | None = None
    if pipeline_module is None:
        chosen = choose(resolved, optimizer, model_parameters, model)
    else:  # it has no parameters until it is built; without model_parameters all are trained
        model_parameters = list(model_parameters or ()) or None
        chosen = choose(resolved, optimizer, model_parameters, pipeline_module.whole())
        taken = model_parameters is not None or isinstance(optimizer, torch.optim.Optimizer)
        from launcher.engine.cutting import cut_row

        own_stage = cut_row(pipeline_module, mesh, resolved, training_data, collate_fn, taken=taken)
        model = own_stage.part
    release(model)  # from a previous engine
    if resolved.fp8.enabled:
        from launcher.models.float8 import float8_layers, use_float8

        whole = model if pipeline_module is None else pipeline_module.whole()
        names = float8_layers(whole, resolved.fp8, degree=mesh.axes["tp"].degree)
        use_float8(model, names, resolved.fp8.recipe, device, logs=mesh.rank == 0)
    source = source or _source(model, seed)
    several = (mesh.axes["tp"].degree, mesh.axes["pp"].degree, resolved.expert_parallel.degree)
    if isinstance(source, MadeOnMeta) and max(several) > 1:
        source.keep_whole()
    axes = axes_of(resolved, mesh)
    spread, expert_axes = spread_experts(model, mesh, resolved, axes)
    split_model = split_layers(model, mesh, resolved, spread.splits)
    if resolved.tiled_loss or resolved.tiled_mlp or mesh.axes["cp"].degree > 1:
        from launcher.engine.sharing import share_sequences, tile

        tiled = tile(model, resolved, cut_by)
        shared = share_sequences(model, mesh, resolved, cut_by, mpu)
    staged: StagedPart = own_stage or stages_of(model, split_model, mesh, resolved, seq_length)
    checkpointer = recompute(model, staged, resolved, mesh.axes["tp"])
    mark_leaves(model, resolved)
    holders = holders_of(staged, mesh)
    agree(model, holders, device)
    layout = ShardLayout.of(
        policy_of(resolved, model), axes, device, placements(resolved, mesh, device), expert_axes
    )
    parts = LocalModel(
        splits={**split_model.splits, **spread.splits},
        tp=split_model.axis,
        ep=spread.axis,
        experts=frozenset(spread.splits),
        pp=mesh.axes["pp"],
        holders=holders,
        elsewhere=staged.elsewhere,
    )
    zero = apply_zero(model, units_of(model, staged.blocks), layout, parts, source)
    cast_buffers(resolved, model)
    steer_routers(model, mesh, resolved, zero)
    stepper = _stepper(zero, chosen, resolved, optimizer)
    scheduler = _scheduler(resolved, lr_scheduler, stepper)
    loader = _dataloader(
        training_data, resolved, mesh, collate_fn, seed=seed, in_stages=pipeline_module is not None
    )
    runtime = runtime_of(staged, mesh, resolved)
    versions = versions_of(zero, staged, resolved)
    engine = Engine(
        zero, resolved, mesh, runtime, stepper, scheduler, loader, checkpointer, monitor, versions, cut_by
    )
    engine.shared_sequences = shared
    for changed in [*filter(None, [shared]), *tiled]:  # in reverse order of application
        zero.hooks.add_removable(changed)
    # `launch memory-estimate` has neither process groups nor values.
    if shared is not None and shared.axis.group is not None:
        from launcher.engine.sharing import verify_shared

        verify_shared(engine, shared)
    if resolved.compile.on:
        engine.compile(resolved.compile.backend or "inductor", resolved.compile.kwargs)
    trim_malloc()  # memory of the parameters before they were moved into flat buffers
    if not isinstance(config, Config):
        announce(engine)
    return engine, stepper, loader, scheduler


def _stepper(
    zero: ZeroModel,
    chosen: tuple[OptimizerFactory, list[dict[str, Any]]] | None,
    config: Config,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None,
) -> ShardedOptimizer | None:
    """Create the sharded optimizer from a factory and its param groups; None without an optimizer."""
    if chosen is None:
        return None
    factory, groups = chosen
    sub_group_size = int(config.zero_optimization.sub_group_size)
    stepper = ShardedOptimizer(zero, groups, factory, sub_group_size, state_dtype(config, optimizer))
    stepper.scales = scales_loss(config)
    stepper.name = config.optimizer.type if optimizer is None and config.optimizer else ""
    return stepper


def mark_leaves(model: nn.Module, config: Config) -> None:
    """Mark the modules that the config makes ZeRO-3 leaf modules: one unit with all their submodules."""
    zero = config.zero_optimization
    if zero.stage != 3:
        return
    leaf, said = zero.leaf_module, zero.leaf_module.model_fields_set
    for kind in leaf.classes:  # one by one: each class in the config must be found
        set_z3_leaf_modules(model, [kind], raise_if_not_found="classes" in said)
    set_z3_leaf_modules_by_name(model, leaf.names)
    set_z3_leaf_modules_by_suffix(model, leaf.name_suffixes)
    if zero.stage3_module_granularity_threshold > 0:
        mark_fine_modules(model, zero.stage3_module_granularity_threshold)


def resolve(loaded: Config, mesh: Mesh, model: nn.Module, auto: Mapping[str, Any]) -> Config:
    """Return the config with every "auto" resolved, for a mesh and a model."""
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    values = {**(autos_of_hidden_size(hidden) if isinstance(hidden, int) else {}), **auto}
    return loaded.resolve(dp_degree=mesh.dp.degree, auto=values)


def _source(model: nn.Module, seed: int) -> ParamSource:
    partitioned = any(is_partitioned(p) for p in model.parameters())
    if not any(p.is_meta for p in model.parameters()):
        if partitioned:
            return PartitionedValues(model)
        check_values(model)
        return ModelValues()
    if not all(p.is_meta for p in model.parameters()):
        names = [name for name, p in model.named_parameters() if p.is_meta]
        raise LauncherError(
            f"{len(names)} parameters are on the meta device, but the rest are not: {first_names(names)}",
            fix="build the whole model under zero.Init() or torch.device('meta'), or no part of it",
        )
    from launcher.models.initialize import initializer
    from launcher.models.initialize_plan import plan_of

    return MadeOnMeta(model, initializer(model, seed), plan_of(model).owner_of_tied)


def split_layers(model: nn.Module, mesh: Mesh, config: Config, whole: Collection[str] = ()) -> SplitModel:
    """Split the layers of the model along tp, except the parameters named in `whole`."""
    tp, section = mesh.axes["tp"], config.tensor_parallel
    if tp.degree == 1:
        return SplitModel(tp)
    from launcher.tensor.apply import apply as apply_tensor

    options = TensorParallelOptions(
        overlaps=section.tp_overlap_comm,
        sequence=section.sequence_parallel,
        split_logits=section.vocab_parallel_lm_head,
        rules=section.partition_config,
        whole=frozenset(whole),
    )
    return apply_tensor(model, tp, options, device=mesh.device)


def spread_experts(
    model: nn.Module, mesh: Mesh, config: Config, axes: ShardAxes
) -> tuple[SplitModel, ShardAxes | None]:
    """Distribute the experts of the model along ep; return the splits, and the axes along which ZeRO shards
    them.

    Raises:
        ConfigError: they cannot be distributed, or an earlier engine has left only this rank's experts.
    """
    for name, module in model.named_modules():
        if hasattr(module, SPREAD):
            raise ConfigError(
                f"the experts of {name} were already sharded over the ranks by an earlier engine",
                where="expert_parallel.size",
                fix="build the model again, or load the output of engine.save_16bit_model()",
            )
        wanted = getattr(module, SPREAD_OVER, 1)
        if config.expert_parallel.degree == 1 < wanted:  # of a PipelineModule
            raise ConfigError(
                f"{name} has ep_size {wanted}, which was not known before the layers were built",
                where="expert_parallel.size",
                fix=f'set "expert_parallel": {{"size": {wanted}}} in the JSON',
            )
    if config.expert_parallel.degree == 1:
        return SplitModel(Axis("ep")), None
    from launcher.experts.apply import apply as apply_experts

    edp, ep = mesh.split_for_experts(config.expert_parallel.degree)
    return apply_experts(model, ep, mesh, config.expert_parallel.dispatch), axes.of_experts(edp)


def steer_routers(model: nn.Module, mesh: Mesh, config: Config, zero: ZeroModel) -> None:
    """Apply the router settings of the config: expert capacity, router losses, and load-dependent biases."""
    section = config.expert_parallel
    if section.capacity_factor:
        from launcher.experts.capacity import limit

        limit(model, float(section.capacity_factor), whole=mesh.axes["pp"].degree == 1)
    if section.global_balance_loss or section.router_z_loss_coef:
        from launcher.experts.balance import RouterLoss

        over = mesh.dp if section.global_balance_loss is True else None
        loss = RouterLoss(model, over, float(section.router_z_loss_coef))
        zero.callbacks.before_step.append(loss.next_step)
        zero.callbacks.before_replay.append(loss.next_step)
    if section.bias_update_rate:
        from launcher.experts.bias import BiasUpdate

        bias = BiasUpdate(model, mesh, float(section.bias_update_rate))
        zero.callbacks.before_step.append(bias.update)
        zero.callbacks.before_replay.append(bias.forget)


def units_of(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the blocks as units, plus the input embedding first and the output head last, if known."""
    names = {module: name for name, module in model.named_modules()}
    first, last = ([(names[end], end)] if end is not None and end in names else [] for end in ends_of(model))
    return [*first, *blocks, *last]


def _scheduler(config: Config, given: Any, optimizer: ShardedOptimizer | None) -> Any:
    makes = callable(given) and (isinstance(given, type) or not hasattr(given, "step"))
    if optimizer is None:
        return None if makes else given
    if given is not None:
        return given(optimizer) if makes else given
    if config.scheduler is None:
        return None
    from launcher.optim.schedules import build_scheduler

    return build_scheduler(config.scheduler, optimizer)


def _dataloader(
    data: Any,
    config: Config,
    mesh: Mesh,
    collate_fn: Callable[..., Any] | None,
    *,
    seed: int,
    in_stages: bool,
) -> Any:
    """Return a shuffling loader; with stages, rows keep their order, as in DeepSpeed's pipeline engine."""
    if data is None:
        return None
    from launcher.engine.loaders import loader_of, share_of

    sampling, drop_last = config.data_efficiency.sampling, bool(config.dataloader_drop_last)
    seed = config.data_efficiency.seed if sampling else seed
    sampler = share_of(
        data, mesh.dp.degree, mesh.dp.rank, shuffle=not in_stages, seed=seed, drop_last=drop_last
    )
    return loader_of(
        data,
        config.train_micro_batch_size_per_gpu,
        sampler,
        collate_fn=collate_fn,
        num_workers=sampling.num_workers if sampling else None,
        pin_memory=sampling.pin_memory if sampling else False,
        drop_last=drop_last,
    )
