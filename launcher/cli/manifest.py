"""`launch manifest`: prints a command line of `launch` as a Kubernetes manifest."""

from __future__ import annotations

import argparse
import json
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.flags import FlagParser, shown, value_of, without
from launcher.cli.launch_flags import launch_parser, refuse_unsupported, split_argv
from launcher.cli.output import config_of
from launcher.cli.recipes import DEFAULT_RECIPE, check_flags, check_name, find_recipe
from launcher.cli.request import check_bounds, restarts_of
from launcher.cluster import environment
from launcher.cluster.kubernetes import KINDS, PodOptions, manifest
from launcher.cluster.secret import has_secret, hide, masked, secret_arguments, secrets_of, without_secrets
from launcher.errors import ConfigError, printable, shortened

DESCRIPTION = """\
Prints a manifest for Kubernetes that starts a run with one pod a node: a PyTorchJob of the Training Operator, or a
JobSet. The image must contain this package, with `launch` on its PATH."""
EPILOG = """\
examples:
  launch manifest --kind jobset --image me/train:1 --num_nodes 4 --num_gpus 8 --volume data:/data \\
    --token_secret launch-token \\
    --config ds_config.json pretrain --model /data/model --output-dir /data/run | kubectl apply -f -
  launch manifest --kind pytorchjob ... --min_nodes 2 --max_restarts 10 --term_grace 60 ...

The flags of the launcher and the recipe are those of `launch`. The JSON becomes a ConfigMap; everything else that a
run reads, and its --output-dir, must be in the image or on a volume. With --max_restarts, Kubernetes also restarts
failed pods.
"""
NOT_HERE = (
    *("hostfile", "include", "exclude", "launcher", "launcher_args", "submit", "ssh_port", "force_multi"),
    *("no_ssh", "node_rank", "master_addr", "master_port", "dry_run"),
)
"""Flags that select and reach nodes; in Kubernetes the manifest does this."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_SIZE = re.compile(r"[0-9]{1,12}([KMGT]i?)?")
_OBJECT = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_IMAGE = re.compile(r"[a-zA-Z0-9][\w./:@-]{0,1023}", re.ASCII)


def manifest_parser() -> FlagParser:
    """Return the parser of the launcher's flags and the manifest's own."""
    parser = launch_parser()
    parser.prog, parser.description, parser.epilog = "launch manifest", DESCRIPTION, EPILOG
    parser.usage = (
        "launch manifest --kind KIND --image IMAGE --num_nodes N --num_gpus G [flags] [RECIPE] [its flags]"
    )
    own = parser.add_argument_group("the manifest")
    own.add_argument(
        "--kind", choices=tuple(KINDS), required=True, help="kind of object that starts the pods"
    )
    own.add_argument("--image", type=_image, required=True, metavar="IMAGE", help="image of the container")
    own.add_argument("--name", type=_name, default="launch", help="name of the run (default: launch)")
    own.add_argument(
        "--namespace", type=_object, metavar="NAME", help="namespace of the run (default: kubectl's)"
    )
    own.add_argument("--shm", type=_size, metavar="SIZE", help="size limit of /dev/shm: 16Gi")
    own.add_argument(
        "--volume",
        type=_volume,
        action="append",
        default=[],
        metavar="CLAIM:PATH",
        help="a PersistentVolumeClaim and its mount path",
    )
    own.add_argument(
        "--token_secret",
        type=_object,
        metavar="NAME",
        help="a Secret whose key `token` holds the token of all nodes (LAUNCHER_TOKEN)",
    )
    own.add_argument(
        "--secret",
        type=_secret,
        action="append",
        default=[],
        metavar="NAME=SECRET[:KEY]",
        help="set an environment variable of the ranks from a Secret (KEY: default NAME)",
    )
    return parser


# Flags that `launch` in a pod does not get: they concern only the manifest, or are set in another way.
OWN = ("--kind", "--image", "--name", "--namespace", "--shm", "--volume", "--token_secret", "--secret")
SAID_ELSEWHERE = ("--config", "--deepspeed_config", "--num_nodes", "--export")


def print_manifest(argv: Sequence[str]) -> int:
    """Run `launch manifest`; returns 0.

    Raises:
        ConfigError: a flag is missing, wrong, or not supported in a manifest.
    """
    parser = manifest_parser()
    own, recipe = split_argv(parser, argv)
    flags = parser.parse_args(own)
    refuse_unsupported(flags)
    tokens = [parser.canonical(token) for token in own]
    print(manifest(flags.kind, pods_of(flags, tokens, recipe or [DEFAULT_RECIPE])))
    return 0


def pods_of(flags: argparse.Namespace, own: Sequence[str], recipe: Sequence[str]) -> PodOptions:
    """Return the pod options for the flags.

    Args:
        own: the tokens of the launcher and the manifest.
        recipe: the recipe's name and its tokens.
    """
    for name in NOT_HERE:
        if getattr(flags, name):
            raise ConfigError(f"--{name} is not supported in a manifest", fix="leave it out")
    for name, meaning in (("num_nodes", "pods"), ("num_gpus", "ranks per pod")):
        if getattr(flags, name) is None:
            raise ConfigError(f"--{name} is missing: the number of {meaning}")
    if flags.num_nodes > 1 and not (flags.token_secret or flags.token_file or flags.insecure):
        raise ConfigError(
            "--token_secret is missing: pods accept only connections that present its token",
            fix='kubectl create secret generic launch-token --from-literal=token="$(openssl rand -hex 16)", then '
            "--token_secret launch-token",
        )
    asked = environment.asked_for(flags.export, os.environ)
    if secret := next(iter(secrets_of(asked)), None):
        raise _refused(secret, f"--export {secret}", f"--secret {secret}=NAME_OF_A_KUBERNETES_SECRET")
    told = without(own, *OWN, *SAID_ELSEWHERE)
    for name, value in (*secret_arguments(told), *secret_arguments(recipe)):
        hide([value])
        raise _refused(
            shortened(name) or "an argument",
            shortened(" ".join(recipe[:1])),
            "let the script read a variable, and add --secret VARIABLE=NAME_OF_A_KUBERNETES_SECRET",
        )
    _check_recipe(flags, recipe)
    check_bounds(flags, flags.num_nodes)
    restarts, least = restarts_of(flags)
    return PodOptions(
        name=flags.name,
        image=flags.image,
        nodes=flags.num_nodes,
        flags=told,
        recipe=recipe,
        gpus=0 if flags.device == "cpu" else flags.num_gpus,
        config=_config_text(flags.config and config_of(flags.config)),
        namespace=flags.namespace,
        environment=asked,
        secrets=dict(flags.secret),
        token_secret=flags.token_secret,
        shared_memory=flags.shm,
        claims=dict(flags.volume),
        restarts=restarts,
        run_key=uuid.uuid4().hex[:12] if restarts else None,
        first_decides=least is not None,
        grace_s=flags.term_grace,
    )


def _refused(name: str, where: str, fix: str) -> ConfigError:
    return ConfigError(
        f"{name} looks like a secret, and a manifest must not contain one", where=where, fix=fix
    )


def _check_recipe(flags: argparse.Namespace, recipe: Sequence[str]) -> None:
    """Raise `ConfigError` for mistakes visible on this machine; a script may exist only in the image."""
    name, *arguments = recipe
    if flags.module or flags.no_python or (name.endswith(".py") and not os.path.exists(name)):
        kind = "module" if flags.module else "program" if flags.no_python else "script"
        check_name(name, kind)
        return
    path, is_ours = find_recipe(name)
    if not is_ours:
        return
    check_flags(path, arguments)
    if flags.config is None:
        raise ConfigError("--config is missing", fix="add --config DS.json")
    if value_of(arguments, "--output-dir") is None:
        raise ConfigError(
            "--output-dir is missing: a pod's local directories are deleted with it",
            fix=f"name one on a volume that all pods mount: --volume CLAIM:/data ... {name} --output-dir /data/run",
        )


def _config_text(source: str | None) -> str | None:
    """Return the validated JSON as written.

    Raises:
        ConfigError: the JSON is not valid, or contains a secret, even in a comment.
    """
    if source is None:
        return None
    from launcher.config.root import inspect
    from launcher.config.source import is_yaml, read

    document = read(source)
    config = inspect(document).required()
    if config.comet.api_key:
        hide([config.comet.api_key])
        fix = "delete it, and add --secret COMET_API_KEY=NAME_OF_A_KUBERNETES_SECRET"
        raise _refused("comet.api_key", config.where("comet.api_key"), fix)
    text = json.dumps(document.tree, indent=2)
    if os.path.isfile(source) and not is_yaml(source):
        text = Path(source).read_text(encoding="utf-8-sig")
    if without_secrets(document.tree) != document.tree or has_secret(text):
        where = f"--config {shortened(source)}"
        raise _refused("a value in the JSON", where, "delete it; the script can read a variable: --secret")
    return text


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"needs up to 40 lowercase letters, digits and dashes, starting with a letter, not {shown(text)}"
        )
    return text


def _image(text: str) -> str:
    if not _IMAGE.fullmatch(text) or has_secret(text):
        raise argparse.ArgumentTypeError(f"needs the name of an image, not {shown(masked(text))}")
    return text


def _object(text: str) -> str:
    if not _OBJECT.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"needs the name of an object: lowercase letters, digits, dashes and dots, not {shown(masked(text))}"
        )
    return text


def _size(text: str) -> str:
    if not _SIZE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"needs a size such as 16Gi, not {shown(text)}")
    return text


def _secret(text: str) -> tuple[str, tuple[str, str]]:
    name, _, source = text.partition("=")
    secret, _, key = source.partition(":")
    if not (
        name.isidentifier() and name.isascii() and _OBJECT.fullmatch(secret) and _KEY.fullmatch(key or name)
    ):
        raise argparse.ArgumentTypeError(f"needs NAME=SECRET or NAME=SECRET:KEY, not {shown(masked(text))}")
    return name, (secret, key or name)


def _volume(text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    if not (
        _OBJECT.fullmatch(claim) and path.startswith("/") and printable(path) == path and ":" not in path
    ):
        raise argparse.ArgumentTypeError(f"needs CLAIM:/PATH, not {shown(text)}")
    return claim, path
