"""SentenceTransformerTrainer on a tiny BERT; the model that it saved is read again."""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers import set_seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--deepspeed")
    parser.add_argument("--out")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    g = torch.Generator().manual_seed(0)
    text = lambda: " ".join(f"w{i}" for i in torch.randint(120, (6,), generator=g))  # noqa: E731
    data = Dataset.from_dict({"anchor": [text() for _ in range(16)], "positive": [text() for _ in range(16)]})
    set_seed(1)
    given = SentenceTransformerTrainingArguments(
        args.out, deepspeed=args.deepspeed, per_device_train_batch_size=2, num_train_epochs=1, logging_steps=1,
        save_strategy="no", report_to=[], learning_rate=1e-3, use_cpu=True,
    )  # fmt: skip
    model = SentenceTransformer(args.model, device="cpu")
    trainer = SentenceTransformerTrainer(
        model=model, args=given, train_dataset=data, loss=MultipleNegativesRankingLoss(model)
    )
    trainer.train()
    if args.save:
        trainer.save_model(f"{args.out}/saved")
        trainer.accelerator.wait_for_everyone()
        trained = trainer.accelerator.get_state_dict(trainer.deepspeed)
        if trainer.accelerator.is_main_process:
            (file,) = Path(f"{args.out}/saved").rglob("model.safetensors")
            saved = load_file(file)
            same = [
                torch.equal(tensor, trained.get(f"0.model.{name}", tensor[:0]))
                for name, tensor in saved.items()
            ]
            assert same and all(same), "the file that save_model wrote has not the trained weights"


if __name__ == "__main__":
    main()
