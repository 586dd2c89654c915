"""Trainer with models that read pictures or sound: a ViT, and a Wav2Vec2 with CTC."""

import argparse

import torch
from transformers import (
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    set_seed,
)


def vit() -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": torch.tensor(n % 5)} for n in range(16)]
    return ViTForImageClassification(config), rows


def wav2vec2() -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=12,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_length=2, layerdrop=0.0,
        ctc_loss_reduction="mean",
    )  # fmt: skip
    rows = [{"input_values": torch.randn(800), "labels": torch.randint(1, 12, (5,))} for _ in range(16)]
    return Wav2Vec2ForCTC(config), rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["vit", "wav2vec2"])
    parser.add_argument("--deepspeed")
    parser.add_argument("--out")
    args = parser.parse_args()
    set_seed(1)
    model, rows = {"vit": vit, "wav2vec2": wav2vec2}[args.kind]()
    given = TrainingArguments(
        args.out, deepspeed=args.deepspeed, per_device_train_batch_size=2, num_train_epochs=2, logging_steps=1,
        save_strategy="epoch", report_to=[], learning_rate=1e-3, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=given, train_dataset=rows)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
