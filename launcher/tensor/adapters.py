"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) of split layers, as PEFT adds them.

PEFT puts a wrapper in the place of a layer: `base_layer` with W [out, in], and y = W x + B A x with A [r, in]
and B [out, r]. The wrapper becomes the split layer, so both terms share its collectives:

style        W               A                        B
column       out features    whole, partial gradient  out features
row          in features     in features              whole, partial gradient

A factor that every rank holds whole gets only one term of its gradient on each rank, because the other factor is
split. These terms are summed with the gradients of the step. Forward and backward send what they send without
adapters: A is one more reader of the `Entered` input of a column-parallel layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from launcher.errors import ConfigError
from launcher.models.units import ends_of
from launcher.tensor.dropout import drops_out
from launcher.tensor.rule import SplitRule
from launcher.tensor.styles import STYLES, Style

BASE, OF_PARAMETERS = "base_layer", "ParamWrapper"
_SUMMED = SplitRule("replicated_with_grad_allreduce")
_COPIES = ("modules_to_save", "token_adapter")
"""Children of PEFT's wrappers that hold copies of a module."""
_FIX = "adapt it with plain LoRA, adapt other layers (--lora-targets), or use ZeRO instead of tensor_parallel"


def modules_before_peft(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model, those that PEFT has wrapped under the names that they had before; without
    the wrappers and their adapters."""
    wrapper = ""
    for name, module in model.named_modules():
        if wrapper and name.startswith(f"{wrapper}."):
            path = f"{name}.".removeprefix(f"{wrapper}.")
            if path.startswith(f"{BASE}."):
                yield f"{wrapper}.{path.removeprefix(f'{BASE}.')}".rstrip("."), module
        elif is_wrapper(module):
            wrapper = name
        else:
            yield name, module


def parameters_before_peft(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `modules_before_peft` by name, tied ones under each of their names."""
    return {
        f"{name}.{key}" if name else key: parameter
        for name, module in modules_before_peft(model)
        for key, parameter in module._parameters.items()
        if parameter is not None
    }


def wrappers_of(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the wrapper of each wrapped layer."""
    return {module._modules[BASE]: module for module in model.modules() if is_wrapper(module)}  # type: ignore[misc]


def is_wrapper(module: nn.Module) -> bool:
    return module._modules.get(BASE) is not None and hasattr(module, "adapter_layer_names")


def unwrapped(module: nn.Module | None) -> nn.Module | None:
    """Return the layer inside of a wrapper, else the module itself."""
    return module._modules[BASE] if module is not None and is_wrapper(module) else module


def adapts_a_linear(wrapper: nn.Module) -> bool:
    """Return whether it adds the product of two matrices to the output of a linear layer."""
    factors = list(getattr(wrapper, "lora_A", {}).values())
    return (
        type(wrapper).__name__ != OF_PARAMETERS
        and len(factors) > 0
        and all(isinstance(factor, nn.Linear) for factor in factors)
    )


def _is_adapted_otherwise(module: nn.Module) -> bool:
    """Return whether a wrapper has other adapters than products of two matrices."""
    names: tuple[str, ...] = getattr(module, "adapter_layer_names", ())
    any_left = any(len(getattr(module, name, ())) > 0 for name in names)  # else they were deleted
    return is_wrapper(module) and any_left and not adapts_a_linear(module)


def holds_copies(module: nn.Module) -> bool:
    """Return whether PEFT trains a copy of a layer here, or of some of its rows."""
    return hasattr(module, "original_module") and any(hasattr(module, key) for key in _COPIES)


def adapter_rules(wrapper: Any, name: str, rule: SplitRule) -> Iterator[tuple[nn.Module, SplitRule]]:
    """Yield the layers A and B of every adapter of a split layer, each with its rule.

    Raises:
        ConfigError: one of the adapters cannot be split like that.
    """
    style = STYLES[rule.style]
    for key in wrapper.lora_A:
        a, b = wrapper.lora_A[key], wrapper.lora_B[key]
        _check(wrapper, name, key, style)
        if style.side == "out":
            yield from ((a, _SUMMED), (b, rule))
        elif style.side == "in":
            yield from ((a, rule), (b, _SUMMED))
        elif style.partial:
            yield from ((a, _SUMMED), (b, _SUMMED))


def peft_configs(model: nn.Module) -> Iterator[Any]:
    """Yield the configs of PEFT in a model, which other modules may wrap."""
    for module in model.modules():
        configs = vars(module).get("peft_config") or vars(module).get("_peft_config")  # the latter of prompts
        yield from configs.values() if isinstance(configs, dict) else ()


def check_prompts(model: nn.Module) -> None:
    """Check that PEFT does not train a prefix of keys and values: a rank has only those of its own heads.

    Raises:
        ConfigError: it does.
    """
    if any(config.peft_type == "PREFIX_TUNING" for config in peft_configs(model)):
        raise _unsupported("the model", "a trained prefix of keys and values (prefix tuning)")


def whole_ends(model: nn.Module, *, head: bool) -> set[nn.Module | None]:
    """Return the embedding and the head that stay whole on every rank: what PEFT has wrapped, other than by
    factors of a linear layer, and an end that shares its weights.

    Args:
        head: the head stays whole in any case.
    """
    embedding, output = ends_of(model)
    ends = [end for end in (embedding, output) if end is not None]
    kept = [(head and end is output) or holds_copies(end) or _is_adapted_otherwise(end) for end in ends]
    weights = {_weight_of(end) for end in ends}
    if any(kept) and len(weights) < len(ends):
        return {unwrapped(end) for end in ends}
    return {unwrapped(end) for end, keep in zip(ends, kept, strict=True) if keep}


def _weight_of(end: nn.Module) -> nn.Parameter | None:
    original: Any = end.original_module if holds_copies(end) else unwrapped(end)
    return original._parameters.get("weight")  # type: ignore[no-any-return]


def check_dropout(name: str, wrapper: Any) -> None:
    """Check that the adapters of a layer which every rank computes whole have no dropout: inside of split layers
    each rank draws other random numbers, so the ranks' copies of the adapters would diverge.

    Raises:
        ConfigError: one of them has.
    """
    if drops_out(wrapper.lora_dropout):
        raise ConfigError(
            f"{name} is not split over tensor-parallel ranks, and has LoRA adapters with dropout, which would "
            "differ between the ranks",
            where="tensor_parallel",
            fix="set lora_dropout to 0, or leave the layer out of target_modules",
        )


def reads_late(wrapper: Any) -> bool:
    """Return whether A reads another tensor than the layer: after dropout, or cast to another dtype. Its term of
    the input's gradient then comes through autograd."""
    weight = wrapper._modules[BASE]._parameters.get("weight")
    return drops_out(wrapper.lora_dropout) or any(
        factor.weight.dtype != weight.dtype for factor in wrapper.lora_A.values()
    )


def check_wrapped(name: str, module: nn.Module, rule: SplitRule) -> None:
    """Check that a module which a rule splits is not wrapped by adapters that do not support it.

    Raises:
        ConfigError: it is.
    """
    if STYLES[rule.style] == Style():
        return
    if type(module).__name__ == OF_PARAMETERS:
        raise unsupported_parameters(name)
    if _is_adapted_otherwise(module):
        method = type(module).__module__.removesuffix(".layer").rpartition(".")[2]  # peft.tuners.ia3.layer
        raise _unsupported(name, f"adapters of the method {method}")
    if holds_copies(module):
        raise _unsupported(name, "a trained copy of a layer (modules_to_save)")


def unsupported_parameters(name: str) -> ConfigError:
    """Return the error for adapters of the parameters of a module."""
    return _unsupported(
        name, "LoRA adapters of single parameters (target_parameters, and experts with PEFT's all-linear)"
    )


def _check(wrapper: Any, name: str, key: str, style: Style) -> None:
    if key in getattr(wrapper, "lora_magnitude_vector", ()) or key in getattr(wrapper, "lora_variant", ()):
        raise _unsupported(name, "a variant of LoRA (DoRA or another)")
    if style.side == "in" and wrapper.lora_B[key].bias is not None:
        raise _unsupported(name, "a LoRA adapter with lora_bias, on a layer with split inputs")


def _unsupported(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"{name} has {what}, which tensor parallelism does not support", where="tensor_parallel", fix=_FIX
    )
