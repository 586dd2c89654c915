"""What `finetune --lora --load-in-4bit` does. `make parity` installs bitsandbytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from launcher.checkpoint.hub_model import write_model
from launcher.checkpoint.source import SourceCheckpoint
from launcher.models.adapters import LoraSettings
from tests.engine.test_lora_recipe import PARTS, STEPS, logits, plain, stored, trained
from tests.pipeline.running import CLIP, LR, config_of
from tests.pool import WorkerPool
from tests.pool.reference import batch, train_plain

pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("stage", [2, 3])
def test_quantized_weights(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    """QLoRA equals PEFT on transformers' quantized model; its adapters merge into the weights as stored."""
    base, lora = stored("llama", tmp_path), LoraSettings.of(4, load_in_4bit=True)
    losses, _ = pool.run(trained, 2, base, config_of(stage, PARTS // 2, {}), lora, tmp_path)[0]
    quantized = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(base, use_cache=False, quantization_config=quantized)
    before = PeftModel.from_pretrained(model, tmp_path / "before", is_trainable=True).train()
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    wanted = train_plain(before, batch, adamw, STEPS, PARTS, clip=CLIP).losses
    assert losses == pytest.approx(wanted, rel=2e-6)
    write_model(SourceCheckpoint.open(tmp_path / "checkpoints"), str(base), tmp_path / "merged")
    merged, after = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), plain(base, tmp_path / "after")
    assert torch.allclose(logits(merged), logits(after), atol=2e-5)
