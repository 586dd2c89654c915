"""A script as users write them: transformers' Trainer, or accelerate, and nothing of ours. `launch` starts it once for
many scenarios, for importing these libraries takes most of the time.

    hf_scenarios.py DIRECTORY NAME [NAME ...]      (writes DIRECTORY/results.json on rank 0)

"NAME tied" is the same scenario with a model whose output head is its embedding.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from launcher.errors import LauncherError
from tests.integrations import TIED

VOCABULARY, LENGTH, ROWS = 128, 16, 36
AUTO = "auto"
TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
OPTIMIZER = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO,
                                            "warmup_type": "linear"}}  # fmt: skip


def rows(seed: int = 0, number: int = ROWS, masked: bool = True) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens; labels that count differ from row to row, so num_items_in_batch matters.

    Args:
        masked: false: all labels count, and the mean over rows is the mean over tokens.
    """
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(number):
        row = torch.randint(0, VOCABULARY, (LENGTH,), generator=g)
        labels = row.clone()
        labels[: i % 7 if masked else 0] = -100
        made.append({"input_ids": row, "labels": labels})
    return made


def json_of(stage: int, **sections: Any) -> dict[str, Any]:
    """A JSON with "auto" wherever transformers resolves it."""
    zero = {
        "stage": stage,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
        **sections.pop("zero", {}),
    }
    keys = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    return {
        **dict.fromkeys(keys, AUTO),
        "zero_optimization": zero,
        "bf16": {"enabled": AUTO},
        "fp16": {"enabled": AUTO},
        **sections,
    }


def trainer_of(
    directory: Path,
    config: dict[str, Any] | None,
    model: Any = None,
    callbacks: Any = None,
    *,
    masked: bool = True,
    **arguments: Any,
) -> Trainer:
    """A Trainer of the tiny Llama: 36 rows, 8 a step, so the last of its five steps has 4."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    given = {
        "output_dir": str(directory), "per_device_train_batch_size": 4 // world, "gradient_accumulation_steps": 2,
        "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", "report_to": [], "learning_rate": 1e-2,
        "disable_tqdm": True, "max_grad_norm": 0.5, "warmup_steps": 2, "per_device_eval_batch_size": 4 // world,
        "adam_beta2": 0.95, **arguments,
    }  # fmt: skip
    if config is not None:
        given["deepspeed"] = config
    args = TrainingArguments(**given)
    transformers.set_seed(1)
    made = model() if callable(model) else LlamaForCausalLM(LlamaConfig(**TINY))
    return Trainer(
        model=made,
        args=args,
        train_dataset=rows(masked=masked),
        eval_dataset=rows(1, 8, masked=False),
        callbacks=callbacks,
    )


def told(trainer: Trainer) -> dict[str, Any]:
    """What the Trainer logged, by step."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [float(entry.get("grad_norm", "nan")) for entry in logged],
        "rates": [entry["learning_rate"] for entry in logged],
        "evaluated": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "engine": type(trainer.model_wrapped).__module__,
    }


def train(directory: Path, config: dict[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    trainer = trainer_of(directory, config, **arguments)
    trainer.train()
    return told(trainer)


IN_PAIRS = {"masked": False, "per_device_train_batch_size": 2, "eval_strategy": "epoch"}
"""transformers takes the mean of microbatches where ranks share sequences, so all labels count."""


def shared_sequences() -> Any:
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    return ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=2,
        sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa"),
    )


SCENARIOS: dict[str, Callable[[Path], Any]] = {}


def scenario(name: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def register(run: Callable[[Path], Any]) -> Callable[[Path], Any]:
        SCENARIOS[name] = run
        return run

    return register


def _table() -> None:
    cpu = {"device": "cpu"}
    nvme = lambda directory: {"device": "nvme", "nvme_path": str(directory)}  # noqa: E731
    table: dict[str, Callable[[Path], Any]] = {
        "plain": lambda d: train(d, None),
        "plain_constant": lambda d: train(d, None, lr_scheduler_type="constant_with_warmup"),
        **{f"stage{s}": lambda d, s=s: train(d, json_of(s)) for s in range(4)},
        "json_json": lambda d: train(d, json_of(2, optimizer=OPTIMIZER, scheduler=SCHEDULER)),
        "json_hf": lambda d: train(d, json_of(3, optimizer=OPTIMIZER)),
        "hf_json": lambda d: train(d, json_of(1, scheduler=SCHEDULER)),
        "no_warm_up": lambda d: train(d, json_of(1, scheduler=SCHEDULER), warmup_steps=0),
        "plain_bf16": lambda d: train(d, None, bf16=True, use_cpu=True),
        "bf16": lambda d: train(d, json_of(3), bf16=True, use_cpu=True),
        "fp16": lambda d: train(d, json_of(2), fp16=True, use_cpu=True),
        "recomputed": lambda d: train(d, json_of(3), gradient_checkpointing=True),
        "cpu2": lambda d: train(d, json_of(2, zero={"offload_optimizer": cpu})),
        "cpu3": lambda d: train(
            d, json_of(3, optimizer=OPTIMIZER, zero={"offload_optimizer": cpu, "offload_param": cpu})
        ),
        "nvme3": lambda d: train(
            d, json_of(3, zero={"offload_optimizer": nvme(d), "offload_param": nvme(d)})
        ),
        "tp": lambda d: train(
            d, json_of(1, tensor_parallel={"autotp_size": 2}), per_device_train_batch_size=4
        ),
        "plain_sp": lambda d: train(d, None, **IN_PAIRS),
        "sp": lambda d: train(d, json_of(3), parallelism_config=shared_sequences(), **IN_PAIRS),
    }
    SCENARIOS.update(table)


_table()


# ---- what is saved ----------------------------------------------------------------------------------


@torch.no_grad()
def _loss(model: Any) -> float:
    model.eval()
    batch = rows(1, 8, masked=False)
    ids, labels = (torch.stack([row[key] for row in batch]) for key in ("input_ids", "labels"))
    return float(model(input_ids=ids, labels=labels).loss)


def plainly(call: Callable[[], Any]) -> Any:
    """`from_pretrained` as in a program that knows nothing of ZeRO."""
    from transformers.integrations import deepspeed as module

    known, module._hf_deepspeed_config_weak_ref = module._hf_deepspeed_config_weak_ref, None
    try:
        return call()
    finally:
        module._hf_deepspeed_config_weak_ref = known


@scenario("resumed")
def resumed(directory: Path) -> Any:
    """A run that saves in its middle, and one that goes on from there."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = train(directory, json_of(3), **saving)
    trainer = trainer_of(directory, json_of(3), **saving)
    trainer.train(resume_from_checkpoint=str(directory / "checkpoint-2"))
    return {"whole": whole, "resumed": told(trainer), "files": sorted(os.listdir(directory / "checkpoint-2"))}


def _long(directory: Path, stage: int, **sections: Any) -> Any:
    """20 steps, and again from the middle."""
    saving = {"save_strategy": "steps", "save_steps": 10, "num_train_epochs": 4, "use_cpu": True}
    whole = train(directory, json_of(stage, **sections), **saving)
    trainer = trainer_of(directory, json_of(stage, **sections), **saving)
    trainer.train(resume_from_checkpoint=str(directory / "checkpoint-10"))
    return {"whole": whole, "resumed": told(trainer)}


for _stage in range(4):
    SCENARIOS[f"long{_stage}"] = partial(_long, stage=_stage)
_TORCH = {"type": "AdamW", "params": {**OPTIMIZER["params"], "torch_adam": True}}  # nothing is compiled
SCENARIOS["long_json"] = partial(_long, stage=2, optimizer=_TORCH, scheduler=SCHEDULER)


@scenario("resumed_with_json_optimizer")
def resumed_with_json_optimizer(directory: Path) -> Any:
    saving = {"save_strategy": "steps", "save_steps": 2}
    config = json_of(2, optimizer=OPTIMIZER)
    whole = train(directory, config, **saving)
    trainer = trainer_of(directory, config, **saving)
    trainer.train(resume_from_checkpoint=True)
    return {"whole": whole, "resumed": told(trainer)}


@scenario("resumed_elsewhere")
def resumed_elsewhere(directory: Path) -> Any:
    """On as many ranks as there are, from what another number of them has saved."""
    trainer = trainer_of(directory, json_of(3), use_cpu=True)
    saved = directory.parent / directory.name.replace("resumed_elsewhere", "resumed")
    trainer.train(resume_from_checkpoint=str(saved / "checkpoint-2"))
    return told(trainer)


@scenario("best")
def best(directory: Path) -> Any:
    trainer = trainer_of(
        directory, json_of(3), eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=0.1, num_train_epochs=2,
        callbacks=[EarlyStoppingCallback(2)],
    )  # fmt: skip
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    return {
        **told(trainer),
        "best": trainer.state.best_metric,
        "after": after,
        "steps": trainer.state.global_step,
    }


@scenario("saved")
def saved(directory: Path) -> Any:
    """What save_model writes at stage 3, with whole weights and without; and the script beside a checkpoint."""
    found: dict[str, Any] = {}
    for gather in (True, False):
        zero = {"stage3_gather_16bit_weights_on_model_save": gather}
        out = directory / str(gather)
        trainer = trainer_of(out, json_of(3, zero=zero), max_steps=2)
        trainer.train()
        found[f"trained {gather}"] = trainer.evaluate()["eval_loss"]
        trainer.save_model()
        trainer.accelerator.wait_for_everyone()
        found[f"files {gather}"] = sorted(os.listdir(out))
        if trainer.args.process_index == 0:
            if not gather:
                script, weights = out / "zero_to_fp32.py", out / "fp32"
                subprocess.run([str(script), str(out), str(weights), "--safe_serialization"], check=True)
                for name in ("config.json", "generation_config.json"):
                    (weights / name).write_text((directory / "True" / name).read_text())
                out = weights
            found[f"read {gather}"] = plainly(lambda out=out: _loss(LlamaForCausalLM.from_pretrained(out)))
        trainer.accelerator.wait_for_everyone()
    return found


# ---- models under ZeRO-3 ----------------------------------------------------------------------------


def _pretrained(directory: Path, seed: int = 7) -> Path:
    if int(os.environ["RANK"]) == 0:
        torch.manual_seed(seed)
        plainly(lambda: LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(directory / "model"))
    if dist.is_initialized():
        dist.barrier()
    return directory / "model"


@scenario("tp3")
def tp3(directory: Path) -> Any:
    """A model that is read into shards, and whose layers are split then; its weights are those of the others."""
    config = json_of(3, tensor_parallel={"autotp_size": 2})

    def read() -> Any:
        return AutoModelForCausalLM.from_pretrained(_pretrained(directory, seed=1))

    rows_each = 8 // int(os.environ["WORLD_SIZE"])  # two ranks share a row
    trainer = trainer_of(directory, config, model=read, per_device_train_batch_size=rows_each)
    trainer.train()
    return told(trainer)


@scenario("evaluated")
def evaluated(directory: Path) -> Any:
    """Evaluation before any training, then training, of a model that was read into shards."""
    found: dict[str, Any] = {}
    assert TrainingArguments(output_dir=str(directory), use_cpu=True).world_size == 2  # makes a process group
    path = _pretrained(directory)

    def read() -> Any:
        model = AutoModelForCausalLM.from_pretrained(path)
        found["kinds"] = sorted({type(p).__name__ for p in model.parameters()})
        found["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
        return model

    trainer = trainer_of(directory, json_of(3), model=read)
    found["before"] = trainer.evaluate()["eval_loss"]
    found["plain"] = plainly(lambda: _loss(LlamaForCausalLM.from_pretrained(path)))
    try:  # its engine, which has no optimizer, is destroyed for training
        trainer.train()
    except LauncherError as error:
        found["again"] = str(error)
    trainer = trainer_of(directory, json_of(3), model=lambda: trainer.model)
    trainer.train()
    found["losses"] = told(trainer)["losses"]
    found["after"] = trainer.evaluate()["eval_loss"]
    return found


@scenario("resized")
def resized(directory: Path) -> Any:
    """More tokens, before the engine is made."""
    found: dict[str, Any] = {}
    transformers.set_seed(3)
    path = _pretrained(directory)

    def read() -> Any:
        model = AutoModelForCausalLM.from_pretrained(path)
        model.resize_token_embeddings(VOCABULARY + 8)
        return model

    trainer = trainer_of(directory, json_of(3), model=read)
    found["shape"] = list(trainer.model.get_input_embeddings().weight.shape)
    found["before"] = trainer.evaluate()["eval_loss"]
    trainer = trainer_of(directory, json_of(3), model=lambda: trainer.model)
    trainer.train()
    found["losses"] = told(trainer)["losses"]

    def plain() -> float:
        transformers.set_seed(1)
        model = LlamaForCausalLM.from_pretrained(path)
        model.resize_token_embeddings(VOCABULARY + 8)
        return _loss(model)

    found["plain"] = plainly(plain)
    return found


@scenario("from_config")
def from_config(directory: Path) -> Any:
    trainer = trainer_of(
        directory, json_of(3), model=lambda: AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    )
    kinds = sorted({type(p).__name__ for p in trainer.model.parameters()})
    trainer.train()
    return {**told(trainer), "kinds": kinds}


@scenario("generated")
def generated(directory: Path) -> Any:
    """Ranks generate different numbers of tokens."""
    trainer = trainer_of(directory, json_of(3), max_steps=2)
    trainer.train()
    rank = trainer.args.process_index
    prompt = torch.tensor([[1, 2, 3]])
    out = trainer.model.generate(prompt, max_new_tokens=3 + 5 * rank, do_sample=False)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(directory / "model"))
    trainer.accelerator.wait_for_everyone()
    plain = plainly(lambda: LlamaForCausalLM.from_pretrained(directory / "model"))
    truth = plain.generate(prompt, max_new_tokens=3 + 5 * rank, do_sample=False)
    told_by: list[Any] = [None] * trainer.args.world_size
    dist.all_gather_object(told_by, [out.tolist(), truth.tolist()])
    return told_by


# ---- accelerate ---------------------------------------------------------------------------------------


@scenario("accelerated")
def accelerated(directory: Path) -> Any:
    """A loop of one's own: accumulate, clip, save, load."""
    from accelerate import Accelerator, DeepSpeedPlugin

    found: dict[str, Any] = {}
    for stage in (2, 3):
        plugin = DeepSpeedPlugin(
            zero_stage=stage,
            gradient_accumulation_steps=2,
            gradient_clipping=0.5,
            zero3_save_16bit_model=True,
        )
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, cpu=False)
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**TINY))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(rows(number=16), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses, norms = [], []

        def epoch(loader: Any = loader, model: Any = model, optimizer: Any = optimizer,
                  accelerator: Any = accelerator, losses: Any = losses, norms: Any = norms) -> None:  # fmt: skip
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(float(accelerator.gather(loss.detach()).mean()))

        epoch()
        accelerator.save_state(str(directory / f"state{stage}"))
        epoch()
        first = list(losses)
        accelerator.load_state(str(directory / f"state{stage}"))
        losses.clear()
        epoch()
        state = accelerator.get_state_dict(model)
        found[str(stage)] = {
            "losses": first, "again": losses[:], "norms": [float(n) for n in norms],
            "unwrapped": type(accelerator.unwrap_model(model)).__name__,
            "names": None if state is None else len(state),
        }  # fmt: skip
        AcceleratorState._reset_state(reset_partial_state=True)
    return found


@scenario("staged")
def staged(directory: Path) -> Any:
    try:
        train(directory, json_of(1, pipeline={"stages": 2}))
    except ValueError as error:
        return str(error)
    return "no error"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--local_rank", type=int)
    flags = parser.parse_args()
    results: dict[str, Any] = {}
    for name in flags.names:
        directory = flags.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        print("----", name, flush=True)
        TINY["tie_word_embeddings"] = name.endswith(TIED)
        try:
            results[name] = SCENARIOS[name.removesuffix(TIED)](directory)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(results[name]["error"], flush=True)
        AcceleratorState._reset_state(reset_partial_state=True)
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
        if int(os.environ.get("RANK", 0)) == 0:
            (flags.directory / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
