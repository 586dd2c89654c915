"""The flags of `launch` itself, named as in DeepSpeed's launcher, and the split of the command line."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence

from launcher import __version__
from launcher.cli.flags import FlagParser, positive, shown, whole
from launcher.cli.recipes import recipe_names
from launcher.cluster.hostfile import MOST_NODES
from launcher.errors import ConfigError, printable

# DeepSpeed's flags that are recognized but refused.
NOT_THERE_YET = {
    "autotuning": "{tune,run}",
    "save_pid": None,
}

_RANKS = "write --num_gpus N: the number of ranks on each machine"
_NODES = (
    "write --num_nodes N with --hostfile HOSTS, or --no_ssh --node_rank R --master_addr NODE0 on each machine"
)
_ENGINE = (
    "leave it out: scripts always use this engine, unless --no_deepspeed_shim selects the real DeepSpeed"
)
PEERS = {
    **dict.fromkeys(("nproc-per-node", "num-processes", "nproc", "ngpus"), _RANKS),
    **dict.fromkeys(("num-machines", "nnodes"), _NODES),
    **dict.fromkeys(("use-deepspeed", "deepspeed", "multi-gpu"), _ENGINE),
    **dict.fromkeys(("config-file", "deepspeed-config-file", "ds-config"), "write --config DS.json"),
    **dict.fromkeys(("main-process-ip", "rdzv-endpoint"), "write --master_addr ADDR"),
    "main-process-port": "write --master_port PORT",
    "machine-rank": "write --node_rank R, with --no_ssh",
    "m": "write --module before the module's name",
    "cpu": "write --device cpu",
    "standalone": "leave it out: without --hostfile only this machine is used",
}
"""Flags of torchrun, accelerate and similar launchers -> what to write instead."""

EPILOG = """\
examples:
  launch --config ds_configs/zero2.json
  launch --config ds_configs/zero3.json --num_gpus 2 pretrain --max-steps 30 --output-dir runs/first
  launch --config ds_config.json finetune --model ./my-model --dataset chat.jsonl
  launch check ds_config.json                               (how every key is handled)
  launch schedule 1f1b --stages 4 --microbatches 8          (what each rank of a pipeline does)
  launch memory-estimate --config ds_config.json --model ./my-model --num-gpus 8 --gpu 80GiB
  launch top runs/mine                                      (what each rank of a run is doing)
  launch inspect out                                        (what a checkpoint holds, DeepSpeed's too)
  launch export out back --format universal                 (to resume in DeepSpeed)
  launch bench io /local_nvme                               (how fast a directory is for offloading)
  launch --num_gpus 4 my_script.py --any --flags
  launch --config accelerate.yaml train.py                  (what `accelerate config` wrote)
  launch shim run -- torchrun train.py                      (`import deepspeed` uses this engine there, too)
  launch --hostfile hosts --config ds_config.json pretrain  (on the hosts of a file, over ssh)
  launch manifest --kind jobset --image me/train:1 ...      (a Kubernetes manifest; see launch manifest --help)
  launch --hostfile hosts --sync . train.py                 (with the code of this directory)
  launch report --hostfile hosts                            (versions, memory, devices of every host)
  launch ssh --hostfile hosts nvidia-smi -L                 (a command on every host)
  launch --config ds_configs/zero2.json pretrain --help     (the recipe's flags)

Flags before the recipe's name are the launcher's, flags after it are the recipe's.
Dashes and underscores are interchangeable: --num-gpus is --num_gpus.
"""


def launch_parser() -> FlagParser:
    """Return the parser of the flags before the recipe's name."""
    parser = FlagParser(
        prog="launch",
        usage="launch [flags] --config DS.json [pretrain | finetune | RECIPE.py | SCRIPT.py] [its flags]\n"
        "       launch check DS.json [--num-gpus N] [--explain] [--migrate OUT.json]\n"
        "       launch schedule NAME --stages P --microbatches M [--chunks V] [--costs F,I,W] [--out FILE]\n"
        "       launch manifest --kind pytorchjob|jobset --image IMAGE --num_nodes N --num_gpus G ...\n"
        "       launch memory-estimate --config DS.json --model MODEL [--num-gpus N] [--gpu TYPE|BYTES] [--compare]\n"
        "       launch plan --model MODEL --num-gpus N --gpu TYPE [--global-batch B] [--write DS.json] [--html FILE]\n"
        "       launch calibrate RUN_DIR --gpu TYPE [--out FILE.json]\n"
        "       launch top [RUN_DIR] [--once | --json | --html FILE]\n"
        "       launch inspect DIRECTORY | launch export DIRECTORY OUT --format F | launch import DIRECTORY OUT\n"
        "       launch shim [status | path | run -- COMMAND | install | remove]\n"
        "       launch report [--hostfile HOSTS] | launch ssh --hostfile HOSTS COMMAND\n"
        "       launch bench io PATH [--size N] [--seconds S] [--out FILE] | launch bench device [--num-gpus N]",
        description="Trains a Hugging Face model from a DeepSpeed-style JSON.",
        epilog=EPILOG,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--version", action="version", version=f"launcher {__version__}")
    run.add_argument(
        "--config",
        "--deepspeed_config",
        metavar="DS.json",
        help="the DeepSpeed-style JSON: a file, an example's name such as zero2.json, or its text in base64; or "
        "accelerate's YAML",
    )
    run.add_argument(
        "--num_gpus",
        "--num_accelerators",
        type=positive,
        metavar="N",
        help="number of ranks (default: one per GPU, or one on a machine without GPUs; works on CPU too)",
    )
    run.add_argument(
        "--oversubscribe", action="store_true", help="allow more than 8 ranks for each core of a machine"
    )
    run.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: auto")
    run.add_argument(
        "--master_addr",
        type=_address,
        metavar="ADDR",
        help="address of the first node (default: one that the other nodes can reach)",
    )
    run.add_argument(
        "--master_port", type=_port, metavar="PORT", help="port of the first node (default: a free one)"
    )
    _add_script_flags(parser)
    _add_output_flags(parser)
    _add_host_flags(parser)
    refused = parser.add_argument_group("known, but not implemented yet")
    for name, metavar in NOT_THERE_YET.items():
        if metavar is None:
            refused.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
        else:
            refused.add_argument(f"--{name}", metavar=metavar, help=argparse.SUPPRESS)
    return parser


def _add_host_flags(parser: FlagParser) -> None:
    hosts = parser.add_argument_group("several machines")
    hosts.add_argument("-H", "--hostfile", metavar="PATH", help="lines of `NAME slots=COUNT`")
    hosts.add_argument(
        "-i", "--include", metavar="SPEC", help="use only these hosts and slots: node1@node2:0,2-3"
    )
    hosts.add_argument("-e", "--exclude", metavar="SPEC", help="use all hosts and slots except these")
    hosts.add_argument("--num_nodes", type=_nodes, metavar="N", help="use the first N hosts")
    hosts.add_argument(
        "--launcher",
        metavar="NAME",
        help="how nodes are reached: ssh (default), pdsh, slurm, openmpi, mpich, impi, ray",
    )
    hosts.add_argument(
        "--address",
        metavar="A",
        default="auto",
        help="with --launcher ray: the cluster (default: that of this machine)",
    )
    hosts.add_argument("--launcher_args", metavar="TEXT", help="extra arguments for ssh, srun or mpirun")
    hosts.add_argument(
        "--submit",
        metavar="TEXT",
        help="submit this as a Slurm job instead; TEXT goes to sbatch: --submit='-p gpu'",
    )
    hosts.add_argument("--ssh_port", type=_port, metavar="PORT", help="port of the nodes' sshd")
    hosts.add_argument("--venv_script", metavar="PATH", help="script sourced on each node before launch")
    hosts.add_argument(
        "--export",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set an environment variable on the ranks of all nodes",
    )
    hosts.add_argument("--force_multi", action="store_true", help="use the runner for this machine, too")
    hosts.add_argument(
        "--no_ssh",
        action="store_true",
        help="you start this command yourself on every node, with a different --node_rank",
    )
    hosts.add_argument(
        "--token_file",
        metavar="PATH",
        help="file whose first line is the token that all nodes of a --no_ssh run share (default: "
        "LAUNCHER_TOKEN; node 0 generates one)",
    )
    hosts.add_argument(
        "--insecure",
        action="store_true",
        help="run --no_ssh without a token: anyone who reaches the port can run code here",
    )
    hosts.add_argument("--node_rank", type=whole, metavar="R", help="which node this is, from 0")
    hosts.add_argument(
        "--no_ssh_check", action="store_true", help=argparse.SUPPRESS
    )  # accepted and ignored: nodes are checked as they start
    hosts.add_argument(
        "--node_timeout",
        type=_seconds,
        default=12.0,
        metavar="S",
        help="seconds without contact after which a node is considered lost and stops its own ranks (default: 12)",
    )
    hosts.add_argument(
        "--sync",
        nargs="?",
        const="",
        metavar="DIR",
        help="send the JSON and the script to every node and run the copies; with DIR, send its files that "
        "git does not ignore, too",
    )
    hosts.add_argument(
        "--dry_run",
        action="store_true",
        help="print what each rank of each node would run, or the job to submit, and exit",
    )
    ending = parser.add_argument_group("failures")
    ending.add_argument(
        "--min_nodes",
        "--min_elastic_nodes",
        type=positive,
        metavar="N",
        help="restart with as few as N hosts if the rest do not come back (default: --max_nodes)",
    )
    ending.add_argument(
        "--max_nodes",
        "--max_elastic_nodes",
        type=positive,
        metavar="N",
        help="use the first N available hosts, and keep the rest in reserve (default: all)",
    )
    ending.add_argument(
        "--elastic_training",
        action="store_true",
        help="same as --min_nodes 1 --max_restarts 100, unless these are given",
    )
    ending.add_argument(
        "--term_grace",
        type=_seconds_or_never,
        default=0.0,
        metavar="S",
        help="on SIGTERM, as from a scheduler, give recipes S seconds to save a checkpoint (default: 0, stop at once)",
    )
    ending.add_argument(
        "--checkpoint_exit_code",
        type=_exit_code,
        default=128 + signal.SIGTERM,
        metavar="N",
        help="exit code if all ranks exit cleanly within --term_grace, so that a scheduler restarts the run: "
        "Slurm's RequeueExit, HTCondor's checkpoint_exit_code (default: 143)",
    )
    ending.add_argument(
        "--hang_timeout",
        type=_seconds_or_never,
        default=600.0,
        metavar="S",
        help="stop a run in which no rank starts a collective for S seconds; 0: never (default: 600)",
    )
    ending.add_argument(
        "--on_straggler",
        choices=("warn", "restart-without"),
        default="warn",
        help="if a rank is slower than the others: report it (warn), or after 40 steps restart without its host, if "
        "--max_nodes keeps another host in reserve or --min_nodes allows fewer (default: warn)",
    )
    ending.add_argument(
        "--max_restarts", type=whole, metavar="N", help="restart a failed run up to N times (default: 0)"
    )


def _add_script_flags(parser: FlagParser) -> None:
    script = parser.add_argument_group("how a script is started")
    script.add_argument("--module", action="store_true", help="the script is a module, as for `python -m`")
    script.add_argument(
        "--no_python", action="store_true", help="the script is an executable, run without Python"
    )
    script.add_argument(
        "--no_local_rank", action="store_true", help="do not put --local_rank=N before a script's arguments"
    )
    script.add_argument(
        "--no_deepspeed_shim",
        action="store_true",
        help="let `import deepspeed` in a script find the real DeepSpeed; without this flag it uses this engine",
    )
    script.add_argument(
        "--bind_cores_to_rank",
        action="store_true",
        help="give each rank its own share of the cores, inside one NUMA node where possible",
    )
    script.add_argument(
        "--bind_core_list", metavar="LIST", help="cores to divide among the ranks, e.g. 0-7,16-23"
    )


def _add_output_flags(parser: FlagParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--enable_each_rank_log",
        metavar="DIR",
        help="write every rank's output to DIR only, not to the console",
    )
    output.add_argument(
        "--tee", type=_ranks, metavar="RANKS", help="print the output of these ranks, too: 1,3 or all"
    )
    output.add_argument(
        "--log_level",
        choices=("debug", "info", "warning", "error", "critical"),
        default="info",
        help="how much the launcher prints (default: info)",
    )
    output.add_argument("-q", "--quiet", action="store_true", help="same as --log_level error")


def split_argv(parser: FlagParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line at the recipe's name.

    Returns:
        the launcher's tokens, and the recipe's name followed by its own tokens (empty if there is no name).

    Raises:
        ConfigError: an unknown flag before the name.
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
        following = argv[position + 1] if position + 1 < len(argv) else ""
        may_take = known[name].nargs == "?" and os.path.isdir(following) and following not in recipe_names()
        takes_value = (known[name].nargs is None or may_take) and "=" not in token
        position += 2 if takes_value else 1
    return list(argv[:position]), list(argv[position:])


def _refuse_flag(parser: FlagParser, name: str) -> None:
    if (hint := PEERS.get(name.lstrip("-").replace("_", "-"))) is not None:
        parser.refuse(name, hint=hint)
    from launcher.cli.recipe_flags import training_parser

    recipe_flag = training_parser("pretrain", "").canonical(name)
    if recipe_flag in training_parser("pretrain", "").known_flags():
        parser.refuse(
            name, hint=f"a recipe's flags come after its name: `launch ... pretrain {recipe_flag} ...`"
        )
    parser.refuse(name)


def refuse_unsupported(flags: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags that are recognized but not implemented in this version."""
    for name in NOT_THERE_YET:
        if getattr(flags, name):
            raise ConfigError(f"--{name} is not implemented yet", fix="leave it out")
    if flags.no_python and flags.module:
        raise ConfigError("--module and --no_python are mutually exclusive")


def _nodes(text: str) -> int:
    if positive(text) > MOST_NODES:
        raise argparse.ArgumentTypeError(f"a run has at most {MOST_NODES:,} hosts, not {shown(text)}")
    return int(text)


def _address(text: str) -> str:
    try:
        text.encode("idna")  # as `socket` does
    except UnicodeError:
        text = ""
    if not text or printable(text) != text:
        raise argparse.ArgumentTypeError("needs the address or the name of a host")
    return text


def _port(text: str) -> int:
    if not 1 <= whole(text) <= 65535:
        raise argparse.ArgumentTypeError(f"needs a port from 1 to 65535, not {shown(text)}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"needs seconds from 1 to 86400, not {shown(text)}")
    return seconds


def _seconds_or_never(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)


def _exit_code(text: str) -> int:
    code = whole(text)
    if code > 255:
        raise argparse.ArgumentTypeError(f"{code} is not an exit code: write 0 to 255")
    return code


def _ranks(text: str) -> str:
    if text != "all":
        for part in text.split(","):
            whole(part)
    return text
