"""`launch inspect`, `launch export` and `launch import`: inspect checkpoints and convert their formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.flags import FlagParser, named, positive
from launcher.errors import ConfigError, shortened

if TYPE_CHECKING:
    from launcher.checkpoint.source import SourceCheckpoint

FORMATS = ("universal", "deepspeed", "megatron", "hf", "fp32")
OF_FORMAT = {"stage": "deepspeed", "ranks": "deepspeed", "dtype": "hf"}
"""Flag -> the only format that it applies to."""
INSPECT = """\
Shows the contents of a checkpoint directory written by launcher, DeepSpeed, Megatron-Core, torchtitan or another FSDP2
program. Nothing is changed, and no code in the files is executed."""
EXPORT = """\
Converts a checkpoint to another format. The source may be a checkpoint of launcher, of DeepSpeed, or of an FSDP2
program that uses torch.distributed.checkpoint. With --model, it may also be one of Megatron-Core or torchtitan.

formats:
  universal   DeepSpeed's universal layout. DeepSpeed resumes from it at ZeRO stages 1 to 3 on any number of ranks,
              if its JSON has "checkpoint": {"load_universal": true}.
  deepspeed   The files that DeepSpeed writes at --stage S on --ranks N. DeepSpeed resumes from them at that stage on
              N ranks; zero_to_fp32.py and ds_to_universal read them.
  megatron    Megatron-Core's torch_dist format, with the optimizer state. Megatron-LM resumes from it with any
              tensor and pipeline parallelism. Needs --model.
  hf          A model that from_pretrained reads: safetensors in --dtype, with the config.json and the tokenizer of
              --model, the model that was trained. The adapters of `finetune --lora` are merged into its weights.
  fp32        Only the weights, as safetensors in fp32. from_pretrained reads them if the model's config.json is in
              the same directory."""
IMPORT = """\
Converts another program's checkpoint to launcher's format. A checkpoint of Megatron-Core or torchtitan must be
imported before it is used, with --model. Those of DeepSpeed and of other FSDP2 programs need no import:
`load_checkpoint` and --resume read them."""


def inspect_parser() -> FlagParser:
    """Return the parser of `launch inspect`."""
    parser = FlagParser(
        prog="launch inspect", description=INSPECT, epilog="example: launch inspect out --tensors"
    )
    _source(parser)
    parser.add_argument("--tensors", action="store_true", help="every tensor with its shape and dtype")
    parser.add_argument(
        "--verify", action="store_true", help="compare the contents with the checksums in the files"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def export_parser() -> FlagParser:
    """Return the parser of `launch export`."""
    parser = FlagParser(
        prog="launch export", description=EXPORT, epilog="example: launch export out back --format universal"
    )
    _source(parser)
    parser.add_argument(
        "out", type=named, metavar="OUT", help="a directory to write into; nothing in it is replaced"
    )
    parser.add_argument("--format", choices=FORMATS, required=True, help="output format")
    parser.add_argument(
        "--stage", type=int, choices=range(4), help="the ZeRO stage of --format deepspeed (default: 1)"
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="number of ranks that will resume from --format deepspeed (default: 1)",
    )
    _model(parser, "that was trained, for --format hf and megatron")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="dtype of the weights of --format hf (default: the run's)",
    )
    return parser


def import_parser() -> FlagParser:
    """Return the parser of `launch import`."""
    parser = FlagParser(
        prog="launch import",
        description=IMPORT,
        epilog="example: launch import megatron/checkpoints ours --model meta-llama/Llama-3.1-8B",
    )
    _source(parser)
    parser.add_argument(
        "out", type=named, metavar="OUT", help="a directory to write into; it may already contain checkpoints"
    )
    _model(parser, "that was trained; only for a checkpoint of Megatron-Core or torchtitan")
    return parser


def inspect(argv: Sequence[str]) -> int:
    """Run `launch inspect`; returns 0."""
    flags = inspect_parser().parse_args(argv)
    from launcher.checkpoint import inspection
    from launcher.checkpoint.megatron.opened import directory_of

    place = Path(flags.directory), flags.tag
    found = inspection.inspect(*(place if directory_of(*place) else _chosen(flags)), verify=flags.verify)
    print(
        json.dumps(found.to_json(), indent=2) if flags.json else "\n".join(found.lines(tensors=flags.tensors))
    )
    return 0


def export(argv: Sequence[str]) -> int:
    """Run `launch export`; returns 0."""
    flags = export_parser().parse_args(argv)
    _check_flags(flags)
    if flags.format == "hf":
        _export_model(flags)
        return 0
    if flags.format == "megatron":
        _export_to_megatron(flags)
        return 0
    if flags.format == "fp32":
        _export_weights(flags)
        return 0
    _export_state(flags)
    return 0


def import_(argv: Sequence[str]) -> int:
    """Run `launch import`; returns 0."""
    flags = import_parser().parse_args(argv)
    from launcher.checkpoint.convert import copy

    print(f"wrote {copy(_opened(flags), Path(flags.out))}")
    return 0


def _check_flags(flags: Any) -> None:
    for name, of in OF_FORMAT.items():
        if getattr(flags, name) is not None and flags.format != of:
            raise ConfigError(
                f"--{name} applies only to --format {of}, not to --format {flags.format}",
                fix=f"leave it out, or write --format {of}",
            )
    if flags.format in ("hf", "megatron") and flags.model is None:
        lacks = (
            "config.json and no tokenizer"
            if flags.format == "hf"
            else "config.json, which gives the number of heads"
        )
        raise ConfigError(
            f"--format {flags.format} needs --model: a checkpoint has no {lacks}",
            fix="name the directory of the model that was trained; --format fp32 writes only the weights",
        )


def _export_weights(flags: Any) -> None:
    from launcher.checkpoint.fp32 import convert_zero_checkpoint_to_fp32_state_dict, write_weights
    from launcher.checkpoint.megatron.opened import directory_of
    from launcher.checkpoint.source import there_already

    if there := sorted(Path(flags.out).glob("[!.]*.safetensors*")):
        raise there_already(there[0])
    if flags.model is not None or directory_of(Path(flags.directory), flags.tag) is not None:
        write_weights(_opened(flags), Path(flags.out))
    else:
        directory, tag = _chosen(flags)
        if (path := _of_torchtitan(directory, tag)) is not None:
            _needed_model(flags, path, "torchtitan")
        convert_zero_checkpoint_to_fp32_state_dict(directory, flags.out, safe_serialization=True, tag=tag)
    print(f"wrote the weights of {flags.directory} into {flags.out}, in fp32")


def _export_model(flags: Any) -> None:
    from launcher.checkpoint.hub_model import write_model
    from launcher.engine.dtypes import DTYPES

    stored = _opened(flags)
    dtype = write_model(stored, flags.model, Path(flags.out), DTYPES.get(flags.dtype))
    print(f"wrote {flags.out}, in {str(dtype).removeprefix('torch.')}: from_pretrained reads it")
    if not any(Path(flags.out).glob("tokenizer*")):
        print(f"no tokenizer was written: --model {flags.model} has none")


def _export_to_megatron(flags: Any) -> None:
    from launcher.checkpoint.megatron import write

    stored = _opened(flags)
    print(
        f"wrote {write.write_megatron(stored, flags.model, Path(flags.out))}, in Megatron-Core's torch_dist format"
    )
    for line in write.not_written(stored):
        print(line)


def _export_state(flags: Any) -> None:
    from launcher.checkpoint.deepspeed import write

    stored = _opened(flags)
    if flags.format == "universal":
        print(f"wrote {write.write_universal(stored, Path(flags.out))}, in DeepSpeed's universal layout")
        print('DeepSpeed resumes from it with "checkpoint": {"load_universal": true} in its JSON')
    else:
        stage, ranks = 1 if flags.stage is None else flags.stage, flags.ranks or 1
        path = write.write_ranks(stored, Path(flags.out), stage, ranks)
        on = f"{ranks} rank{'s' * (ranks > 1)}" if stage else "any number of ranks"
        print(f"wrote {path}: DeepSpeed resumes from it at stage {stage} on {on}")
    for line in _not_written(stored, universal=flags.format == "universal"):
        print(line)


def _not_written(stored: SourceCheckpoint, *, universal: bool) -> list[str]:
    """Return a line for each part of the state that DeepSpeed's files cannot hold."""
    lines = []
    counts = [{stored.steps.get(name, 0.0) for name in names} for names in stored.groups]
    if not universal and any(len(of_group) > 1 for of_group in counts):
        lines.append(
            "changed: parameters of one param group have different step counts; DeepSpeed has one count per group, and "
            "gets the largest"
        )
    kinds = {
        "/".join(name.split("/")[: 1 + name.startswith(("scalar/", "number/"))]) for name in stored.entries
    }
    if any(kind.startswith("rng") for kind in kinds):
        lines.append("not written: the random number generator states, which DeepSpeed does not save")
    if left := sorted(kind for kind in kinds - {"scalar/step"} if kind.startswith(("scalar/", "number/"))):
        lines.append(f"not written: {', '.join(left)}, which DeepSpeed's format cannot store")
    return lines


def _source(parser: FlagParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="a directory of checkpoints, one checkpoint in it, or the output of a recipe",
    )
    parser.add_argument(
        "--tag", metavar="TAG", help="the name of a checkpoint, such as global_step100 (default: the latest)"
    )


def _model(parser: FlagParser, which: str) -> None:
    parser.add_argument(
        "--model", metavar="M", help=f"the model {which}: a directory with config.json, or a name"
    )


def _opened(flags: Any) -> SourceCheckpoint:
    """Open the checkpoint; those of Megatron-Core and torchtitan need `--model` to map parameter names."""
    from launcher.checkpoint.megatron.opened import directory_of
    from launcher.checkpoint.source import SourceCheckpoint

    found = directory_of(Path(flags.directory), flags.tag)
    if found is None:
        directory, tag = _chosen(flags)
        if (path := _of_torchtitan(directory, tag)) is not None:
            from launcher.checkpoint.torchtitan import under_names_of

            model = _needed_model(flags, path, "torchtitan")
            return under_names_of(SourceCheckpoint.open(directory, tag), model)
        _check_model_is_needed(flags)
        return SourceCheckpoint.open(directory, tag)
    from launcher.checkpoint.megatron.reader import open_megatron

    return open_megatron(found, _needed_model(flags, found, "Megatron-Core"))


def _of_torchtitan(directory: Path, tag: str | None) -> Path | None:
    """Return the path of the checkpoint if torchtitan wrote it; else, or if there is none, None."""
    from launcher.checkpoint import tags
    from launcher.checkpoint.formats import is_torchtitan

    path = tags.path_to_load(directory, tag)
    return path if path is not None and is_torchtitan(path) else None


def _needed_model(flags: Any, directory: Path, kind: str) -> str:
    if flags.model is None:
        raise ConfigError(
            f"{directory} is a {kind} checkpoint and needs --model to map its parameter names",
            fix="pass the model that was trained: a directory with its config.json, or its name on the Hub",
        )
    return str(flags.model)


def _check_model_is_needed(flags: Any) -> None:
    if flags.model is not None and getattr(flags, "format", None) not in ("hf", "megatron"):
        raise ConfigError(
            "--model applies only to --format hf and megatron, and to checkpoints of Megatron-Core and torchtitan; "
            f"{flags.directory} is not one of these",
            fix="leave it out",
        )


def _chosen(flags: Any) -> tuple[Path, str | None]:
    """Return the directory of checkpoints and the tag. DIRECTORY may also be that of a single checkpoint."""
    from launcher.checkpoint.names import META_FILE
    from launcher.checkpoint.store import has_latest
    from launcher.checkpoint.tags import is_foreign
    from launcher.earlier_run import CHECKPOINTS

    given = Path(flags.directory)
    if not given.is_dir():
        what = "is not a directory" if given.exists() else "does not exist"
        raise ConfigError(
            f"{shortened(str(given))} {what}", fix="name the directory that the run saved its checkpoints in"
        )
    if flags.tag in (None, given.resolve().name) and ((given / META_FILE).is_file() or is_foreign(given)):
        given = given.resolve()
        return given.parent, given.name
    if not has_latest(given) and has_latest(given / CHECKPOINTS):  # a run's output directory
        return given / CHECKPOINTS, flags.tag
    below = [*given.glob("*/latest"), *given.glob("*/meta.json")]
    if (given / "adapter_config.json").is_file():
        raise ConfigError(
            f"{given} contains adapters, not a checkpoint", fix="export the output directory of the run"
        )
    if not has_latest(given) and not below and any(given.glob("*.safetensors")):
        raise ConfigError(
            f"{given} contains model weights, not a checkpoint",
            fix=f"start from it with --model {given}",
        )
    return given, flags.tag
