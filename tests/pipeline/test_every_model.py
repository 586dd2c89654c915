"""Every causal-LM type is split correctly or refused with a reason.

Unusual types are tested here, all of them in `make models`. Artificial models show what cannot be split.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from launcher.errors import ConfigError, LauncherError
from launcher.pipeline.crossing import signature_of
from launcher.pipeline.hf.parts import UNCUTTABLE, parts_of
from launcher.pipeline.hf.staged import StagedModel
from tests.pipeline.judging import judged
from tests.pool import WorkerPool
from tests.tensor.models_table import as_in_fp32, read_verdicts
from tests.tensor.zoo import CAUSAL_TYPES, tiny_model

SAMPLE = {
    "camembert": "its head stands in front, and is tied",
    "gemma3": "an image tower with blocks of its own",
    "gemma3n_text": "an input of every layer, keys and values of other layers, four stages",
    "glm_moe_dsa": "numbers that have no gradient cross",
    "musicgen": "lists of embeddings and heads",
    "zaya": "parameters around the blocks",
}


def test_a_sample_is_as_the_table_says(pool: WorkerPool) -> None:
    table = {verdict.type: as_in_fp32(verdict) for verdict in read_verdicts()}
    for kind in SAMPLE.keys() & set(CAUSAL_TYPES):
        assert table[kind].stages == "works"
        assert as_in_fp32(judged(pool, table[kind])) == table[kind]


def test_refusals_are_those_of_the_code() -> None:
    refused = {verdict.type: verdict.uncut for verdict in read_verdicts() if verdict.stages == "refused"}
    assert refused == UNCUTTABLE


@pytest.mark.parametrize("kind", ["reformer", "xlm"])
def test_a_refusal_says_why_and_what_to_do(kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        parts_of(tiny_model(kind, seed=0))
    assert UNCUTTABLE[kind] in str(error.value)
    assert "PipelineModule" in str(error.value) and "remove the section" in str(error.value)


# ---- models of our own, stage by stage in this process -------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, states: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(self.linear(states) + other)


class Net(nn.Module):
    """Four blocks. What each gets besides the previous hidden states depends on the model."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        start = states = self.embed(ids)
        seen = [states]
        for i, block in enumerate(self.blocks):
            other = {
                "embeddings": start,
                "slices": start[..., i : i + 1],
                "skips": seen[max(0, i - 2)],
                "sums": torch.stack(seen).sum(0),
                "late": start,
            }[self.way]
            states = block(states, other)
            seen.append(states)
        return self.head(states + start if self.way == "late" else states).square().mean()


def gradients(net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def in_stages(way: str, times: int = 2) -> tuple[float, dict[str, Tensor], int]:
    """Return the last loss, all its gradients, and the number of tensors that the first stage sends.

    The first pass determines what crosses stages.
    """
    ids = torch.arange(6).view(2, 3)
    signature = signature_of(ids)
    stages = [StagedModel(Net(way), [0, 1, 2, 3, 4], [0, 1, 2, 3], rank) for rank in range(4)]
    found: dict[str, Tensor] = {}
    for _ in range(times):
        for staged in stages:
            staged.model.zero_grad()
        arrived: tuple[Tensor, ...] = ()
        kept = []
        for k, staged in enumerate(stages):
            received = tuple(tensor.detach().requires_grad_() for tensor in arrived)
            arrived = staged.forward(k, received, signature, lambda model: model(ids))
            kept.append((received, arrived))
            if k < 3:
                stages[k + 1].tell(k, signature, copy.deepcopy(staged.learned(k, signature)))
        loss = kept[-1][1]
        loss.backward()
        for k in (2, 1, 0):
            back = [
                tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                for tensor in kept[k + 1][0]
            ]
            torch.autograd.backward(kept[k][1], back)
        found = {name: p.grad for staged in stages for name, p in staged.model.named_parameters()}
    return loss.item(), found, len(stages[0].learned(0, signature).shapes)


@pytest.mark.parametrize(("way", "sent"), [("embeddings", 2), ("slices", 4), ("skips", 2)])
@pytest.mark.parametrize("times", [1, 2])
def test_what_later_blocks_need_goes_with_the_states(way: str, sent: int, times: int) -> None:
    net = Net(way)
    loss = net(torch.arange(6).view(2, 3))
    wanted = gradients(net, loss)
    found, mine, crossing = in_stages(way, times)
    assert crossing == sent, "what several blocks need goes once"
    assert found == pytest.approx(loss.item(), rel=1e-6)
    assert mine.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("sums", "computed from outputs of blocks on several stages"),
        ("late", "the modules after the blocks use more than the output of the last block"),
    ],
)
def test_what_cannot_be_cut_is_refused(way: str, why: str) -> None:
    with pytest.raises(LauncherError, match=why):
        in_stages(way)
