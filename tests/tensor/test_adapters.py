"""Layers with LoRA adapters are split like those without: both factors follow their layer."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from launcher.comm import record_collectives
from launcher.errors import ConfigError, MisplacedCallError
from launcher.tensor.adapters import modules_before_peft
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import PlainRun, batch, tiny_gpt2, tiny_llama, train_plain
from tests.tensor.running import CLIP, advance, engine_of, whole_state
from tests.tensor.running import config_of as config_at
from tests.tensor.zoo import tiny_model

# At ten times the rate AdamW makes 8e-5 of a rounding error of the trained copies in three steps, in one process.
STEPS, LR = 3, 0.001
config_of = partial(config_at, lr=LR)
BLOCKS = {"r": 4, "target_modules": "all-linear"}
MODELS: dict[str, Any] = {
    "llama": lambda: adapted(tiny_llama(layers=2, attention_bias=True)),
    "tied, 67 ids": lambda: adapted(tiny_llama(tied=True, layers=2, vocab=67)),
    "gpt2": lambda: adapted(tiny_gpt2(layers=2), fan_in_fan_out=True),
    "head and embedding": lambda: adapted(
        tiny_llama(layers=2), target_modules=["q_proj", "down_proj", "lm_head", "embed_tokens"]
    ),
    "bias": lambda: adapted(tiny_llama(layers=2), lora_bias=True, target_modules=["q_proj", "up_proj"]),
    "tied copy": lambda: adapted(tiny_llama(tied=True, layers=2), modules_to_save=["embed_tokens"]),
    "tied embedding": lambda: adapted(
        tiny_llama(tied=True, layers=2, pad_token_id=3), target_modules=["embed_tokens", "q_proj"]
    ),
    "trained head": lambda: adapted(tiny_llama(layers=2), modules_to_save=["lm_head", "embed_tokens"]),
}


def adapted(model: nn.Module, **options: Any) -> PeftModel:
    torch.manual_seed(1)
    config = LoraConfig(**{**BLOCKS, **options}, task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, config).train()  # type: ignore[arg-type]


@cache
def truth(kind: str) -> PlainRun:
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    return train_plain(MODELS[kind](), batch, adamw, STEPS + 1, clip=CLIP)


def trained(
    ctx: RankContext, kind: str, tp: int, stage: int, sequence: bool, directory: Path
) -> dict[str, Any]:
    engine = engine_of(tp, config_of(stage), MODELS[kind](), sequence=sequence)
    losses, norms = advance(engine, range(STEPS))
    state = whole_state(engine)
    engine.save_checkpoint(directory, "saved")
    with record_collectives() as records:
        more = advance(engine, [STEPS])
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    return {
        "losses": losses + more[0],
        "norms": norms + more[1],
        "state": state,
        "consolidated": consolidated,
        "tags": [record.tag for record in records],
    }


@pytest.mark.parametrize(
    ("kind", "world", "tp", "stage", "sequence"),
    [
        ("llama", 2, 2, 3, False),
        ("llama", 2, 2, 0, True),
        ("llama", 4, 2, 3, True),
        ("llama", 4, 4, 1, False),
        ("tied, 67 ids", 2, 2, 2, False),
        ("gpt2", 2, 2, 3, False),
        ("gpt2", 2, 2, 1, True),
        ("head and embedding", 2, 2, 3, False),
        ("bias", 2, 2, 0, False),
        ("trained head", 2, 2, 3, True),
        ("tied copy", 2, 2, 3, False),
        ("tied embedding", 2, 2, 0, False),
    ],
)
def test_a_run_is_that_of_one_process(
    pool: WorkerPool, tmp_path: Path, kind: str, world: int, tp: int, stage: int, sequence: bool
) -> None:
    found = pool.run(trained, world, kind, tp, stage, sequence, tmp_path)[0]
    assert found["losses"] == pytest.approx(truth(kind).losses, rel=2e-6)
    assert found["norms"] == pytest.approx(truth(kind).grad_norms, rel=2e-5)


def resumed(ctx: RankContext, kind: str, tp: int, directory: Path) -> tuple[dict[str, Tensor], list[float]]:
    engine = engine_of(tp, config_of(3), MODELS[kind]())
    engine.load_checkpoint(directory, "saved")
    return whole_state(engine), advance(engine, [STEPS])[0]


def test_checkpoints_are_read_at_another_degree(pool: WorkerPool, tmp_path: Path) -> None:
    found = pool.run(trained, 2, "llama", 2, 3, False, tmp_path)[0]
    for tp in (1, 2):
        state, losses = pool.run(resumed, 2, "llama", tp, tmp_path)[0]
        assert state.keys() == found["state"].keys()
        assert all(torch.equal(state[name], found["state"][name]) for name in state)
        assert losses == pytest.approx(found["losses"][STEPS:], rel=2e-6)


def test_the_adapter_is_saved_whole(pool: WorkerPool, tmp_path: Path) -> None:
    """PEFT's own files, from the consolidated weights, as a Trainer saves them: the weights of one process."""
    found = pool.run(trained, 2, "llama", 2, 3, False, tmp_path)[0]
    saved = get_peft_model_state_dict(MODELS["llama"](), state_dict=found["consolidated"])
    wanted = {
        name.replace(".default", ""): value
        for name, value in truth("llama").weights.items()
        if "lora_" in name
    }
    assert saved.keys() == wanted.keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4)


def sent(ctx: RankContext, lora: bool, sequence: bool) -> list[tuple[str, int]]:
    """Return the collectives of forward and backward of a step, without those of the gradients' reduction."""
    model = tiny_llama(layers=2)
    engine = engine_of(2, config_of(0), adapted(model) if lora else model, sequence=sequence)
    advance(engine, [0])
    with record_collectives() as records:
        advance(engine, [1])
    layers = [r for r in records if r.tag.partition("/")[0].endswith(("proj", "mlp", "attn"))]
    return sorted((r.tag.removeprefix("base_model.model."), r.nbytes) for r in layers)


@pytest.mark.parametrize("sequence", [False, True])
def test_adapters_add_no_collective_to_a_layer(pool: WorkerPool, sequence: bool) -> None:
    plain, adapters = (pool.run(sent, 2, lora, sequence)[0] for lora in (False, True))
    assert len(plain) >= 2 * 4
    # the frozen embedding needs no gradient, so the first attention sends less
    assert not Counter(adapters) - Counter(plain) and len(plain) - len(adapters) <= 1


def without_adapters(ctx: RankContext, kind: str) -> list[float]:
    """Return the sums of logits with disabled adapters, as a reference model of DPO computes them, and with them."""
    engine = engine_of(2, config_of(1), MODELS[kind]())
    model, found = engine.module, []
    model.eval()
    with torch.no_grad():
        with model.disable_adapter():
            found.append(float(model(input_ids=batch(0)).logits.double().abs().sum()))
        found.append(float(model(input_ids=batch(0)).logits.double().abs().sum()))
    return found


@pytest.mark.parametrize("kind", ["tied, 67 ids", "tied copy", "head and embedding", "tied embedding"])
def test_adapters_can_be_disabled(pool: WorkerPool, kind: str) -> None:
    model = MODELS[kind]().eval()
    with torch.no_grad(), model.disable_adapter():
        base = float(model(input_ids=batch(0)).logits.double().abs().sum())
    with torch.no_grad():
        whole = float(model(input_ids=batch(0)).logits.double().abs().sum())
    assert base != pytest.approx(whole, rel=1e-6)
    for rank in pool.run(without_adapters, 2, kind):
        assert rank == pytest.approx([base, whole], rel=1e-5)


class Packed(nn.Parameter):
    quant_state = "as bitsandbytes marks packed weights"


def integers() -> nn.Module:
    model = tiny_llama(layers=2)
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.data.to(torch.int8), requires_grad=False)
    return model


def patched() -> nn.Module:
    model = adapted(tiny_llama(layers=1))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.forward = layer.forward
    return model


def latent() -> nn.Module:
    """Return a model whose key-value latents every rank computes, next to split query heads."""
    model = tiny_model("deepseek_v3", seed=0)
    return adapted(model, target_modules=["q_b_proj", "kv_a_proj_with_mqa", "o_proj"], lora_dropout=0.1)


def packed() -> nn.Module:
    model = tiny_llama(layers=2)
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.Tensor._make_subclass(Packed, torch.zeros(64, 1, dtype=torch.uint8), False)  # type: ignore[assignment]
    return model


REFUSED: dict[str, tuple[Any, str]] = {
    "DoRA": (lambda: adapted(tiny_llama(), use_dora=True), "a variant of LoRA"),
    "bias after a sum": (lambda: adapted(tiny_llama(), lora_bias=True), "lora_bias"),
    "copies": (
        lambda: adapted(tiny_llama(), target_modules=["q_proj"], modules_to_save=["up_proj"]),
        "a trained copy of a layer",
    ),
    "IA3": (
        lambda: get_peft_model(tiny_llama(), IA3Config(task_type="CAUSAL_LM")),
        "adapters of the method ia3",
    ),
    "AdaLoRA": (
        lambda: get_peft_model(tiny_llama(), AdaLoraConfig(total_step=9, target_modules=["q_proj"])),
        "adapters of the method adalora",
    ),
    "prefixes": (
        lambda: get_peft_model(tiny_llama(), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
        "a trained prefix of keys and values",
    ),
    "patched": (patched, "q_proj was replaced"),
    "dropout of replicated layers": (latent, "has LoRA adapters with dropout"),
    "packed": (packed, "quantized to packed bytes"),
    "integers": (integers, "quantized to packed bytes"),
}


def refused(ctx: RankContext, kind: str) -> str:
    with pytest.raises(ConfigError) as error:
        engine_of(2, config_of(0), REFUSED[kind][0]())
    return str(error.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_split_is_refused(pool: WorkerPool, kind: str) -> None:
    assert REFUSED[kind][1] in pool.run(refused, 2, kind)[0]


def fused(model: Any, kind: str) -> Any:
    """Replace the forward, as TRL and Liger do, by one that multiplies by the weight of the head itself."""

    def forward(self: Any, input_ids: Tensor, labels: Tensor, **others: Any) -> CausalLMOutput:
        hidden = self.model(input_ids=input_ids, **others).last_hidden_state
        logits = hidden @ self.lm_head.weight.T
        return CausalLMOutput(loss=self.loss_function(logits, labels, vocab_size=logits.shape[-1]))

    if kind == "object":
        model.forward = MethodType(forward, model)
        return model
    model.__class__ = type(
        "Fused", (type(model),), {"forward": forward, "__module__": type(model).__module__}
    )
    return model


def fused_steps(ctx: RankContext, kind: str, tied: bool) -> list[float]:
    engine = engine_of(2, config_of(1), adapted(fused(tiny_llama(tied, layers=2), kind)))
    return advance(engine, range(STEPS))[0]


@pytest.mark.parametrize(("kind", "tied"), [("object", False), ("object", True), ("class", False)])
def test_a_forward_of_others_reads_the_whole_head(pool: WorkerPool, kind: str, tied: bool) -> None:
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    want = train_plain(adapted(fused(tiny_llama(tied, layers=2), kind)), batch, adamw, STEPS, clip=CLIP)
    assert pool.run(fused_steps, 2, kind, tied)[0] == pytest.approx(want.losses, rel=2e-6)


def saved_by_peft(ctx: RankContext, directory: Path) -> tuple[list[str], bool]:
    engine = engine_of(2, config_of(1), MODELS["llama"]())
    said = []
    for call in (
        lambda: engine.module.save_pretrained(directory / "shards"),
        lambda: engine.module.base_model.model.save_pretrained(directory / "shards"),
        engine.module.merge_and_unload,
        engine.module.unload,
    ):
        with pytest.raises(MisplacedCallError) as error:
            call()
        said.append(str(error.value))
    with pytest.raises(MisplacedCallError, match="cannot get another adapter"):
        engine.module.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    state = engine._consolidated_16bit_state_dict()
    if ctx.rank == 0:
        engine.module.save_pretrained(directory / "whole", state_dict=state)
    return said, engine.zero_gather_16bit_weights_on_model_save()


def test_shards_are_not_written_as_a_model(pool: WorkerPool, tmp_path: Path) -> None:
    said, gathers = pool.run(saved_by_peft, 2, tmp_path)[0]
    assert all("save_16bit_model" in each for each in said)
    assert gathers and not (tmp_path / "shards").exists()
    shapes = {n: v.shape for n, v in get_peft_model_state_dict(MODELS["llama"]()).items()}
    found = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    assert {name: value.shape for name, value in found.items()} == shapes


def after_deletion(ctx: RankContext) -> list[float]:
    model = MODELS["llama"]()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.delete_adapter("default")
    model.set_adapter("other")
    return advance(engine_of(2, config_of(1), model), range(2))[0]


def test_a_deleted_adapter_is_none(pool: WorkerPool) -> None:
    torch.manual_seed(2)
    assert all(loss > 0 for loss in pool.run(after_deletion, 2)[0])


def test_names_are_those_before_the_adapters() -> None:
    model = tiny_llama(layers=1)
    before = {name: type(module) for name, module in model.named_modules()}
    wrapped = adapted(model)
    prefix = "base_model.model."
    after = {
        name.removeprefix(prefix): type(module)
        for name, module in modules_before_peft(wrapped)
        if name.startswith(prefix)
    }
    assert after == {name: kind for name, kind in before.items() if name}
