"""Sorts the modules of a Hugging Face model into blocks, modules before them and modules after them.

For some models `base_model_pp_plan` of transformers contains the same: it, too, follows registration order.
Exceptions are listed in this module by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from launcher.errors import ConfigError
from launcher.models.units import ends_of, unit_modules

FIRST = {
    *("layernorm_embedding", "embeddings_layer_norm", "segment_embedding", "position_bias"),  # bart, cpmant
    *("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"),  # gemma3n, gemma4
    *("altup_projections", "multi_modal_projector", "visual_projection", "embed_tokens_extend"),
}
"""Names of modules that are registered after the blocks and run before them."""

LAST = {"final_layer_norm", "project_out", "bigbird_pegasus.layernorm_embedding"}  # the first two are opt's
"""Names of modules that are registered before the blocks and run after them. They take precedence over
`FIRST`; a prefix limits a name to one model_type."""

TOWERS = {"vision_tower", "vision_model", "image_encoder", "audio_tower", "vision_embed_tokens"}
"""Names of modules that embed other modalities than text: they run before the blocks of the text model."""

UNCUTTABLE = {
    "blt": "it consists of four models, and the last one uses the outputs of the first",
    "hrm_text": "its blocks run several times in one forward",
    "inkling2_text": "its blocks use the outputs of several earlier blocks",
    "prophetnet": "its forward calls methods of its position embeddings, which may be on another stage",
    "reformer": "its blocks run inside a custom autograd function for reversible layers",
    "xlm": "it has no blocks: its attention, feed-forward and norm layers are in three separate lists",
}
"""model_type -> why such a model cannot be cut."""

Named = list[tuple[str, nn.Module]]


class ModelParts(NamedTuple):
    """Modules of a model with their names. Those before and after the blocks are the outermost modules that
    contain no block; some have no parameters.

    Attributes:
        before: modules that run before the blocks: embeddings.
        blocks: the blocks, in order.
        after: modules that run after the blocks: the last norm, the head.
    """

    before: Named
    blocks: Named
    after: Named


def parts_of(model: nn.Module) -> ModelParts:
    """Return the modules of a causal LM by where they run.

    Raises:
        ConfigError: the model has no blocks, its blocks are not a single sequence, its type is in
            `UNCUTTABLE`, or its config sets output_router_logits.
    """
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):  # a stage has only the routers of its own blocks
        raise ConfigError(
            "the auxiliary loss of the routers needs all blocks, but a pipeline stage has only some of them",
            where="pipeline.stages",
            fix="set output_router_logits of the model's config to false, or remove the section pipeline",
        )
    kind = getattr(config, "model_type", "")
    if kind in UNCUTTABLE:
        raise _uncuttable(model, UNCUTTABLE[kind])
    blocks = [(name, block) for name, block in unit_modules(model) if not set(name.split(".")) & TOWERS]
    rows = {name.rpartition(".")[0] for name, _ in blocks}
    if len(rows) != 1:
        raise _uncuttable(
            model, "its blocks are not a single sequence" if rows else "it has no list of blocks"
        )
    parts, ids, passed = ModelParts([], blocks, []), {id(block) for _, block in blocks}, False
    embedding, head = ends_of(model)
    for name, module in _around(model, ids, ""):
        if id(module) in ids:
            passed = True
            continue
        inside, names = list(module.modules()), set(name.split("."))
        last = LAST & (names | {f"{kind}.{own}" for own in names})
        early = names & (FIRST | TOWERS) or any(inner is embedding for inner in inside)
        late = passed or any(inner is head for inner in inside)
        (parts.after if last or (late and not early) else parts.before).append((name, module))
    return parts


def around(model: nn.Module, parts: ModelParts) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters owned directly by modules that contain blocks, and by lists: the model's own code
    uses them on any stage."""
    inside = {id(inner) for part in parts for _, module in part for inner in module.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside:
            yield from module.named_parameters(name, recurse=False)


def _around(module: nn.Module, blocks: set[int], prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks, and the outermost callable modules that contain no block, in registration order."""
    for key, child in module.named_children():
        name = f"{prefix}.{key}" if prefix else key
        if id(child) in blocks:
            yield name, child
        elif isinstance(child, _LISTS) or {id(inner) for inner in child.modules()} & blocks:
            yield from _around(child, blocks, name)
        else:
            yield name, child


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _uncuttable(model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} cannot be split into pipeline stages: {why}",
        where="pipeline.stages",
        fix="write a PipelineModule with an explicit list of layers, or remove the section pipeline",
    )
