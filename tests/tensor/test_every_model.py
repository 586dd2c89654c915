"""Every causal-LM type is split correctly or refused with a reason: a sample here, all of them in `make models`."""

from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import PreTrainedModel

from launcher.comm import Axis, Mesh
from launcher.config import load
from launcher.errors import ConfigError
from launcher.tensor.apply import apply
from launcher.tensor.plans import WITHOUT_PLAN, WITHOUT_SEQUENCE
from launcher.tensor.split_model import TensorParallelOptions
from launcher.tensor.styles import STYLES
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.tensor.judging import judge
from tests.tensor.models_table import EXAMPLE, PAGE, as_in_fp32, page_of, read_verdicts, unsound
from tests.tensor.transparency import compare
from tests.tensor.zoo import CAUSAL_TYPES, batch_of, tiny_model
from tests.tensor.zoo_tables import KNOWN, UNRUNNABLE
from tests.versions import of_the_table

# every style, but what is seen in one large type only; split heads and gathered ones; an image tower; each refusal
SAMPLE = ["llama", "gpt2", "bert", "gemma3", "dbrx", "ctrl", "rwkv", "bitnet", "inkling2_text", "granite_swa"]
SAMPLE += ["gpt_oss", "aria_text", "lfm2", "doge", "axk2", "longcat_flash", "bart"]
FEW = ["llama", "gpt2", "gemma3", "gpt_oss", "ctrl"]
ONLY_IN_ALL = {"embedding_colwise"}  # qwen4_exp, which takes as long as ten others


def test_the_table_has_every_type() -> None:
    verdicts = {verdict.type: verdict for verdict in read_verdicts()}
    assert [*verdicts, *UNRUNNABLE] == [*(kind for kind in KNOWN if kind not in UNRUNNABLE), *UNRUNNABLE]
    assert unsound(list(verdicts.values())) == []
    assert PAGE.read_text() == page_of(list(verdicts.values())), "run make models"


def test_refusals_are_those_of_the_code() -> None:
    for verdict in read_verdicts():
        if verdict.tensor == "refused":
            assert verdict.reason == WITHOUT_PLAN[verdict.type]
        elif verdict.sequence == "refused":
            assert verdict.reason in WITHOUT_SEQUENCE.values()


def test_the_sample_has_every_style() -> None:
    table = {verdict.type: set(verdict.styles.split()) for verdict in read_verdicts()}
    assert set().union(*table.values()) <= set(STYLES)
    assert set().union(*(table[kind] for kind in SAMPLE)) == set().union(*table.values()) - ONLY_IN_ALL


@of_the_table
@pytest.mark.parametrize(
    "types",
    [FEW, pytest.param([kind for kind in SAMPLE if kind not in FEW], marks=pytest.mark.full)],
    ids=["few", "others"],
)
def test_a_sample_is_as_the_table_says(pool: WorkerPool, types: list[str]) -> None:
    table = {verdict.type: verdict for verdict in read_verdicts()}
    types = [kind for kind in types if kind in CAUSAL_TYPES]
    for verdict in pool.run(judge, 4, types)[0]:
        wanted = dataclasses.replace(table[verdict.type], stages="", uncut="")  # tests/pipeline tries those
        assert as_in_fp32(verdict) == as_in_fp32(wanted)


# ---- key-value heads that several ranks hold -----------------------------------------------------


def differences_of_heads(ctx: RankContext, heads: list[int], sequence: bool) -> list[float]:
    axis = Mesh.build(DEVICE, tp=ctx.world).axes["tp"]
    return [
        compare(
            tiny_model("llama", seed=0, num_key_value_heads=count),
            batch_of("llama", seed=1, length=16),
            axis,
            TensorParallelOptions(sequence=sequence),
        ).largest
        for count in heads
    ]


@pytest.mark.parametrize("sequence", [False, True])
def test_fewer_key_value_heads_than_ranks(pool: WorkerPool, sequence: bool) -> None:
    """8 heads and 2 or 1 key-value heads, on 4 ranks."""
    for found in pool.run(differences_of_heads, 4, [2, 1], sequence):
        assert max(found) <= 1e-5


# ---- refusals, and the way out -------------------------------------------------------------------


def on_meta(kind: str) -> PreTrainedModel:
    model = tiny_model(kind, seed=0).to("meta")
    model.tie_weights()
    return model


@pytest.mark.parametrize("degree", [3, 16])
def test_heads_that_the_degree_does_not_divide(degree: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"(?s)8 heads .* tensor-parallel degree {degree}\n.* a degree of 1, 2, 4, 8$"
    ):
        apply(on_meta("llama"), Axis("tp", degree), TensorParallelOptions(), device=DEVICE)


def test_a_model_without_a_plan() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)type mamba: its layers are recurrent.*partition_config"
    ) as error:
        apply(on_meta("mamba"), Axis("tp", 2), TensorParallelOptions(), device=DEVICE)
    assert "backbone.layers.*.mixer.in_proj" in str(error.value)


@pytest.mark.skipif("gemma4" not in CAUSAL_TYPES, reason="an older transformers")
def test_sequence_parallelism_is_refused_inside_of_other_models_too() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)type gemma4_text .*per-layer embedding of each token\n.*sequence_parallel"
    ):
        apply(on_meta("gemma4"), Axis("tp", 2), TensorParallelOptions(sequence=True), device=DEVICE)


def difference_of_example(ctx: RankContext) -> tuple[float, float]:
    """Return the difference, and a rank's share of the elements."""
    rules = load(json.loads(EXAMPLE)).tensor_parallel.partition_config
    axis = Mesh.build(DEVICE, tp=ctx.world).axes["tp"]
    found = compare(
        tiny_model("rwkv", seed=0), batch_of("rwkv", seed=1), axis, TensorParallelOptions(rules=rules)
    )
    model = tiny_model("rwkv", seed=0)
    whole = sum(p.numel() for p in model.parameters())
    made = apply(model, axis, TensorParallelOptions(rules=rules), device=DEVICE)
    return found.largest, sum(split.numel for split in made.splits.values()) / whole


def test_the_example_of_the_page(pool: WorkerPool) -> None:
    assert EXAMPLE in PAGE.read_text()
    for difference, share in pool.run(difference_of_example, 2):
        assert difference <= 1e-5
        assert share < 0.53
