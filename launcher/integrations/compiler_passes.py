"""DeepCompile's pass names, for `engine.compile(schedule=[(step, [passes]), ...])`, which has no effect."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from launcher.integrations.refused import NotHere, missing


class CompilerPass:
    """The name of a pass; calling it is an error.

    Args:
        name: dotted name below `deepspeed`.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, *_: Any, **keywords: Any) -> Any:
        what, how = missing(self.__name__)
        raise NotHere(what, **how)


add_z3_gather_release = CompilerPass("compile.passes.zero3_compile.add_z3_gather_release")
add_z1_reduce = CompilerPass("compile.passes.zero_1_and_2_compile.add_z1_reduce")
schedule_prefetch = CompilerPass("compile.passes.prefetch.schedule_prefetch")
selective_gather = CompilerPass("compile.passes.selective_gather.selective_gather")
move_opt_states = CompilerPass("compile.passes.offload_adam_states.move_opt_states")
move_opt_states_sync = CompilerPass("compile.passes.offload_adam_states.move_opt_states_sync")
offload_adam_states_for_init = CompilerPass("compile.passes.offload_adam_states.offload_adam_states_for_init")


def prepare_autosp_inputs(
    input_id: Tensor,
    label_id: Tensor,
    position_id: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the inputs unchanged: with `sequence_parallel_size`, the engine shards the inputs of its model.

    Args:
        input_id, label_id, position_id, attention_mask: of full sequences, equal on ranks that share them.
        seq_dim: the sequence dimension.
    """
    return input_id, label_id, position_id, attention_mask
