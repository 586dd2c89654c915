"""Expert parallelism with other features: adapters, generation, a Trainer script, errors, and the load."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

import launcher
from launcher.comm import Mesh
from launcher.errors import ConfigError, LauncherError
from launcher.experts.load import ExpertLoad
from tests.experts.families import global_batch, model_of
from tests.experts.test_parity import LR
from tests.experts.zoo import CONFIG
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.sequence.zoo import WORKS, judge
from tests.tensor.models_table import spread_verdicts
from tests.tensor.running import whole_state

SCRIPT = Path(__file__).with_name("trainer_script.py")


def engine_of(model: Any, stage: int = 1, size: int = 2, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {"size": size, **more},
    }
    return launcher.initialize(model=model, config=config, device=DEVICE)[0]


# ---- adapters ---------------------------------------------------------------------------------------


ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def with_adapters(of: str, implementation: str = "eager") -> Any:
    torch.manual_seed(7)
    lora = LoraConfig(r=4, init_lora_weights=False, **ADAPTERS[of])
    return get_peft_model(model_of("tied", implementation), lora)


def adapted(
    ctx: RankContext, of: str, stage: int, size: int, implementation: str
) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(with_adapters(of, implementation), stage, size)
    losses = []
    for step in range(2):
        ids = global_batch(step, 2)[ctx.rank]
        losses.append(float(engine.train_batch(iter([{"input_ids": ids, "labels": ids}]))))
    weights = {name: value for name, value in whole_state(engine).items() if "lora" in name}
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize(
    ("of", "stage", "size", "implementation"),
    [
        ("attention", 1, 2, "eager"),
        pytest.param("attention", 3, 2, "eager", marks=pytest.mark.full),
        ("experts", 1, 2, "eager"),
        ("experts", 3, 2, "grouped_mm"),
        ("experts", 3, 1, "eager"),
    ],
)
def test_adapters_of_a_mixture(pool: WorkerPool, of: str, stage: int, size: int, implementation: str) -> None:
    """Adapters on attention: the first layer's experts get neither weight nor input gradients.

    Adapters on expert parameters: each rank has some of the adapted rows.
    """
    model = with_adapters(of)
    sgd, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR), []
    for step in range(2):
        loss = sum(model(input_ids=ids, labels=ids).loss for ids in global_batch(step, 2)) / 2
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        losses.append(float(loss.detach()))
    for found in pool.run(adapted, 2, of, stage, size, implementation):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        for name, value in model.named_parameters():
            if value.requires_grad:
                torch.testing.assert_close(found[1][name], value.detach(), rtol=1e-5, atol=1e-6)


# ---- generation, state dicts, another engine ------------------------------------------------------------


def looked_at(ctx: RankContext, directory: Path) -> dict[str, Any]:
    model = model_of("plain")
    engine = engine_of(model)
    engine.eval()
    found: dict[str, Any] = {}
    with torch.no_grad():
        prompt = global_batch(0, 2)[ctx.rank][:, :9]
        found["generated"] = engine.module.generate(
            prompt, max_new_tokens=4 + 2 * ctx.rank, do_sample=False, synced_gpus=True
        ).tolist()
    for call in (engine.module.state_dict, lambda: engine.module.save_pretrained(directory)):
        with pytest.raises(LauncherError, match="2 of its 4 experts on this rank"):
            call()
    parameter = engine.module.model.layers[0].mlp.experts.down_proj
    gathered = launcher.zero.GatheredParameters(parameter, modifier_rank=0)
    with pytest.raises(LauncherError, match="expert parameter split by expert parallelism"), gathered:
        pass
    average = copy.deepcopy(engine.module)  # as for a moving average
    assert average.model.layers[0].mlp.experts.num_experts == 2
    engine.destroy()
    for size in (1, 2):
        with pytest.raises(ConfigError, match="already sharded over the ranks"):
            engine_of(model, size=size)
    return found


def test_generation_and_what_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    model = model_of("plain").eval()
    for rank, found in enumerate(pool.run(looked_at, 2, tmp_path)):
        prompt = global_batch(0, 2)[rank][:, :9]
        wanted = model.generate(prompt, max_new_tokens=4 + 2 * rank, do_sample=False)
        assert found["generated"] == wanted.tolist()


# ---- the load of experts --------------------------------------------------------------------------------


def counted(ctx: RankContext, size: int, factor: float, png: Path) -> tuple[dict[str, float], Tensor]:
    engine = engine_of(model_of("one for all tokens"), size=size, capacity_factor=factor or None)
    load = ExpertLoad(engine.module, engine.mesh, factor, size)
    ids = torch.zeros(1, 10, dtype=torch.int64)
    engine.eval_batch(iter([{"input_ids": ids, "labels": ids}]))
    engine.train_batch(iter([{"input_ids": ids, "labels": ids}]))
    told = load.take()
    if ctx.rank == 0:
        load.plot(png, title="all to one")
    engine.destroy()
    return told, load.total


@pytest.mark.parametrize(("size", "factor"), [(1, 0.0), (2, 0.0), (2, 1.0)])
def test_the_load_of_experts(pool: WorkerPool, tmp_path: Path, size: int, factor: float) -> None:
    """All tokens of both ranks go to one of four experts; evaluation tokens do not count.

    With a capacity factor of 1 it takes 3 of every 10.
    """
    png = tmp_path / "experts.png"
    for told, total in pool.run(counted, 2, size, factor, png):
        wanted = {"expert_load": 4.0, "expert_entropy": 0.0}
        wanted |= {"expert_rank_load": 2.0} if size > 1 else {}
        assert told == wanted | ({"expert_dropped": 0.7} if factor else {})
        assert total.sum(1).tolist() == total.amax(1).tolist() == [20.0, 20.0]
    assert png.stat().st_size > 5000


def test_a_model_without_experts_has_no_load() -> None:
    assert ExpertLoad(torch.nn.Linear(1, 1), Mesh.build(DEVICE)).take() == {}


# ---- the bias of routers --------------------------------------------------------------------------------

RATE = 0.125


def biases_of(model: Any) -> list[Tensor]:
    return [
        buffer.clone() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    ]


def balanced(ctx: RankContext, size: int, directory: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return the biases after two steps, and after loading them from the checkpoint."""
    sections = {"size": size, "bias_update_rate": RATE}
    engine = engine_of(model_of("groups and dense layers"), **sections)
    for step in range(2):
        ids = global_batch(step, 2)[ctx.rank]
        engine.eval_batch(iter([{"input_ids": ids, "labels": ids}]))
        engine.train_batch(iter([{"input_ids": ids, "labels": ids}]))
    after = biases_of(engine.module)
    engine.save_checkpoint(directory)
    engine.destroy()
    engine = engine_of(model_of("groups and dense layers"), **sections)
    engine.load_checkpoint(directory)
    loaded = biases_of(engine.module)
    engine.destroy()
    return after, loaded


@pytest.mark.key("expert_parallel.bias_update_rate")
@pytest.mark.parametrize("size", [1, 2])
def test_biases_follow_the_load(pool: WorkerPool, tmp_path: Path, size: int) -> None:
    """Each expert's bias follows the sign of its load deficit over all ranks' tokens; evaluations do not count."""
    model = model_of("groups and dense layers")
    bias = biases_of(model)[0]
    layer = model.model.layers[1].mlp
    sgd = torch.optim.SGD(model.parameters(), LR)
    for step in range(2):
        picked: list[Tensor] = []
        hook = layer.experts.register_forward_pre_hook(
            lambda _, args, picked=picked: picked.append(args[1].flatten())
        )
        loss = sum(model(input_ids=ids, labels=ids).loss for ids in global_batch(step, 2)) / 2
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        hook.remove()
        counts = torch.bincount(torch.cat(picked), minlength=8).float()
        bias = bias + RATE * (counts.mean() - counts).sign()
        layer.gate.e_score_correction_bias.copy_(bias)
    for after, loaded in pool.run(balanced, 2, size, tmp_path):
        assert torch.equal(after[0], bias) and torch.equal(loaded[0], bias)


def unbiased(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match="no router correction bias"):
        engine_of(model_of("plain"), bias_update_rate=RATE)


def test_a_model_without_biases_is_refused(pool: WorkerPool) -> None:
    pool.run(unbiased, 2)


# ---- every type -----------------------------------------------------------------------------------------


def test_no_type_is_wrong() -> None:
    words = spread_verdicts().values()
    assert len(words) > 60 and sum(word == WORKS for word in words) > 50
    assert all(word == WORKS or word.startswith("refused: ") for word in words)


@pytest.mark.parametrize("kind", ["aria_text", "nemotron_h", "zaya", "dbrx"])
def test_a_sample_is_as_the_table_says(pool: WorkerPool, kind: str) -> None:
    assert pool.run(judge, 2, kind, CONFIG) == [spread_verdicts()[kind]] * 2


# ---- a script of the Trainer ----------------------------------------------------------------------------


@pytest.mark.full  # the Trainer's other scenarios are in tests/integrations
def test_a_script_of_the_trainer(tmp_path: Path) -> None:
    """Losses and the saved model match the same script on one process without a JSON."""
    config = tmp_path / "ds_config.json"
    config.write_text(
        json.dumps({**AUTOS, "zero_optimization": {"stage": 1}, "expert_parallel": {"size": 2}})
    )
    launch = [
        sys.executable,
        "-m",
        "launcher.cli.main",
        "--num_gpus",
        "2",
        "--device",
        "cpu",
        "--no_local_rank",
    ]
    commands = {
        "plain": [sys.executable, SCRIPT, "none", tmp_path / "plain", "4"],
        "spread": [*launch, SCRIPT, config, tmp_path / "spread", "2"],
    }
    runs = {
        name: subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, command in commands.items()
    }
    losses, weights = {}, {}
    for name, run in runs.items():
        said, _ = run.communicate()
        assert run.returncode == 0, said
        losses[name] = json.loads((tmp_path / name / "losses.json").read_text())
        weights[name] = load_file(tmp_path / name / "model.safetensors")
    assert losses["spread"] == pytest.approx(losses["plain"], rel=1e-6)
    assert weights["spread"].keys() == weights["plain"].keys()
    for name, value in weights["plain"].items():
        assert (weights["spread"][name] - value).norm() <= 1e-5 * value.norm(), name


AUTOS = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
