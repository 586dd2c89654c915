"""`deepspeed.moe.layer.MoE`: expert layers that a script builds train as in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import launcher
from launcher.checkpoint.fp32 import get_fp32_state_dict_from_zero_checkpoint
from launcher.errors import ArgumentsError, ConfigError, LauncherError
from launcher.experts.gates import DROPPED, capacity_of, keep_heaviest
from launcher.integrations import experts as moe
from launcher.integrations import groups
from launcher.integrations.stand_ins import initialize
from tests.experts.test_parity import Trained
from tests.parity_deepspeed.mixtures import CLASSES, WIDTH, Classifier
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.tensor.running import plain_steps, whole_state

STEPS, LR = 3, 0.1


class Case(NamedTuple):
    """A kind of layer, and a training configuration."""

    ep_size: int = 2
    stage: int = 0
    k: int = 1
    drop: bool = True
    residual: bool = False
    accumulation: int = 1


def fresh(case: Case) -> Classifier:
    arguments = {
        "ep_size": case.ep_size, "k": case.k, "use_residual": case.residual, "drop_tokens": case.drop,
        "use_rts": False, "top2_2nd_expert_sampling": False,
    }  # fmt: skip
    return Classifier(moe.MoE, arguments)


def build(case: Case) -> Classifier:
    """Build the layer. Experts start with equal values in DeepSpeed; here they differ, so that their order matters."""
    model = fresh(case)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "experts" in name:
            generator = torch.Generator().manual_seed(number)
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def batch(step: int, row: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + row)
    return torch.randn(2, 7, WIDTH, generator=generator), torch.randint(CLASSES, (2,), generator=generator)


def trained(ctx: RankContext, case: Case, own_optimizer: bool = False) -> Trained:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
    }
    model, more = build(case), dict[str, Any]()
    if own_optimizer:
        del config["optimizer"]
        split = moe.split_params_into_different_moe_groups_for_optimizer
        apart = split({"params": list(model.parameters()), "name": "all"})
        assert [group.get("moe", False) for group in apart] == [False, True]
        more = {"optimizer": torch.optim.SGD(apart, LR)}
    engine: Any = launcher.initialize(model=model, config=config, device=DEVICE, **more)[0]
    assert engine.has_moe_layers
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros(())
        for part in range(case.accumulation):
            loss = engine(*batch(step, engine.mesh.dp.rank * case.accumulation + part))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / case.accumulation / engine.mesh.dp.degree
        dist.all_reduce(total)
        losses.append(float(total))
        norms.append(engine.get_global_grad_norm())
    weights = {name: value for name, value in whole_state(engine).items() if "/" not in name}
    engine.destroy()
    return losses, norms, weights


@cache
def truth(case: Case, rows: int) -> Trained:
    """Train the module itself, each rank's batch separately, since a capacity applies to those."""
    model = build(case._replace(ep_size=1))
    return plain_steps(
        model, lambda step: sum(model(*batch(step, row)) for row in range(rows)) / rows, STEPS, LR
    )


CASES = [
    Case(),
    Case(stage=1, k=2),
    Case(stage=2, k=3, accumulation=2),
    Case(stage=3, k=1, residual=True),
    Case(ep_size=1, stage=2, k=2, drop=False),
    Case(ep_size=2, stage=3, k=2, drop=False, residual=True, accumulation=2),
]
OF_FOUR = [Case(ep_size=2, stage=1), Case(ep_size=4, stage=2, k=2, residual=True)]


@pytest.mark.parametrize(
    ("case", "world"), [*((case, 2) for case in CASES), *((case, 4) for case in OF_FOUR)], ids=str
)
def test_training_is_that_of_one_process(pool: WorkerPool, case: Case, world: int) -> None:
    check(pool.run(trained, world, case), truth(case._replace(stage=0), world * case.accumulation))


def test_an_optimizer_with_groups_of_experts(pool: WorkerPool) -> None:
    check(pool.run(trained, 2, Case(stage=1), True), truth(Case(), 2))


def check(ranks: list[Trained], wanted: Trained) -> None:
    for losses, norms, weights in ranks:
        assert losses == pytest.approx(wanted[0], rel=1e-6)
        assert norms == pytest.approx(wanted[1], rel=2e-6)
        for name, value in wanted[2].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_state_dicts_name_experts_one_by_one() -> None:
    model, other = build(Case()), fresh(Case())
    state = model.state_dict()
    name = "layers.1.deepspeed_moe.experts.deepspeed_experts.{}.2.weight"
    assert all(state[name.format(expert)].shape == (WIDTH, 24) for expert in range(8))
    assert not any("__" in key for key in state)
    assert other.load_state_dict(state) == ([], [])
    assert other.load_state_dict(dict(model.named_parameters())) == ([], [])  # as an engine exports them
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({key: value for key, value in state.items() if key != name.format(3)})


def resumed(ctx: RankContext, directory: str, ep_size: int, save: bool) -> tuple[float, tuple[Any, ...]]:
    """Return (the loss of the next step, the results of deepspeed.utils.groups)."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    model = build(Case(ep_size=ep_size)) if save else fresh(Case(ep_size=ep_size))
    engine: Any = launcher.initialize(model=model, config=config, device=DEVICE)[0]
    if save:
        engine.backward(engine(*batch(0, 0)))
        engine.step()
        engine.save_checkpoint(directory)
    else:
        engine.load_checkpoint(directory)
    engine.backward(engine(*batch(1, 0)))
    engine.step()
    loss = float(engine(*batch(2, 0)).detach())
    said = (
        groups._get_expert_parallel_world_size(), groups._get_expert_parallel_rank(""),
        groups._get_expert_data_parallel_world_size(), dist.get_world_size(groups._get_expert_parallel_group()),
        dist.get_world_size(groups._get_expert_data_parallel_group("ep_size_2")),
        dist.get_world_size(groups.get_tensor_model_parallel_group()),
    )  # fmt: skip
    engine.destroy()
    return loss, said


def test_checkpoints_go_on_with_other_sizes(pool: WorkerPool, tmp_path: Any) -> None:
    before = pool.run(resumed, 2, str(tmp_path), 2, True)
    assert [said for _, said in before] == [(2, 0, 1, 2, 1, 1), (2, 1, 1, 2, 1, 1)]
    after = pool.run(resumed, 2, str(tmp_path), 1, False)
    assert [said for _, said in after] == [(1, 0, 2, 1, 2, 1), (1, 0, 2, 1, 2, 1)]
    assert after[0][0] == pytest.approx(before[0][0], rel=1e-6)


def of_its_own(ctx: RankContext) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model[0].weight).update(allreduce=False, group_name="ep_size_2")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}
    with pytest.raises(
        ConfigError, match="weight is marked as an expert parameter that differs between ranks"
    ):
        initialize(model=model, config=config)
    vars(model[0].weight).update(group_name="ep_size_1")
    initialize(model=model, config=config)[0].destroy()


def test_experts_that_a_script_has_spread_by_itself_are_refused(pool: WorkerPool) -> None:
    pool.run(of_its_own, 2)


def exported(ctx: RankContext, directory: Path) -> dict[str, Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine: Any = launcher.initialize(model=build(Case()), config=config, device=DEVICE)[0]
    engine.backward(engine(*batch(0, 0)))
    engine.step()
    engine.save_checkpoint(directory)
    engine.save_16bit_model(directory / "tensors")
    engine.save_16bit_model(directory / "pickle", "pytorch_model.bin")
    state = whole_state(engine)
    engine.destroy()
    return {name: value for name, value in state.items() if "/" not in name}


def test_what_is_exported_names_experts_one_by_one(pool: WorkerPool, tmp_path: Path) -> None:
    wanted = pool.run(exported, 2, tmp_path)[0]
    plain = fresh(Case(ep_size=1))
    for state in (
        load_file(tmp_path / "tensors" / "model.safetensors"),
        torch.load(tmp_path / "pickle" / "pytorch_model.bin"),
        get_fp32_state_dict_from_zero_checkpoint(tmp_path),
    ):
        assert state.keys() == plain.state_dict().keys()
        plain.load_state_dict(state)
        assert all(torch.equal(value, wanted[name]) for name, value in plain.named_parameters())


class OddExpert(nn.Module):
    """Has a number, a module tied to another one, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.second(self.first(x).tanh()) * self.scale, None


def odd_model(ep_size: int) -> Any:
    torch.manual_seed(3)
    model = moe.MoE(WIDTH, OddExpert(), 4, ep_size, 2, drop_tokens=False, top2_2nd_expert_sampling=False)
    with torch.no_grad():
        for parameter in model.deepspeed_moe.experts.parameters():
            parameter.mul_(torch.arange(1.0, 5).view(-1, *[1] * (parameter.dim() - 1)))
    return model


def odd(ctx: RankContext, rows: list[int]) -> tuple[float, str]:
    """Return (the loss of this rank, the result of loading a state dict)."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
    }
    engine: Any = launcher.initialize(model=odd_model(2), config=config, device=DEVICE)[0]
    loss = torch.zeros(())
    for step in range(2):
        x = torch.randn(rows[ctx.rank], WIDTH, generator=torch.Generator().manual_seed(2 * step + ctx.rank))
        loss = engine(x)[0].square().sum()
        engine.backward(loss)
        engine.step()
    with pytest.raises(LauncherError) as error:
        engine.module.load_state_dict(odd_model(1).state_dict(), strict=False)
    engine.destroy()
    return float(loss.detach()), str(error.value)


@pytest.mark.parametrize("rows", [[3, 4], [5, 0]], ids=str)
def test_odd_experts_and_ranks_without_tokens(pool: WorkerPool, rows: list[int]) -> None:
    model = odd_model(1)
    sgd, losses = torch.optim.SGD(model.parameters(), 0.1), [0.0, 0.0]
    for step in range(2):
        parts = []
        for rank in range(2):
            x = torch.randn(rows[rank], WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
            parts.append(model(x)[0].square().sum())
        (sum(parts) / 2).backward()
        sgd.step()
        sgd.zero_grad()
        losses = [float(part.detach()) for part in parts]
    for rank, (loss, said) in enumerate(pool.run(odd, 2, rows)):
        assert loss == pytest.approx(losses[rank], rel=1e-5)
        assert "has only some of its experts on this rank" in said


def test_a_function_reaches_every_expert() -> None:
    layer = moe.MoE(4, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), 3)

    def begin(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
            module.bias = (
                nn.Parameter(torch.full_like(module.bias, 0.25)) if module.bias is not None else None
            )

    assert layer.apply(begin) is layer
    assert all(
        (value == (0.25 if name.endswith("bias") else 0.5)).all()
        for name, value in layer.state_dict().items()
    )


def other_layers(ctx: RankContext) -> str:
    """Each rank calls only one of two layers."""
    config = {"train_micro_batch_size_per_gpu": 2}
    engine: Any = launcher.initialize(model=build(Case()), config=config, device=DEVICE)[0]
    x, layers = batch(0, ctx.rank)[0], engine.module.layers
    with pytest.raises(LauncherError) as error:
        layers[ctx.rank](x)
    engine.destroy()
    return str(error.value)


def test_ranks_in_different_layers_are_told(pool: WorkerPool) -> None:
    first, second = pool.run(other_layers, 2)
    assert "layers.0.deepspeed_moe.experts on ep rank 0" in first and "ep rank 1 in expert layer 1," in first
    assert (
        "layers.1.deepspeed_moe.experts on ep rank 1" in second and "ep rank 0 in expert layer 0," in second
    )


def with_buffers(ctx: RankContext) -> str:
    expert = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    config = {"train_micro_batch_size_per_gpu": 1}
    with pytest.raises(ConfigError) as error:
        launcher.initialize(model=nn.Sequential(moe.MoE(4, expert, 2, 2)), config=config, device=DEVICE)
    return str(error.value)


def test_experts_with_buffers_are_not_spread(pool: WorkerPool) -> None:
    assert "have buffers (1__running_mean" in pool.run(with_buffers, 2)[0]


def refused(ctx: RankContext, sizes: tuple[int, int], section: dict[str, Any]) -> str:
    model = nn.ModuleList(moe.MoE(4, nn.Linear(4, 4), 4, size) for size in sizes)
    config = {"train_micro_batch_size_per_gpu": 1, **section}
    with pytest.raises(ConfigError) as error:
        launcher.initialize(model=model, config=config, device=DEVICE)
    return str(error.value)


def test_layers_that_contradict_each_other_or_the_json(pool: WorkerPool) -> None:
    assert "have ep_size 2, 4: all must have the same" in pool.run(refused, 2, (2, 4), {})[0]
    assert (
        "have ep_size 2, and the JSON has degree 4"
        in pool.run(refused, 2, (1, 2), {"expert_parallel": {"size": 4}})[0]
    )
    assert (
        "ep_size of the expert layers is 4, which does not divide the 2"
        in pool.run(refused, 2, (4, 1), {})[0]
    )
    mics = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    assert "hold different experts" in pool.run(refused, 2, (2, 2), mics)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_experts": 3, "ep_size": 2}, "is not divisible by ep_size"),
        ({"num_experts": 2, "k": 3}, "k is 3, but there are 2 experts"),
        ({"ep_size": 0}, "ep_size is 0"),
        ({"min_capacity": None}, "min_capacity is None"),
        ({"capacity_factor": -1.0}, "capacity_factor is -1.0"),
        ({"noisy_gate_policy": "RSsample"}, "unknown noisy_gate_policy 'RSsample'"),
        ({"enable_expert_tensor_parallelism": True}, "tensor parallelism of experts is not supported"),
    ],
)
def test_wrong_arguments_are_said(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentsError, match=words):
        moe.MoE(4, nn.Linear(4, 4), **arguments)


def test_a_capacity_without_end() -> None:
    assert capacity_of(8, 2, 1e300) == capacity_of(8, 2, float("inf")) > 10**9


def test_the_heaviest_pairs_are_kept() -> None:
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 9]])
    weights = torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.6, 0.4], [0.9, 0.1]])
    kept = keep_heaviest(experts, weights, 3, 2)
    assert kept.tolist() == [[DROPPED, 1], [0, 2], [DROPPED, 1], [0, DROPPED]]
    assert torch.equal(keep_heaviest(experts, weights, 3, 4), experts.where(experts < 3, DROPPED))


def made_on_meta(ctx: RankContext, case: Case) -> tuple[float, bool, int]:
    """Return (a loss of the same tokens on all ranks, whether the first layer's experts start equal, names in a state
    dict of meta tensors).
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    with launcher.zero.Init(config_dict_or_path=config):
        model = fresh(case)
    assert all(parameter.is_meta for parameter in model.parameters())
    engine: Any = launcher.initialize(model=model, config=config, device=DEVICE)[0]
    loss = float(engine(*batch(0, 0)).detach())
    weights = engine.module.layers[0].deepspeed_moe.experts
    with launcher.zero.GatheredParameters(list(weights.parameters())):
        first, second, *_ = weights._parameters["0__weight"]
        alike = torch.equal(first, second) and float(first.detach().abs().max()) > 0
    names = engine.module.state_dict().keys() if case.ep_size == 1 else set()
    engine.destroy()
    return loss, alike, len(names)


def test_layers_that_are_made_on_meta(pool: WorkerPool) -> None:
    for ep_size in (1, 2):
        one, other = pool.run(made_on_meta, 2, Case(ep_size=ep_size))
        assert one[0] == pytest.approx(other[0]) and one[1] and other[1]
        assert one[2] == (len(list(fresh(Case()).parameters())) if ep_size == 1 else 0)
