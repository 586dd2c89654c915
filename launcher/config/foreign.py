"""Keys at the top level that nobody knows: typos, names of other libraries, and what a script keeps for itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.config.conversions import converted_paths
from launcher.config.known_keys import known_keys
from launcher.config.problems import Note, Path, Problem, is_comment, show
from launcher.config.schema import unknown_key
from launcher.config.section import Section
from launcher.config.suggest import nearest, plain

FOREIGN = "is no key of DeepSpeed's: nothing here reads it"

_STAGES = 'write "pipeline": {"stages": N}'
_SPLITS = 'write "tensor_parallel": {"autotp_size": N}'
_RATES = "write `scheduler`, with the type and its params"
OTHER_NAMES = {
    "learning_rate": "write `optimizer.params.lr`",
    "pipe_parallel_size": _STAGES,
    "pipeline_model_parallel_size": _STAGES,
    "model_parallel_size": _SPLITS,
    "tensor_model_parallel_size": _SPLITS,
    "micro_batch_size": "write `train_micro_batch_size_per_gpu`",
    "global_batch_size": "write `train_batch_size`",
    "checkpoint_activations": 'write "activation_checkpointing": {}',
    "clip_grad": "write `gradient_clipping`",
    "log_interval": "write `steps_per_print`",
    "lr_decay_style": _RATES,
    "lr_decay_iters": _RATES,
    "lr_warmup_iters": _RATES,
    "lr_warmup_fraction": _RATES,
    "min_lr": _RATES,
    "warmup": _RATES,
    "train_iters": "delete it; the recipes of `launch` have --max-steps, and a script counts its own steps",
    "seq_length": "delete it; the recipes of `launch` have --seq-length, and a script cuts its own sequences",
    "zero_stage": 'write "zero_optimization": {"stage": N}',
}
"""Name of Megatron's, GPT-NeoX's or Hugging Face's, which may have dashes -> what to write instead."""


def stranger(root: type[Section], key: str, value: Any, beside: Mapping[str, Any]) -> Problem | Note:
    """What to say of a key at the top level that is neither ours nor DeepSpeed's.

    Args:
        key, value: as written.
        beside: the whole configuration.

    Returns:
        A problem where something is meant that would not be done, else a note.
    """
    path: Path = (key,)
    instead = OTHER_NAMES.get(plain(key))
    if instead is not None:
        if value in (0, 1, None, False) and plain(key).endswith("parallel_size"):
            return Note(path, "foreign", f"is a name of Megatron's, and {show(value)} asks for nothing")
        return Problem(path, "is a name of another library's, which DeepSpeed does not read", instead)
    if isinstance(value, dict):
        inner = next((name for name in value if name in root.model_fields and name not in beside), None)
        if inner is not None:
            what = f"is no section of DeepSpeed's, and `{inner}` in it is not read"
            return Problem(path, what, f"write `{inner}` at the top level")
    problem = unknown_key(root, root, known_keys(), path, value)
    if problem.suggestion is not None or is_comment(key, ""):
        return problem
    old = nearest(key, (name for name, _ in converted_paths() if "." not in name), furthest=1)
    if old is not None:
        return Problem(path, "unknown key", f"did you mean `{old}`?", old)
    return Note(path, "foreign", FOREIGN)
