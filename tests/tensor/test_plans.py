"""Our plans: split models match plain ones, and models that cannot be split are refused with a reason."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.comm import Axis, Mesh
from launcher.errors import ConfigError
from launcher.tensor.apply import apply
from launcher.tensor.plan import plan_of
from launcher.tensor.plans import PLANS
from launcher.tensor.rule import SplitRule
from launcher.tensor.split_model import TensorParallelOptions
from launcher.tensor.styles import STYLES
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.tensor.transparency import compare
from tests.tensor.zoo import CAUSAL_TYPES, batch_of, tiny_model

Changes = dict[str, Any]

DEGREE = 2
# one for each thing that a row can say: type, changes of its config, largest share of the parameters that a rank holds
SAMPLES: list[tuple[str, Changes, float]] = [
    ("gpt2", {}, 0.55),  # packed matrices, Conv1D, counts to divide
    ("codegen", {}, 0.51),  # packed matrices that repeat
    ("bert", {}, 0.60),  # tied biases
    ("mpt", {}, 0.51),  # a bias for each head, on the way in
    ("phi3", {"num_key_value_heads": 1}, 0.53),  # a number of the config that attention looks at
    ("gpt_oss", {}, 0.51),  # a parameter of each head; experts with a bias that is added once
    ("diffllama", {}, 0.51),  # halves of the heads
    ("bitnet", {}, 0.52),  # norms over split features
    ("trocr", {}, 0.54),  # attention that can only be computed whole
    ("apertus", {}, 0.51),  # a row over transformers' own
    ("falcon", {}, 0.54),  # one key-value head, held by all
    ("falcon", {"new_decoder_architecture": True, "alibi": True}, 0.52),
    ("falcon", {"multi_query": False, "alibi": True, "num_kv_heads": 8}, 0.52),
    ("falcon", {"num_attention_heads": 71, "hidden_size": 568}, 0.51),  # 7B's heads
    ("gpt_bigcode", {}, 0.58),
    ("dbrx", {}, 0.52),  # experts end to end in one matrix
    ("lfm2", {}, 0.52),  # a convolution
]


def differences(ctx: RankContext) -> list[tuple[str, float]]:
    axis = Mesh.build(DEVICE, tp=ctx.world).axes["tp"]
    found = []
    for kind, changes, _ in SAMPLES:
        if kind in CAUSAL_TYPES:
            difference = compare(tiny_model(kind, seed=0, **changes), batch_of(kind, seed=1), axis)
            found.append((f"{kind} {changes} {difference.worst}", difference.largest))
    return found


def test_split_models_compute_what_plain_ones_do(pool: WorkerPool) -> None:
    """Logits, loss, every gradient, and weights after three steps are equal."""
    for found in pool.run(differences, DEGREE):
        assert found
        assert [(what, difference) for what, difference in found if not difference <= 2e-5] == []


def split_on_meta(kind: str, degree: int, **changes: Any) -> tuple[int, int, nn.Module]:
    """Return the elements of the plain model, of rank 0, and its model. Nothing is sent, since there are no values."""
    model = tiny_model(kind, seed=0, **changes)
    whole = sum(p.numel() for p in model.parameters())
    model = model.to("meta")
    model.tie_weights()
    made = apply(model, Axis("tp", degree), TensorParallelOptions(), device=DEVICE)
    return whole, sum(split.numel for split in made.splits.values()), model


@pytest.mark.parametrize(("kind", "changes", "share"), SAMPLES, ids=str)
def test_ranks_hold_their_share(kind: str, changes: Changes, share: float) -> None:
    """The rest are norms, positions and routers, replicated key-value heads, and an unevenly split vocabulary."""
    if kind not in CAUSAL_TYPES:
        pytest.skip(f"this transformers has no {kind}")
    whole, held, _ = split_on_meta(kind, DEGREE, **changes)
    assert 1 / DEGREE <= held / whole <= share


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (
            "gpt2",
            {"n_head": 4},
            r"attn.num_heads: 4 .* tensor-parallel degree 3\n(.*\n)*.*a degree of 1, 2, 4",
        ),
        ("bloom", {"n_head": 4}, r"self_attention.num_heads: 4 (.*\n)*.*a degree of 1, 2, 4"),
        ("llama", {"num_attention_heads": 4}, r"q_proj.weight: 4 (.*\n)*.*a degree of 1, 2, 4"),
        ("gpt2", {"n_head": 6, "n_embd": 48, "n_inner": 64}, r"mlp.c_fc.weight: 64 "),
        ("mamba", {}, r"no tensor-parallel plan for models of type mamba: .*layer_specs"),
        ("bloom", {"slow_but_exact": True}, r"no tensor-parallel plan for models of type bloom\n"),
    ],
)
def test_what_cannot_be_split_is_said(kind: str, changes: Changes, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        split_on_meta(kind, 3, **changes)
    assert re.search(says, str(raised.value), re.DOTALL)
    assert "tensor_parallel.autotp_size" in str(raised.value)


def test_attention_sees_its_own_counts() -> None:
    """All other modules see the original config."""
    _, _, model = split_on_meta("phi3", 4)
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    config: Any = model.config
    assert (attention.config.num_attention_heads, config.num_attention_heads) == (2, 8)
    config.hidden_act = "relu"
    assert attention.config.hidden_act == "relu"
    assert copy.deepcopy(attention).config.num_attention_heads == 2


def test_rows_over_those_of_transformers() -> None:
    model = tiny_model("apertus", seed=0)
    plan = plan_of(model)
    assert plan["model.layers.*.mlp.up_proj"].style == "colwise"
    assert plan["model.layers.*.mlp.act_fn"].style == "replicated_with_grad_allreduce"


class _Blocks(nn.Module):
    """A custom model whose config has a plan."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=plan)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in "12"
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["down"](layer["up"](x))  # type: ignore[index]
        return x


def own_plan(ctx: RankContext) -> tuple[Tensor, list[tuple[int, ...]]]:
    torch.manual_seed(0)
    model = _Blocks({"*.up": "colwise", "layers.*.down": "rowwise"})
    apply(model, Mesh.build(DEVICE, tp=ctx.world).axes["tp"], TensorParallelOptions(), device=DEVICE)
    return model(torch.ones(2, 4)).detach(), [tuple(p.shape) for p in model.parameters()][:4]


def test_a_plan_of_the_models_own(pool: WorkerPool) -> None:
    """A leading `*` matches any path, a later one a number."""
    torch.manual_seed(0)
    want = _Blocks({})(torch.ones(2, 4))
    for output, shapes in pool.run(own_plan, 2):
        torch.testing.assert_close(output, want)
        assert shapes == [(4, 4), (4,), (4, 4), (4,)]
    with pytest.raises(ConfigError, match="uses unknown styles: colwse"):
        plan_of(_Blocks({"*.up": "colwse"}))


def test_the_table_holds_together() -> None:
    rows = [(kind, *row) for kind, cases in PLANS.items() for case in cases for row in case.plan.items()]
    rules = [(kind, name, row if isinstance(row, SplitRule) else SplitRule(row)) for kind, name, row in rows]
    assert [(kind, name) for kind, name, rule in rules if rule.style not in STYLES] == []
    assert [(kind, name) for kind, name, rule in rules if rule.heads and not rule.divide] == []
