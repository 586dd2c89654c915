"""Which programs of others are run, and how (data)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
OURS, THEIRS = "ours", "deepspeed"
"""The engines."""


@dataclass(frozen=True)
class Client:
    """One program in one setting. Arguments may hold {out}, {models}, {json},
    {cwd}, {older} and {examples}."""

    name: str
    setting: str
    version_of: str
    """The Python package, or the directory below EXAMPLES, whose version the table tells."""
    program: str = ""
    """Of `programs/`, or below EXAMPLES."""
    arguments: tuple[str, ...] = ()
    stage: int | None = None
    """Of the JSON that it is given."""
    sections: dict[str, Any] = field(default_factory=dict)
    """Of that JSON, besides."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that it gets; values may hold the same words as arguments."""
    stand_ins: str = ""
    """What this machine lacks, and gets stood in: words of stand_ins/sitecustomize.py."""
    paths: tuple[str, ...] = ()
    """Directories in which it finds packages of its own."""
    local_rank: bool = False
    """It has a flag --local_rank, as programs for DeepSpeed's launcher have."""
    limit: float = 1e-5
    """How far losses may be from DeepSpeed's, relatively."""
    module: bool = False
    """The program is a module's name."""
    alone: str = ""
    """Why DeepSpeed does not run it on a CPU, where that is known."""
    tests: tuple[str, ...] = ()
    """Files below its checkout; then it is a test suite, and has no program."""
    least: float = 1.0
    """Of a test suite: the share of what DeepSpeed passes that has to pass here."""
    limit_s: float = 600.0
    """How long it may run."""

    @property
    def own(self) -> bool:
        """Its program is of `programs/`, or of an installed package."""
        return not self.tests and (self.module or "/" not in self.program)

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
        return Client(
            f"DeepSpeedExamples {name}", setting, home, program, arguments, stand_ins=needs, **others
        )

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
            needs="data", local_rank=True, limit=1e-2),
        *pipeline,
        *tensor,
        *_deepspeeds_larger_examples(one),
    ]  # fmt: skip


def _deepspeeds_larger_examples(one: Callable[..., Client]) -> list[Client]:
    training, chat = "DeepSpeedExamples/training", "DeepSpeedExamples/applications/DeepSpeed-Chat"
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    bf16 = {"bf16": {"enabled": True}, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}  # fmt: skip
    host = {"device": "cpu", "pin_memory": False}
    superoffload = {**host, "ratio": 0.8, "super_offload": True}
    sft = [
        one("DeepSpeed-Chat step 1", f"OPT, SFT, bf16{', LoRA' if lora else ''}",
            f"{chat}/training/step1_supervised_finetuning/main.py", "--model_name_or_path", "{models}/opt-tied",
            "--data_output_path", "{out}/data", "--max_seq_len", "32", "--per_device_train_batch_size", "2",
            "--per_device_eval_batch_size", "4", "--dtype", "bf16", "--zero_stage", str(stage), "--deepspeed",
            "--dropout", "0.0", *(("--lora_dim", "4") if lora else ()),
            stage=stage, needs="data no_init_weights", local_rank=True, limit=1e-2, paths=("{examples}/" + chat,),
            environment={"PYTHONDONTWRITEBYTECODE": "1"})
        for stage, lora in ((2, False), (3, False), (2, True))
    ]  # fmt: skip
    model = ("--model_name", "{models}/llama-untied", "--deepspeed_config", "{json}", "--lr", "1e-3")
    model += ("--batch_size", "2", "--num_train_epochs", "1", "--output_dir", "{out}")
    zenflow = {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": False}
    return [
        *sft,
        one("ZenFlow finetuning", "llama, bf16; rank 0 alone saves at the end",
            f"{training}/DeepSpeed-ZenFlow/finetuning/finetune_llama.py", *model,
            stage=2, needs="data", local_rank=True, limit=1e-2,
            sections={**bf16, "optimizer": adam, "zero_allow_untested_optimizer": True,
                      "zero_optimization": {"offload_optimizer": host, "zenflow": zenflow}}),
        one("SuperOffload", "llama, bf16", f"{training}/DeepSpeed-SuperOffload/finetune_zero3.py", *model,
            "--attn_implementation", "sdpa", "--max_length", "64", "--bench_steps", "4", "--warmup_steps", "0",
            stage=3, needs="data", local_rank=True, limit=1e-2,
            sections={**bf16, "zero_optimization": {"offload_optimizer": superoffload}}),
        one("offload_states", "asserts that memory becomes free", f"{training}/offload_states/offload_states.py",
            "--hidden_dim", "64", "--iteration", "4", "--warmup", "1", "--dtype", "torch.float32",
            stage=3, needs="seed", local_rank=True),
    ]  # fmt: skip


def _accelerates() -> list[Client]:
    """accelerate's examples; its environment variables say what `accelerate launch` would."""
    home = "accelerate"
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{json}",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    model = ("--model_name_or_path", "{models}/llama-untied", "--tokenizer_name", "{models}/llama-untied")
    text = (
        *model,
        "--dataset_name",
        "wikitext",
        "--block_size",
        "32",
        "--seed",
        "1",
        "--output_dir",
        "{out}",
    )
    steps = ("--per_device_train_batch_size", "4", "--max_train_steps", "6", "--num_warmup_steps", "2")
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO}}}
    warmup = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": AUTO, "total_num_steps": AUTO}}
    rows: list[tuple[str, str, tuple[str, ...], int, dict[str, Any]]] = [
        ("nlp_example", "BERT", (), 2, {}),
        ("nlp_example", "BERT", (), 3, {}),
        ("complete_nlp_example", "BERT, a checkpoint an epoch",
         ("--checkpointing_steps", "epoch", "--output_dir", "{out}"), 3, {}),
        ("by_feature/checkpointing", "BERT", ("--checkpointing_steps", "2", "--output_dir", "{out}"), 2, {}),
        ("by_feature/gradient_accumulation", "BERT, 2 microbatches",
         ("--gradient_accumulation_steps", "2"), 3, {"gradient_accumulation_steps": 2}),
        ("by_feature/gradient_accumulation_for_autoregressive_models", "llama",
         ("--gradient_accumulation_steps", "2"), 2, {"gradient_accumulation_steps": 2}),
        ("by_feature/cross_validation", "BERT, 2 folds", ("--num_folds", "2"), 2, {}),
        ("by_feature/early_stopping", "BERT", (), 3, {}),
        ("by_feature/memory", "BERT", (), 2, {}),
        ("by_feature/multi_process_metrics", "BERT", (), 3, {}),
        ("by_feature/tracking", "BERT", ("--project_dir", "{out}"), 2, {}),
        ("by_feature/deepspeed_with_config_support", "llama", (*text, *steps), 2, {}),
        ("by_feature/deepspeed_with_config_support", "llama, optimizer and scheduler of the JSON",
         (*text, *steps, "--checkpointing_steps", "epoch", "--load_best_model"), 3, adamw | {"scheduler": warmup}),
    ]  # fmt: skip
    return [
        Client(f"accelerate {name.rpartition('/')[2]}", setting, home, f"{home}/examples/{name}.py", arguments, stage,
               sections=sections, environment=variables, stand_ins="data metrics gloo")
        for name, setting, arguments, stage, sections in rows
    ]  # fmt: skip


def _factory() -> list[Client]:
    """LLaMA-Factory's command line, with the versions of packages that it asks for."""
    home = "LLaMA-Factory"
    flags = {
        "model_name_or_path": "{models}/llama-untied", "stage": "sft", "do_train": "true", "dataset": "identity",
        "dataset_dir": "{examples}/LLaMA-Factory/data", "template": "default", "cutoff_len": "32", "max_samples": "24",
        "output_dir": "{out}", "per_device_train_batch_size": "2", "max_steps": "4", "report_to": "none",
        "deepspeed": "{json}", "learning_rate": "1e-3", "logging_steps": "1", "save_strategy": "no",
    }  # fmt: skip
    made = []
    for stage, kind in ((2, "full"), (3, "full"), (3, "lora")):
        arguments = [word for name, value in flags.items() for word in (f"--{name}", value)]
        made.append(
            Client("LLaMA-Factory SFT", f"llama, untied, {kind}", home, f"{home}/src/train.py",
                   (*arguments, "--finetuning_type", kind), stage, stand_ins="torchaudio",
                   paths=("{older}", "{examples}/LLaMA-Factory/src"), environment={"PYTHONDONTWRITEBYTECODE": "1"})
        )  # fmt: skip
    return made


def _suites() -> list[Client]:
    """Tests of other projects, as if there were accelerators with fp16; those that need one process."""
    deepspeed = ("test_deepspeed", "test_deepspeed_gradient_accumulation", "test_deepspeed_multiple_model")
    return [
        Client("accelerate's tests", "tests/deepspeed", "accelerate",
               tests=tuple(f"tests/deepspeed/{name}.py" for name in deepspeed), paths=("{cwd}/src",), limit_s=2400,
               stand_ins="data metrics accelerators gloo fp16"),
        Client("transformers' tests", "test_trainer_distributed_deepspeed.py", "transformers",
               tests=("tests/trainer/distributed/test_trainer_distributed_deepspeed.py",),
               limit_s=2400, least=0.95, stand_ins="data torch_accelerators gloo fp16"),
    ]  # fmt: skip


CLIENTS: list[Client] = [
    *_trl(),
    *_lightning(),
    *_trainers(),
    *_examples(),
    *_accelerates(),
    *_factory(),
    *_suites(),
]

NOT_RUN: dict[str, str] = {
    "accelerate's examples of computer vision": "they ask for timm and its weights",
    "DeepSpeedExamples pipeline_parallelism, LLaMA-Factory": "prepared, and not run to a verdict yet",
    "transformers' model zoo of DeepSpeed tests": "fp16 with example scripts and 28 models of the hub",
}
"""Client -> why it has not been run."""
