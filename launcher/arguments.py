"""Command-line arguments that scripts written for DeepSpeed add to their parser."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, `--deepspeed_config PATH` and their former names, as in DeepSpeed."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the training engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted for compatibility; has no effect")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the DeepSpeed JSON config")
    group.add_argument("--deepscale", action="store_true", help="the former name of --deepspeed")
    group.add_argument(
        "--deepscale_config", type=str, default=None, help="the former name of --deepspeed_config"
    )
    return parser
