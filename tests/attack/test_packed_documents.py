"""Documents packed into one row do not attend to each other: neither in losses nor in gradients, on any topology."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from launcher.cli.recipe_flags import training_parser
from launcher.data.documents import IGNORED
from launcher.data.pack import pack
from launcher.data.sft import load_sft
from launcher.data.tokenizer import byte_tokenizer
from launcher.engine.documents import for_attention
from launcher.errors import ConfigError
from launcher.run import Run
from launcher.train import Training, collate
from tests.pipeline.running import config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import tiny_gpt2, tiny_llama
from tests.tensor.zoo import CAUSAL_TYPES, tiny_model

LENGTH = 24  # of a row: two conversations of twelve bytes
FIRST, OTHER, SECOND = "what it was", "entirely oth", "remains same"
MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2}
VOCAB = 260


def sft_row(directory: Path, first: str) -> dict[str, Tensor]:
    """Return one packed row; the loss covers only the second conversation's answer."""
    rows = [{"prompt": first[:10], "completion": first[10:11]}, {"text": SECOND[:11]}]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_sft(str(directory / "rows.jsonl"), byte_tokenizer(), LENGTH, split="all", packed=True)
    assert len(data) == 1
    return data[0]


def pretraining_row(directory: Path, first: str) -> dict[str, Tensor]:
    texts = Dataset.from_dict({"text": [first[:11], SECOND[:11]]})
    row = pack(texts, byte_tokenizer(), LENGTH, directory, document_mask=True)[0]
    assert isinstance(row, dict)
    return row


MAKERS = {"finetune --packed": sft_row, "pretrain --document-mask": pretraining_row}


def of_second(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch whose loss is that of the second document."""
    labels = row["labels"].clone()
    labels[: LENGTH // 2] = IGNORED
    return collate([{**row, "labels": labels}])


def loss_and_gradients(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("maker", MAKERS)
def test_rows_tell_where_documents_begin(tmp_path: Path, maker: str) -> None:
    row = MAKERS[maker](tmp_path, FIRST)
    assert row["position_ids"].tolist() == [*range(LENGTH // 2)] * 2
    assert row["labels"][LENGTH // 2] == IGNORED
    assert "attention_mask" not in row  # transformers looks at positions only where there is none


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_document_changes_neither_loss_nor_gradients_of_the_next(
    tmp_path: Path, maker: str, name: str, attention: str
) -> None:
    model = MODELS[name](vocab=VOCAB, attn_implementation=attention)
    one, two = (of_second(MAKERS[maker](tmp_path, first)) for first in (FIRST, OTHER))
    assert not one["input_ids"].equal(two["input_ids"])
    loss, gradients = loss_and_gradients(model, one)
    again, same = loss_and_gradients(model, two)
    assert loss.equal(again)
    alone = {key: value[:, LENGTH // 2 :] for key, value in one.items() if key != "position_ids"}
    torch.testing.assert_close(loss_and_gradients(model, alone)[0], loss, rtol=1e-6, atol=0)
    for key, gradient in gradients.items():
        assert gradient.equal(same[key]), key


class Packed:
    """Rows of three documents of 5, 8 and 11 tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 60, (LENGTH,), generator=torch.Generator().manual_seed(index))
        places = torch.cat([torch.arange(n) for n in (5, 8, 11)])
        return {"input_ids": ids, "labels": ids.masked_fill(places == 0, IGNORED), "position_ids": places}


def training_of(ctx: RankContext, directory: str, model: PreTrainedModel, **sections: Any) -> Training:
    args = training_parser("pretrain", "").parse_args(["--seed", "0"])
    pipeline = sections.pop("pipeline", {"stages": 1})
    engine = engine_of(config_of(sections.pop("stage", 1), 2, pipeline, **sections), model)
    console = Console(file=open(os.devnull, "w"), quiet=True)  # noqa: SIM115
    run = Run(args, engine.resolved, Path(directory), DEVICE, console, ctx.rank)
    return Training(run, engine, Packed(), Packed(), 1, "tiny")


def packed_loss(ctx: RankContext, directory: str, sections: dict[str, Any]) -> float:
    """Return the loss of the first step, trained as the recipes do."""
    training = training_of(ctx, directory, tiny_llama(layers=4), **sections)
    record = training._step(next(training.loader.steps()))
    training.engine.destroy()
    return record["loss"]


TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "stage 3": (2, {"stage": 3}),
    "tensor": (2, {"tensor_parallel": {"autotp_size": 2}}),
    "sequence": (2, {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}),
    "stages": (2, {"pipeline": {"stages": 2}}),
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_loss_of_packed_rows_is_that_of_their_documents_alone(
    pool: WorkerPool, tmp_path: Path, topology: str
) -> None:
    world, sections = TOPOLOGIES[topology]
    model, total, count = tiny_llama(layers=4), 0.0, 0
    found = pool.run(packed_loss, world, str(tmp_path), sections)
    rows = [Packed()[i] for i in range(8)]
    for row in rows:
        for cut in (slice(0, 5), slice(5, 13), slice(13, 24)):
            ids = row["input_ids"][None, cut]
            total += model(input_ids=ids, labels=ids).loss.item() * (ids.numel() - 1)
            count += ids.numel() - 1
    assert found == pytest.approx([total / count] * world, rel=1e-5)


def refused(ctx: RankContext, directory: str, model_type: str) -> str:
    try:
        training_of(ctx, directory, tiny_model(model_type, 0))
    except ConfigError as error:
        return str(error)
    return ""


def test_models_that_do_not_look_at_positions_are_refused_in_words(pool: WorkerPool, tmp_path: Path) -> None:
    said = {t: pool.run(refused, 1, str(tmp_path), t)[0] for t in ("mamba", "jamba", "opt", "mixtral")}
    assert "takes no position_ids" in said["mamba"] and "'mamba'" in said["mamba"]
    for model_type in ("jamba", "opt"):  # a state along the row; positions that nobody looks at
        assert "does not separate packed documents: the loss" in said[model_type], said[model_type]
        assert "--packed" in said[model_type] and "--document-mask" in said[model_type]
    assert said["mixtral"] == ""


@pytest.mark.full
def test_every_model_keeps_documents_apart_or_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    """A model is accepted if its logits stay separate, except three models that are not text-only."""
    verdicts = {t: pool.run(verdict, 1, str(tmp_path), t)[0] for t in CAUSAL_TYPES}
    assert not [t for t, (accepted, apart) in verdicts.items() if accepted and not apart]
    refused = {t for t, (accepted, apart) in verdicts.items() if apart and not accepted}
    assert refused <= {"git", "moss_transcribe_diarize", "whisper"}


def verdict(ctx: RankContext, directory: str, model_type: str) -> tuple[bool, bool]:
    """Return (whether the run is accepted, whether a document's logits stay when the previous document changes)."""
    model = tiny_model(model_type, 0).eval()
    try:
        with torch.no_grad():
            row = collate([Packed()[0]])
            other = row["input_ids"].clone()
            other[:, :5] = 63 - other[:, :5]
            seen = [
                model(input_ids=ids, position_ids=row["position_ids"], use_cache=False).logits[:, 5:13]
                for ids in (row["input_ids"], other)
            ]
        apart = torch.allclose(*seen, rtol=1e-5, atol=1e-5)
    except Exception:
        apart = False
    try:
        training_of(ctx, directory, tiny_model(model_type, 0))
    except Exception:
        return False, apart
    return True, apart


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, **_: Any) -> Tensor:
    """Compute what FlashAttention's function does for [batch, tokens, heads, width]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    return found.transpose(1, 2)


def flash_of_borders(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **rest: Any) -> Tensor:
    """Compute the same for [tokens, heads, width] with document boundaries."""
    assert cu_seqlens_q.dtype == torch.int32 and rest["max_seqlen_q"] == int(cu_seqlens_q.diff().max())
    cuts = [slice(a, b) for a, b in pairwise(cu_seqlens_q)]
    parts = [flash(q[None, c], k[None, c], v[None, c], rest["causal"], rest["softmax_scale"]) for c in cuts]
    return torch.cat(parts, 1)[0]


def test_flash_attention_gets_the_borders_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain stand-ins replace its functions; transformers calls them like the library's."""
    import transformers.modeling_flash_attention_utils as flash_utils

    def process(**arguments: Any) -> dict[str, Any]:
        return {**arguments, "causal": arguments["is_causal"]}

    functions = (flash, flash_of_borders, None, None, None), (process, None)
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lambda *_: functions)
    rows = collate(
        [Packed()[i] for i in range(2)]
    )  # two rows: of one alone transformers finds the borders itself
    want, gradients = loss_and_gradients(tiny_llama(), rows)
    model = tiny_llama()
    model.config._attn_implementation_internal = "flash_attention_2"
    engine = Namespace(module=model)
    loss, found = loss_and_gradients(model, for_attention(engine, rows))  # type: ignore[arg-type]
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[key], rtol=1e-4, atol=1e-7, msg=key)


@pytest.mark.full
def test_flex_attention_gets_the_mask_of_documents() -> None:
    from transformers.masking_utils import create_causal_mask

    row = collate([Packed()[0]])
    config = tiny_llama().config
    config._attn_implementation_internal = "flex_attention"
    mask = create_causal_mask(
        config, torch.zeros(1, LENGTH, 1), None, None, row["position_ids"], allow_is_causal_skip=True
    )
    of = (row["position_ids"] == 0).cumsum(1)[0]
    places = torch.arange(LENGTH)
    want = (of[:, None] == of) & (places[:, None] >= places)
    index = torch.tensor(0)
    found = [[bool(mask.mask_mod(index, index, q, k)) for k in places] for q in places]
    assert torch.tensor(found).equal(want)
