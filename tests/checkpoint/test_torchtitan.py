"""A torchtitan run resumes here: its names, its rotary rows, its optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

import launcher
from launcher.checkpoint.source import SourceCheckpoint
from launcher.cli.main import main
from tests.checkpoint.test_fsdp import mean
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch

HEADS, GROUPS, WIDTH, HIDDEN, INNER, LAYERS, VOCAB = 4, 2, 8, 32, 48, 2, 64
BEFORE, AFTER = 3, 5
EPS, THETA = 1e-5, 10000.0
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HEADS * WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(HIDDEN, GROUPS * WIDTH, bias=False) for _ in range(2))
        self.wo = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        q, k, v = (w(x).view(size, length, -1, WIDTH) for w in (self.wq, self.wk, self.wv))
        q, k = _turned(q), _turned(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [rows, heads, length, width]
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.wo(made.transpose(1, 2).reshape(size, length, -1))
        return mixed


def _turned(x: Tensor) -> Tensor:
    """Apply Llama's original rotary embedding, in which neighbours form a complex number."""
    rates = THETA ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    angles = torch.outer(torch.arange(x.shape[1]), rates)
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None, :]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(3)


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return made


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = _Attention(), _FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(HIDDEN, EPS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """Llama 3 with torchtitan's names."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({str(number): _Layer() for number in range(LAYERS)})
        self.norm, self.lm_head = nn.RMSNorm(HIDDEN, EPS), nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


LAYOUTS = ("older", "apart", "moments in one", "in one")
"""torchtitan's names until 0.2; those of 0.3; with q, k and v in one parameter, as 0.3 saves it, and as 0.2 did."""


def _named(name: str, layout: str) -> str:
    if layout == "older":
        return name.replace("lm_head", "output")
    return re.sub(r"attention\.w([qkv])", r"attention.qkv_linear.w\1", name)


def _fused(state: dict[str, Any]) -> dict[str, Any]:
    """Return the same with fused q, k and v: for each group of heads its q heads, then k, then v."""
    made = dict(state)
    for name in [name for name in state if "qkv_linear.wq." in name]:
        q, k, v = (made.pop(name.replace(".wq.", f".w{kind}.")) for kind in "qkv")
        joined = q
        if isinstance(q, Tensor) and q.dim():
            each, parts = HEADS // GROUPS * WIDTH, []
            for group in range(GROUPS):
                own = slice(group * WIDTH, (group + 1) * WIDTH)
                parts += [q[group * each : (group + 1) * each], k[own], v[own]]
            joined = torch.cat(parts)
        made[name.replace(".wq.", ".wqkv.")] = joined
    return made


def _titan(
    place: Path, tied: bool, layout: str, edit: Callable[[dict[str, Any]], None] | None = None
) -> list[float]:
    """Train, save as torchtitan does, and continue; return the losses after that."""
    torch.manual_seed(11)
    model = Titan(tied)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            flat = get_optimizer_state_dict(model, optimizer, options=options)
            weights = {_named(name, layout): value for name, value in model.state_dict().items()}
            moments = {_named(name, layout): value for name, value in flat.items()}
            state: dict[str, Any] = _fused(weights) if layout == "in one" else weights
            state["optimizer"] = _fused(moments) if "in one" in layout else moments
            state["train_state"] = {"step": torch.tensor(BEFORE)}
            if edit is not None:
                edit(state)
            dcp.save(state, checkpoint_id=place / f"step-{BEFORE}", no_dist=True)
        loss = model(batch(step))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses[BEFORE:]


def _config(root: Path, tied: bool, **others: Any) -> str:
    config = AutoConfig.for_model(
        **{
            "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
            "head_dim": WIDTH, "rms_norm_eps": EPS, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
            "tie_word_embeddings": tied, "use_cache": False, **others,
        }
    )  # fmt: skip
    config.save_pretrained(root / "model")
    return str(root / "model")


def _goes_on(ctx: RankContext, place: Path, model: str, stage: int, tag: str | None = None) -> list[float]:
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": ADAM},
    }
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    engine = launcher.initialize(model=made, config=config, device=DEVICE)[0]
    engine.load_checkpoint(place, tag)
    assert engine.global_steps == BEFORE
    losses = []
    for step in range(BEFORE, BEFORE + AFTER):
        ids = batch(step).chunk(ctx.world)[ctx.rank]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    return losses


@pytest.mark.parametrize(
    ("layout", "tied", "stage"), zip(LAYOUTS, (True, False, True, False), (1, 3, 2, 0), strict=True)
)
def test_a_run_goes_on(pool: WorkerPool, tmp_path: Path, layout: str, tied: bool, stage: int) -> None:
    losses = _titan(tmp_path / "titan", tied, layout)
    model = _config(tmp_path, tied)
    source = str(tmp_path / "titan" / f"step-{BEFORE}")
    assert main(["import", source, str(tmp_path / "ours"), "--model", model]) == 0
    for got in pool.run(_goes_on, 2, tmp_path / "ours", model, stage):
        assert got == pytest.approx(losses, rel=1e-6)


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a checkpoint with untied weights."""
    root = tmp_path_factory.mktemp("titan")
    _titan(root, tied=False, layout="apart")
    return root / f"step-{BEFORE}"


def test_it_becomes_a_model_of_the_hub(titan: Path, tmp_path: Path) -> None:
    """Its rows are reordered in every output format."""
    model = _config(tmp_path, tied=False)
    for kind in ("hf", "fp32"):
        assert main(["export", str(titan), str(tmp_path / kind), "--format", kind, "--model", model]) == 0
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    theirs = Titan(tied=False)
    stored = SourceCheckpoint.open(titan.parent, titan.name)
    theirs.load_state_dict(
        {name: stored.tensor(f"model/{_named(name, 'apart')}") for name in theirs.state_dict()}
    )
    ids = batch(0)
    assert made(input_ids=ids, labels=ids).loss.item() == pytest.approx(theirs(ids).item(), rel=1e-6)
    written = load_file(tmp_path / "fp32" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in made.state_dict().items())


def test_its_names_need_a_model(titan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("import", "export"):
        formats = ["--format", "fp32"] if command == "export" else []
        assert main([command, str(titan), str(tmp_path / "ours"), *formats]) == 2
        assert (
            "is a torchtitan checkpoint and needs --model to map its parameter names"
            in capsys.readouterr().err
        )
    assert main(["inspect", str(titan)]) == 0
    told = capsys.readouterr().out
    assert "a checkpoint of torchtitan" in told and f"launch import {titan} OUT --model M" in told
    assert main(["inspect", str(titan.parent)]) == 2
    assert f"pass a tag: {titan.name}" in capsys.readouterr().err


def test_its_heads_are_told_and_kept(
    titan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """torchtitan does not store the number of heads; --model provides it, and another model is refused."""
    assert main(["import", str(titan), str(tmp_path / "ours"), "--model", _config(tmp_path, tied=False)]) == 0
    assert "as 4 heads, 2 key/value heads, head_dim 8, from the config of " in caplog.text
    other = _config(tmp_path, tied=False, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    assert (
        main(["export", str(tmp_path / "ours"), str(tmp_path / "hf"), "--format", "hf", "--model", other])
        == 2
    )
    assert "num_attention_heads was 4 and is 2" in capsys.readouterr().err


def _twice(state: dict[str, Any]) -> None:
    state["model.embed_tokens.weight"] = torch.ones(VOCAB, HIDDEN)


def _no_counts(state: dict[str, Any]) -> None:
    state["optimizer"] = {key: v for key, v in state["optimizer"].items() if not key.endswith(".step")}


def _odd_count(state: dict[str, Any]) -> None:
    state["optimizer"]["state.norm.weight.step"] = torch.tensor(float("nan"))


def _odd_moments(state: dict[str, Any]) -> None:
    state["optimizer"]["state.norm.weight.exp_avg"] = torch.zeros(HIDDEN, dtype=torch.complex64)


def _short_moments(state: dict[str, Any]) -> None:
    state["optimizer"]["state.layers.0.attention.qkv_linear.wq.weight.exp_avg"] = torch.zeros(16, HIDDEN)


def _odd_rate(state: dict[str, Any]) -> None:
    state["optimizer"]["param_groups.norm.weight.lr"] = "fast"


def _odd_name(state: dict[str, Any]) -> None:
    state["layers.0.scale"] = torch.ones(1)


def _no_weight(state: dict[str, Any]) -> None:
    del state["norm.weight"]


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_twice, "has model/model.embed_tokens.weight twice: as model/tok_embeddings.weight and as"),
        (_no_counts, "it has Adam moments for .*, but no step count"),
        (_odd_count, "the step count of norm.weight is nan"),
        (_odd_moments, "norm.weight has the invalid shape .32. or dtype torch.complex64"),
        (_short_moments, "q_proj.weight has shape .16, 32., expected .32, 32."),
        (_odd_rate, "the learning rate of norm.weight is 'fast'"),
        (_odd_name, "model.layers.0.*scale is not a tensor of the model"),
        (_no_weight, "it has optimizer states for norm.weight, but no weight with that name"),
    ],
)
def test_what_was_never_trained_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[dict[str, Any]], None], told: str
) -> None:
    _titan(tmp_path / "titan", tied=False, layout="apart", edit=edit)
    source, model = str(tmp_path / "titan" / f"step-{BEFORE}"), _config(tmp_path, tied=False)
    assert main(["import", source, str(tmp_path / "ours"), "--model", model]) == 2
    assert re.search(told, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "ours").exists()


def test_a_parameter_without_a_state_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be unused; its state starts from zero, and it stays in its param group."""

    def edit(state: dict[str, Any]) -> None:
        gone = "state.layers.0.feed_forward.w1."
        state["optimizer"] = {key: v for key, v in state["optimizer"].items() if not key.startswith(gone)}

    _titan(tmp_path / "titan", tied=False, layout="apart", edit=edit)
    source, model = str(tmp_path / "titan" / f"step-{BEFORE}"), _config(tmp_path, tied=False)
    assert main(["import", source, str(tmp_path / "ours"), "--model", model]) == 0
    assert "no state for 1 of the parameters in the optimizer; their state is reset: layers.0" in caplog.text
    (names,) = SourceCheckpoint.open(tmp_path / "ours").groups
    assert "model.layers.0.mlp.gate_proj.weight" in names


def test_the_state_of_a_tied_head_may_have_either_name(tmp_path: Path) -> None:
    def edit(state: dict[str, Any]) -> None:
        state["optimizer"] = {
            key.replace("tok_embeddings", "lm_head"): value for key, value in state["optimizer"].items()
        }

    _titan(tmp_path / "titan", tied=True, layout="apart", edit=edit)
    source, model = tmp_path / "titan", _config(tmp_path, tied=True)
    assert main(["import", str(source / f"step-{BEFORE}"), str(tmp_path / "ours"), "--model", model]) == 0
    ours, theirs = SourceCheckpoint.open(tmp_path / "ours"), SourceCheckpoint.open(source, f"step-{BEFORE}")
    moment = theirs.tensor("optimizer/exp_avg/lm_head.weight")
    assert torch.equal(ours.tensor("optimizer/exp_avg/model.embed_tokens.weight"), moment)
    assert "model.embed_tokens.weight" in ours.groups[0]


def test_qwen3_has_the_rows_that_transformers_has(tmp_path: Path) -> None:
    model = _config(tmp_path, tied=False, model_type="qwen3")
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    theirs = {
        "model.embed_tokens": "tok_embeddings",
        "model.": "",
        "self_attn.o_proj": "attention.wo",
        **{f"self_attn.{kind}_proj": f"attention.qkv_linear.w{kind}" for kind in "qkv"},
        "self_attn": "attention",
        **{f"mlp.{name}_proj": f"feed_forward.w{n}" for name, n in (("gate", 1), ("down", 2), ("up", 3))},
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = {}
    for name, value in made.state_dict().items():
        for ours, own in theirs.items():
            name = name.replace(ours, own)
        state[name] = value
    dcp.save(
        {**state, "train_state": {"step": torch.tensor(7)}}, checkpoint_id=tmp_path / "step-7", no_dist=True
    )
    assert main(["import", str(tmp_path / "step-7"), str(tmp_path / "ours"), "--model", model]) == 0
    back = SourceCheckpoint.open(tmp_path / "ours")
    assert back.shapes.keys() == dict(made.named_parameters()).keys()
    assert all(torch.equal(back.tensor(f"model/{name}"), value) for name, value in made.named_parameters())


def test_fused_rows_of_other_heads_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _titan(tmp_path / "titan", tied=False, layout="in one")
    source = str(tmp_path / "titan" / f"step-{BEFORE}")
    model = _config(tmp_path, tied=False, num_key_value_heads=1)
    assert main(["import", source, str(tmp_path / "ours"), "--model", model]) == 2
    assert "q_proj.weight is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "mistral"}, "Model type mistral is not supported for torchtitan checkpoints"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.self_attn.q_proj.weight is not a tensor of the model"),
        ({"intermediate_size": 40}, "has shape [48, 32], expected [40, 32]"),
        ({"tie_word_embeddings": True}, "lm_head.weight and model.embed_tokens.weight differ"),
        ({"num_attention_heads": 2}, "has shape [32, 32], expected [16, 32]"),
        ({"attention_bias": True}, "q_proj.bias is missing"),
    ],
)
def test_another_model_is_refused(
    titan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], told: str
) -> None:
    model = _config(tmp_path, tied=False, **change)
    assert main(["import", str(titan), str(tmp_path / "ours"), "--model", model]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_a_load_says_what_to_do(pool: WorkerPool, titan: Path, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"launch import .* OUT --model M"):
        pool.run(_goes_on, 1, titan.parent, _config(tmp_path, tied=False), 0, titan.name)
