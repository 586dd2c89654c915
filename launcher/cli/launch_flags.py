"""The flags of `launch` itself, named as DeepSpeed's launcher names them, and where they end."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from launcher.cli.flags import FlagParser, positive
from launcher.errors import ConfigError

# DeepSpeed's flags that only mean something on several nodes: known, and refused until nodes can be started.
SEVERAL_NODES = {
    "hostfile": "PATH",
    "include": "SPEC",
    "exclude": "SPEC",
    "node_rank": "RANK",
    "launcher": "NAME",
    "launcher_args": "TEXT",
    "no_ssh": None,
    "no_ssh_check": None,
    "force_multi": None,
    "ssh_port": "PORT",
    "venv_script": "PATH",
    "elastic_training": None,
    "min_elastic_nodes": "N",
    "max_elastic_nodes": "N",
}
SHORT_FORMS = {"hostfile": "-H", "include": "-i", "exclude": "-e"}
NOT_THERE_YET = {"autotuning": "{tune,run}", "save_pid": None}

EPILOG = """\
examples:
  launch --config ds_configs/zero2.json
  launch --config ds_configs/zero3.json --num_gpus 2 pretrain --max-steps 30 --output-dir runs/first
  launch --config ds_config.json finetune --model ./my-model --dataset chat.jsonl
  launch check ds_config.json                               (what becomes of every key)
  launch schedule 1f1b --stages 4 --microbatches 8          (what each rank of a pipeline does)
  launch bench io /local_nvme                               (how fast a directory is for offloading)
  launch --num_gpus 4 my_script.py --any --flags
  launch --config ds_configs/zero2.json pretrain --help     (the recipe's flags)

Flags before the recipe's name are the launcher's, flags after it are the recipe's.
Dashes and underscores are the same: --num-gpus is --num_gpus.
"""


def launch_parser() -> FlagParser:
    """The parser of everything that stands before the recipe's name."""
    parser = FlagParser(
        prog="launch",
        usage="launch [flags] --config DS.json [pretrain | finetune | RECIPE.py | SCRIPT.py] [its flags]\n"
        "       launch check DS.json [--num-gpus N] [--explain] [--migrate OUT.json]\n"
        "       launch schedule NAME --stages P --microbatches M [--chunks V] [--costs F,I,W] [--out FILE]\n"
        "       launch bench io PATH [--size N] [--seconds S] [--out FILE]",
        description="Trains a Hugging Face model from a DeepSpeed-style JSON.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--config",
        "--deepspeed_config",
        metavar="DS.json",
        help="the DeepSpeed-style JSON: a file, or its text in base64",
    )
    run.add_argument(
        "--num_gpus",
        "--num_accelerators",
        type=positive,
        metavar="N",
        help="number of ranks (default: one per GPU, or one on a machine without GPUs; works on CPU too)",
    )
    run.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: auto")
    run.add_argument("--master_addr", default="127.0.0.1", metavar="ADDR", help="default: 127.0.0.1")
    run.add_argument("--master_port", type=_port, metavar="PORT", help="default: a free port is picked")
    _add_script_flags(parser)
    _add_output_flags(parser)
    refused = parser.add_argument_group("known, refused for now (several nodes, tuning)")
    refused.add_argument("--num_nodes", type=int, default=1, metavar="N", help="only 1")
    for name, metavar in {**SEVERAL_NODES, **NOT_THERE_YET}.items():
        spellings = [SHORT_FORMS[name]] if name in SHORT_FORMS else []
        if metavar is None:
            refused.add_argument(*spellings, f"--{name}", action="store_true", help=argparse.SUPPRESS)
        else:
            refused.add_argument(*spellings, f"--{name}", metavar=metavar, help=argparse.SUPPRESS)
    return parser


def _add_script_flags(parser: FlagParser) -> None:
    script = parser.add_argument_group("how a script is started")
    script.add_argument(
        "--module", action="store_true", help="the script is a module, as `python -m` takes it"
    )
    script.add_argument("--no_python", action="store_true", help="the script is a program of its own")
    script.add_argument(
        "--no_local_rank", action="store_true", help="do not append --local_rank=N to a script's arguments"
    )
    script.add_argument(
        "--no_deepspeed_shim",
        action="store_true",
        help="`import deepspeed` in a script is DeepSpeed itself; else it is this package's engine",
    )
    script.add_argument(
        "--bind_cores_to_rank", action="store_true", help="give each rank its own share of the cores"
    )
    script.add_argument("--bind_core_list", metavar="LIST", help="cores to share out, e.g. 0-7,16-23")


def _add_output_flags(parser: FlagParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--enable_each_rank_log", metavar="DIR", help="every rank's output to DIR only, none on the terminal"
    )
    output.add_argument(
        "--log_level",
        choices=("debug", "info", "warning", "error", "critical"),
        default="info",
        help="how much the launcher says (default: info)",
    )
    output.add_argument("-q", "--quiet", action="store_true", help="same as --log_level error")


def split_argv(parser: FlagParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut the command line where the recipe's name stands.

    Returns:
        the launcher's tokens, and the recipe's name with its own tokens (empty where none is named).

    Raises:
        ConfigError: a flag before the name that the launcher does not know.
    """
    known = parser.known_flags()
    position = 0
    while position < len(argv):
        token = argv[position]
        if not token.startswith("-"):
            break
        name = parser.canonical(token).partition("=")[0]
        if name not in known:
            _refuse_flag(parser, name)
        takes_value = known[name].nargs is None and "=" not in token
        position += 2 if takes_value else 1
    return list(argv[:position]), list(argv[position:])


def _refuse_flag(parser: FlagParser, name: str) -> None:
    from launcher.cli.recipe_flags import training_parser

    recipe_flag = training_parser("pretrain", "").canonical(name)
    if recipe_flag in training_parser("pretrain", "").known_flags():
        parser.refuse(
            name, hint=f"a recipe's flags come after its name: `launch ... pretrain {recipe_flag} ...`"
        )
    parser.refuse(name)


def refuse_unsupported(flags: argparse.Namespace) -> None:
    """Raise `ConfigError` for a flag that is known but cannot be honoured by this version."""
    for name in SEVERAL_NODES:
        if getattr(flags, name):
            _several_nodes(f"--{name}")
    if flags.num_nodes != 1:
        _several_nodes("--num_nodes")
    for name in NOT_THERE_YET:
        if getattr(flags, name):
            raise ConfigError(f"--{name} is not implemented yet", where="command line", fix="leave it out")
    if flags.no_python and flags.module:
        raise ConfigError("--module and --no_python exclude each other", where="command line")


def _several_nodes(flag: str) -> None:
    raise ConfigError(
        f"{flag} needs several nodes, which this version does not start yet",
        where="command line",
        fix="start on this machine alone: --num_gpus N ranks; CUDA_VISIBLE_DEVICES chooses the GPUs",
    )


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"needs a port from 1 to 65535, not {text!r}")
    return int(text)
