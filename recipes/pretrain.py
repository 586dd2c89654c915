"""Pretrain a causal language model from scratch:  launch --config ds_config.json pretrain [flags]

Without flags it trains the packaged small Llama on the bytes of Python's standard library.
"""

from __future__ import annotations

import launcher
from launcher.cli.flags import FlagParser
from launcher.cli.recipe_flags import training_parser
from launcher.data.pack import pack
from launcher.data.text import load_text
from launcher.data.tokenizer import load_tokenizer, train_tokenizer
from launcher.engine.weights import model_with_source
from launcher.models.build import EMBEDDED, load_config
from launcher.models.packaged import unpacked
from launcher.run import Run
from launcher.train import Training

SEQ_LENGTH, MAX_STEPS, MICRO_BATCH, LR, WEIGHT_DECAY = 256, 200, 4, 1e-3, 0.1


def flags() -> FlagParser:
    """Return the recipe's flags, without importing torch."""
    parser = training_parser(
        "pretrain",
        "Pretrain a causal language model on text.",
        defaults={
            "--model": "an embedded small Llama",
            "--dataset": "stdlib",
            "--seq-length": SEQ_LENGTH,
            "--max-steps": MAX_STEPS,
            "--learning-rate": LR,
            "--weight-decay": WEIGHT_DECAY,
            "--batch-size": f"{MICRO_BATCH} for each rank",
        },
    )
    parser.add_argument("--from-scratch", action="store_true", help="ignore weights that --model may have")
    parser.add_argument(
        "--document-mask",
        action="store_true",
        help="keep the documents of a row apart: none attends to those before it (they end at the eos token)",
    )
    return parser


def main() -> None:
    run = Run.start(flags().parse_args())
    args = run.args
    name, dataset, seq_length = (
        unpacked(args.model or "default"),
        args.dataset or "stdlib",
        args.seq_length or SEQ_LENGTH,
    )

    # Data: text -> tokens -> rows of seq_length, built once and cached.
    text = load_text(dataset)
    model_config = load_config(name)
    if args.train_tokenizer:
        tokenizer = train_tokenizer(text, args.train_tokenizer)
        model_config.vocab_size = len(tokenizer)
    else:
        tokenizer = load_tokenizer(
            args.tokenizer, None if name in EMBEDDED else name, model_config.vocab_size
        )
    train_set = pack(text, tokenizer, seq_length, document_mask=args.document_mask)
    held_out = load_text(dataset, split="eval")
    eval_set = pack(held_out, tokenizer, seq_length, document_mask=args.document_mask)

    # Model and engine.
    total_steps = run.total_steps(len(train_set), default=MAX_STEPS, micro_batch=MICRO_BATCH)
    made = model_with_source(model_config, name, from_scratch=args.from_scratch, seed=args.seed)
    engine, *_ = launcher.initialize(
        model=made.model,
        model_parameters=run.param_groups(made.model),
        config=run.config,
        source=made.source,
        seed=args.seed,
        device=run.device,
        auto=run.auto_values(
            lr=LR, weight_decay=WEIGHT_DECAY, total_steps=total_steps, micro_batch=MICRO_BATCH
        ),
        seq_length=seq_length,
    )
    run.describe(
        engine, f"{name} ({made.how})", f"{dataset}: {len(train_set):,} sequences of {seq_length} tokens"
    )

    Training(run, engine, train_set, eval_set, total_steps, name, tokenizer).fit()


if __name__ == "__main__":
    main()
