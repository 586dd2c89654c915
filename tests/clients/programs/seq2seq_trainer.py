"""Seq2SeqTrainer with T5, whose evaluation generates; the model is saved at the end."""

import argparse

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer")
    parser.add_argument("--deepspeed")
    parser.add_argument("--out")
    parser.add_argument("--tied", action="store_true")
    args = parser.parse_args()
    set_seed(1)
    config = T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1, dropout_rate=0.0, tie_word_embeddings=args.tied,
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    row = lambda n: torch.randint(4, 128, (n,), generator=g).tolist()  # noqa: E731
    data = [{"input_ids": row(5 + n % 4), "labels": row(4 + n % 3)} for n in range(16)]
    given = Seq2SeqTrainingArguments(
        args.out, deepspeed=args.deepspeed, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        num_train_epochs=2, logging_steps=1, eval_strategy="epoch", save_strategy="epoch", predict_with_generate=True,
        generation_max_length=8, generation_num_beams=2, report_to=[], learning_rate=1e-3, use_cpu=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    model = T5ForConditionalGeneration(config)

    def lengths(prediction: object) -> dict[str, float]:
        return {"length": float(np.mean(prediction.predictions != 0))}

    trainer = Seq2SeqTrainer(
        model=model, args=given, train_dataset=data, eval_dataset=data[:6], compute_metrics=lengths,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    assert trainer.predict(data[:4]).predictions.shape[0] == 4
    trainer.save_model()


if __name__ == "__main__":
    main()
