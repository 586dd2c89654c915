"""Which programs of others are run, and how (data)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"


@dataclass(frozen=True)
class Client:
    """One program in one setting. Arguments may hold {out}, {models}, {json} and {examples}."""

    name: str
    setting: str
    version_of: str
    """The Python package, or the directory below EXAMPLES, whose version the table tells."""
    program: str
    """Of `programs/`, or below EXAMPLES."""
    arguments: tuple[str, ...] = ()
    stage: int | None = None
    """Of the JSON that it is given."""
    sections: dict[str, Any] = field(default_factory=dict)
    """Of that JSON, besides."""
    environment: dict[str, str] = field(default_factory=dict)
    local_rank: bool = False
    """It has a flag --local_rank, as programs for DeepSpeed's launcher have."""
    limit: float = 1e-5
    """How far losses may be from DeepSpeed's, relatively."""
    module: bool = False
    """The program is a module's name."""
    alone: str = ""
    """Why DeepSpeed does not run it on a CPU, where that is known."""

    @property
    def own(self) -> bool:
        """Its program is of `programs/`, or of an installed package."""
        return self.module or "/" not in self.program

    @property
    def key(self) -> str:
        stage = "" if self.stage is None else f", stage {self.stage}"
        return f"{self.name}{stage}{', ' if self.setting else ''}{self.setting}"


def json_of(client: Client) -> dict[str, Any]:
    """The JSON that a client is given."""
    keys = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    zero: dict[str, Any] = {"stage": client.stage}
    if client.stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    sections = dict(client.sections)
    zero |= sections.pop("zero_optimization", {})
    return {**dict.fromkeys(keys, AUTO), "zero_optimization": zero, **sections}


def _trl() -> list[Client]:
    """Every two of trainer, stage, tied, LoRA and model meet; full weights at stage 3 more often."""
    trainers = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "kto": "KTO", "grpo": "GRPO"}
    rows = []
    for i, trainer in enumerate(trainers):
        rows.append((trainer, 2, i % 2 == 1, i // 2 % 2 == 1))
        rows.append((trainer, 3, i % 2 == 0, i // 2 % 2 == 0))
    rows += [("sft", 3, True, False), ("dpo", 3, False, False), ("grpo", 3, True, False)]
    made = []
    for i, (trainer, stage, tied, lora) in enumerate(rows):
        model = f"{('llama', 'qwen2')[i // 2 % 2]}-{'tied' if tied else 'untied'}"
        arguments = ("--trainer", trainer, "--model", "{models}/" + model, "--deepspeed", "{json}")
        arguments += ("--output_dir", "{out}", *(["--lora"] if lora else []))
        setting = f"{model.replace('-', ', ')}{', LoRA' if lora else ''}"
        made.append(
            Client(f"TRL {trainers[trainer]}Trainer", setting, "trl", "trl_trainers.py", arguments, stage)
        )
    return made


def _lightning() -> list[Client]:
    """It makes the JSON itself."""
    name, version_of, program = "Lightning DeepSpeedStrategy", "lightning", "lightning_trainer.py"
    made = []
    for stage in (1, 2, 3):
        arguments = ("--stage", str(stage), "--out", "{out}")
        made.append(Client(name, "saved and resumed", version_of, program, arguments, stage))
    arguments = ("--stage", "3", "--out", "{out}", "--validate")
    return [*made, Client(name, "validate(ckpt_path=...) by itself", version_of, program, arguments, 3)]


def _trainers() -> list[Client]:
    """Those that build on transformers.Trainer, and Trainer with models that read no text."""
    to = ("--deepspeed", "{json}", "--out", "{out}")
    made = []
    for stage in (2, 3):
        made += [
            Client("SentenceTransformerTrainer", "BERT", "sentence-transformers",
                   "sentence_transformers_trainer.py", ("--model", "{models}/bert", *to), stage),
            Client("SentenceTransformerTrainer", "BERT, save_model", "sentence-transformers",
                   "sentence_transformers_trainer.py", ("--model", "{models}/bert", "--save", *to), stage,
                   alone="it writes a file of empty tensors, in silence" if stage == 3 else ""),
            Client("Seq2SeqTrainer", "T5, tied, predict_with_generate", "transformers", "seq2seq_trainer.py",
                   ("--tokenizer", "{models}/llama-tied", "--tied", *to), stage),
            Client("Seq2SeqTrainer", "T5, untied, predict_with_generate", "transformers", "seq2seq_trainer.py",
                   ("--tokenizer", "{models}/llama-tied", *to), stage),
            Client("Trainer", "ViT", "transformers", "vision_and_speech.py", ("--kind", "vit", *to), stage),
            Client("Trainer", "Wav2Vec2 with CTC", "transformers", "vision_and_speech.py",
                   ("--kind", "wav2vec2", *to), stage),
        ]  # fmt: skip
    return made


def _examples() -> list[Client]:
    """DeepSpeed's own examples."""
    home, training = "DeepSpeedExamples", "DeepSpeedExamples/training"

    def one(name: str, setting: str, program: str, *arguments: str, needs: str = "", **others: Any) -> Client:
        others.setdefault("environment", {"CLIENT_STAND_INS": needs})
        return Client(f"DeepSpeedExamples {name}", setting, home, program, arguments, **others)

    flags = ("--deepspeed", "--epochs", "1", "--dtype", "fp32", "--log-interval", "1", "--stage")
    cifar = [
        one("cifar", "fp32", f"{training}/cifar/cifar10_deepspeed.py", *flags, str(stage),
            stage=stage, needs="cifar", local_rank=True)
        for stage in range(4)
    ]  # fmt: skip
    pipeline = [
        one("pipeline_parallelism", f"-p {degree}", f"{training}/pipeline_parallelism/train.py",
            "--deepspeed_config=ds_config.json", "-p", str(degree), "--steps=1", "--backend", "gloo",
            needs="cifar cuda", local_rank=True)
        for degree in (0, 2)
    ]  # fmt: skip
    tensor = [
        one("tensor_parallel", f"basic_example, tp 2, {precision}",
            f"{training}/tensor_parallel/basic_example/autotp_example.py",
            "--model_name", "{models}/llama-untied", "--tp_size", "2", "--dp_size", "1", "--zero_stage", "1",
            "--precision", precision, "--seq_length", "32", "--num_steps", "3", "--learning_rate", "1e-3",
            stage=1, needs="cuda seed", local_rank=True, limit=1e-2 if precision == "bf16" else 1e-5)
        for precision in ("fp32", "bf16")
    ]  # fmt: skip
    return [
        *cifar,
        one("gan", "FakeData; rounding grows from step to step",
            f"{training}/gan/gan_deepspeed_train.py", "--dataset", "fake", "--ngf", "8",
            "--ndf", "8", "--workers", "0", "--deepspeed_config", "gan_deepspeed_config.json",
            "--tensorboard_path", "{out}", "--outf", "{out}", needs="cuda", local_rank=True, limit=1e-2),
        one("HelloDeepSpeed", "bf16", f"{training}/HelloDeepSpeed/train_bert_ds.py", "--checkpoint_dir", "{out}",
            "--tokenizer", "{models}/llama-tied", "--dtype", "bf16", "--num_iterations", "3", "--batch_size", "4",
            "--num_layers", "2", "--num_heads", "4", "--ff_dim", "64", "--h_dim", "32", "--log_every", "1",
            needs="text", local_rank=True, limit=1e-2),
        *pipeline,
        *tensor,
    ]  # fmt: skip


CLIENTS: list[Client] = [*_trl(), *_lightning(), *_trainers(), *_examples()]

NOT_RUN: dict[str, str] = {
    "accelerate's examples": "not tried yet: their data and models come from the hub",
    "DeepSpeedExamples offload_states": "it asserts that memory of a device becomes free: it needs a GPU",
    "DeepSpeedExamples DeepSpeed-Chat, ZenFlow, SuperOffload": "not tried yet",
    "LLaMA-Factory": "not tried yet: it asks for transformers 5.8 and torchaudio, which has no wheel for CPUs on PyPI",
}
"""Client -> why it has not been run."""
