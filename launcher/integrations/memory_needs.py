"""`estimate_zero2_model_states_mem_needs` and its variants: model-state memory under ZeRO-2 and ZeRO-3.

The estimate follows launcher's own rule and is printed in DeepSpeed's form. Mixed precision with Adam takes 2
bytes per parameter, 2 for its gradient, and 12 for its fp32 copy and two states. Activations are not
included: `launch memory-estimate` traces the model and includes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

WEIGHT, GRADIENT, STATES = 2, 2, 12  # bytes per parameter
GIB = 2**30
FACTOR = 1.5


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = FACTOR,
) -> tuple[int, int]:
    """Return the bytes of host memory per node, and of device memory per rank.

    Args:
        cpu_offload: master weights, optimizer states and the gradients they need are stored in host memory.
        additional_buffer_factor: ratio of the host memory to the size of the states.
    """
    ranks = num_gpus_per_node * num_nodes
    whole = WEIGHT * total_params
    if cpu_offload:
        host = (GRADIENT + STATES) * total_params * num_gpus_per_node / ranks
        return int(host * additional_buffer_factor), int(whole + GRADIENT * total_params / ranks)
    return 0, int(whole + (GRADIENT + STATES) * total_params / ranks)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = FACTOR,
) -> tuple[int, int, int]:
    """Return the bytes of host memory per node, of device memory per rank, and of the largest gathered layer.

    Args:
        largest_layer_params: parameters of the largest unit that is gathered at once.
        cpu_offload_params: parameter shards are stored in host memory.
        zero_init: the model is built sharded; false: each rank builds the full model in host memory, in fp32.
    """
    ranks = num_gpus_per_node * num_nodes
    largest = (WEIGHT + GRADIENT) * largest_layer_params
    shard, rest = WEIGHT * total_params / ranks, (GRADIENT + STATES) * total_params / ranks
    params_rest = cpu_offload and cpu_offload_params
    device = largest + (0 if params_rest else shard) + (0 if cpu_offload else rest)
    host = num_gpus_per_node * ((rest if cpu_offload else 0) + (shard if params_rest else 0))
    built = 0 if zero_init else 4 * total_params * num_gpus_per_node
    return int(max(host, built) * additional_buffer_factor), int(device), largest


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = FACTOR
) -> None:
    """Print the table for a model."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _total(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = FACTOR,
) -> None:
    """Print the table for a number of parameters."""
    _print_head(num_gpus_per_node, num_nodes, f"{int(total_params / 1e6)}M total params")
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        print(_line(host, device, f"offload_optimizer={'cpu' if offload else 'none'}"))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = FACTOR
) -> None:
    """Print the table for a model."""
    estimate_zero3_model_states_mem_needs_all_cold(
        _total(model), _largest(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = FACTOR,
) -> None:
    """Print the table for a number of parameters."""
    sizes = (
        f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params"
    )
    _print_head(num_gpus_per_node, num_nodes, sizes)
    for optimizer, params, init in _ways():
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            optimizer,
            params,
            init,
            additional_buffer_factor,
        )
        places = (
            f"offload_{name}={'cpu' if on else 'none'}"
            for name, on in (("param", params), ("optimizer", optimizer))
        )
        print(_line(host, device, f"{', '.join(places)}, zero_init={int(init)}"))


def _ways() -> Iterator[tuple[bool, bool, bool]]:
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            yield optimizer, params, init


def _print_head(gpus: int, nodes: int, sizes: str) -> None:
    print("Memory of parameters, gradients and optimizer states (activations not included)")
    print(f"{nodes} x {gpus} GPUs, model with {sizes}")
    print("per node (host) |   per GPU | options")


def _line(host: int, device: int, options: str) -> str:
    return f"  {host / GIB:11.2f}GB | {device / GIB:7.2f}GB | {options}"


def _total(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _largest(model: nn.Module) -> int:
    return max(
        (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()), default=0
    )
