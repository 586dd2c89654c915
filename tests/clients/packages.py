"""Programs in `programs/` for installed packages: TRL, Lightning, and libraries built on the Trainer."""

from __future__ import annotations

from tests.clients.client import Client


def trl() -> list[Client]:
    """Return a pairwise covering of trainer, stage, tied weights, LoRA and model.

    Full weights at stage 3 occur more often.
    """
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


def lightning() -> list[Client]:
    """Return the Lightning runs. Lightning generates the JSON itself."""
    name, version_of, program = "Lightning DeepSpeedStrategy", "lightning", "lightning_trainer.py"
    made = []
    for stage in (1, 2, 3):
        arguments = ("--stage", str(stage), "--out", "{out}")
        made.append(Client(name, "saved and resumed", version_of, program, arguments, stage))
    arguments = ("--stage", "3", "--out", "{out}", "--validate")
    return [*made, Client(name, "validate(ckpt_path=...) by itself", version_of, program, arguments, 3)]


def trainers() -> list[Client]:
    """Return libraries built on transformers.Trainer, and the Trainer with models that are not text models."""
    to = ("--deepspeed", "{json}", "--out", "{out}")
    made = []
    for stage in (2, 3):
        made += [
            Client("SentenceTransformerTrainer", "BERT", "sentence-transformers",
                   "sentence_transformers_trainer.py", ("--model", "{models}/bert", *to), stage),
            Client("SentenceTransformerTrainer", "BERT, save_model", "sentence-transformers",
                   "sentence_transformers_trainer.py", ("--model", "{models}/bert", "--save", *to), stage,
                   ends="rank 0 alone saves what is sharded, an error here; DeepSpeed writes empty tensors, in silence"
                   if stage == 3 else ""),
            Client("Seq2SeqTrainer", "T5, tied, predict_with_generate", "transformers", "seq2seq_trainer.py",
                   ("--tokenizer", "{models}/llama-tied", "--tied", *to), stage),
            Client("Seq2SeqTrainer", "T5, untied, predict_with_generate", "transformers", "seq2seq_trainer.py",
                   ("--tokenizer", "{models}/llama-tied", *to), stage),
            Client("Trainer", "ViT", "transformers", "vision_and_speech.py", ("--kind", "vit", *to), stage),
            Client("Trainer", "Wav2Vec2 with CTC", "transformers", "vision_and_speech.py",
                   ("--kind", "wav2vec2", *to), stage),
            *(Client("Trainer", f"llama, QLoRA: nf4 in {storage}", "bitsandbytes", "qlora_trainer.py",
                     ("--model", "{models}/llama-untied", "--storage", storage, *to), stage)
              for storage in (("uint8",) if stage == 2 else ("uint8", "float32"))),
        ]  # fmt: skip
    return made
