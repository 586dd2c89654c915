"""DeepSpeed's `PipelineModule`: a model as a sequence of layers, each built only by the ranks that run it.

    LayerSpec, TiedLayerSpec   a class and its arguments, from which a layer is built
    home                       the index of the layer whose module a layer runs (`specs.py`). Parameters are named by
                               it: `{home}.{name}`, as in nn.Sequential

A layer takes the output of the previous layer, a tensor or a tuple of tensors, as its only argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from launcher.config import PipelineConfig
from launcher.errors import ConfigError, LauncherError
from launcher.pipeline.partition.best_cut import Balance, partition
from launcher.pipeline.seeding import drawn_from, number_of
from launcher.pipeline.sequential.costs import costs_of, known_method, sizes_of
from launcher.pipeline.sequential.specs import (
    WHERE,
    LayerSpec,
    Source,
    TiedLayerSpec,
    check_attributes,
    row_of,
)
from launcher.pipeline.sequential.stage import LayerCall, PipelineStage
from launcher.pipeline.sequential.topology import ProcessTopology, stage_of_this_rank, stages_of


class PipelineModule(nn.Module):
    """A sequence of layers. It stores their specifications; `build` builds the layers of a stage. If a
    process group exists already and the number of stages is known, the layers of this rank's stage are built
    at once, as submodules.

    Args:
        layers: LayerSpecs, modules and functions; or an nn.Sequential, whose names are kept. Modules that are
            already built keep their values, which must be the same on every rank.
        num_stages: number of stages; None: as specified by the topology or the config.
        topology: specifies the degrees of the axes pipe, data and model.
        loss_fn: loss_fn(outputs, labels) -> loss, on the last stage. It must not have parameters.
        seed_layers: seed layer i with base_seed + i, else with a hash of (base_seed, i). In both cases
            initial values depend neither on the partition nor on the rank.
        seed_fn: called with that seed in place of seeding Python, numpy and torch.
        partition_method: "parameters", "uniform", "best", "profile" or "type:REGEX".
        activation_checkpoint_interval: number of consecutive layers that are recomputed together in backward;
            0: no activation checkpointing.
        activation_checkpoint_func: func(function, *inputs), which checkpoints a function; None:
            `launcher.checkpointing.checkpoint`.
        checkpointable_layers: class names; only groups made up of these classes are recomputed. None: groups
            with parameters.
        dynamic_shape: accepted for compatibility with DeepSpeed; shapes may always differ between
            microbatches.

    Attributes:
        tied: key -> indices of the layers; for a module that occurs twice the key is "layer {first index}".
        made: home index -> module, for the modules of this rank's stage that were built before initialize().
        cut: the stage boundaries for which `made` was built; None: nothing was built.

    Raises:
        ConfigError: an item of `layers` is not a layer, or ties or numbers of stages contradict each other.
    """

    is_row_of_layers = True  # lets `engine/staging.py` recognise it without importing this file

    def __init__(
        self,
        layers: Iterable[Source],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        named = _named(layers)
        self._names = tuple(name for name, _ in named)
        self._layers, self.tied = row_of([source for _, source in named])
        self.num_stages = stages_of(num_stages, topology)
        self._topology = topology
        # In a tuple: nn.Module would register modules among them, and so their parameters, as the stage's.
        self._functions = (_checked_loss(loss_fn), seed_fn, activation_checkpoint_func)
        self.seed_layers, self.base_seed = seed_layers, base_seed
        self.partition_method = known_method(partition_method)
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = None if checkpointable_layers is None else tuple(checkpointable_layers)
        self.dynamic_shape = dynamic_shape
        self.made: dict[int, nn.Module] = {}
        self.cut = self._make_own()

    def _make_own(self) -> list[int] | None:
        """Build the layers of this rank early: scripts pass their parameters to an optimizer, or count them,
        before initialize()."""
        stage = stage_of_this_rank(self.num_stages)
        measures = self.partition_method == "profile"
        if stage is None or measures or not _built_as_ever():
            return None
        boundaries = self.boundaries(self.num_stages or 1)
        self.build(boundaries[stage], boundaries[stage + 1], made=self.made)
        for home in sorted(self.made):
            self.add_module(self._names[home], self.made[home])
        return boundaries

    def give_up_own(self) -> None:
        """Discard the modules that were built for a stage that this rank turns out not to run."""
        for home in self.made:
            delattr(self, self._names[home])
        self.made.clear()
        self.cut = None

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """Return loss_fn(outputs, labels) -> loss."""
        return self._functions[0]

    def topology(self) -> ProcessTopology | None:
        """Return the topology argument."""
        return self._topology

    def configure(self, section: PipelineConfig) -> None:
        """Apply the keys set in the config, which override arguments; stages are handled by
        `Config.with_stages`."""
        if "partition" in section.model_fields_set:
            self.partition_method = section.partition
        if "seed_layers" in section.model_fields_set:
            self.seed_layers = section.seed_layers
        if section.activation_checkpoint_interval:
            self.activation_checkpoint_interval = section.activation_checkpoint_interval

    def check_degrees(self, **degrees: int) -> None:
        """Check that the topology's degrees are those of the run.

        Args:
            degrees: pipe, data and model.

        Raises:
            ConfigError: a degree differs.
        """
        for axis, degree in degrees.items():
            wanted = self._topology.get_dim(axis) if self._topology else 0
            if wanted not in (0, degree):
                raise ConfigError(
                    f"the topology has degree {wanted} along {axis}, but the run has {degree}",
                    where="PipelineModule(topology=...)",
                    fix="omit topology and pass num_stages, or start the number of ranks of the topology",
                )

    def boundaries(self, virtual_stages: int, measured: Sequence[float] | None = None) -> list[int]:
        """Return the boundaries of the virtual stages, over the layers [virtual stages + 1], by `partition_method`."""
        return partition(self.layer_costs(self.partition_method, measured), virtual_stages)

    def balance(self, boundaries: Sequence[int], measured: Sequence[float] | None = None) -> Balance:
        """Return the costs and parameters of each virtual stage; a tied layer counts in each of its
        stages."""
        costs = self.layer_costs(self.partition_method, measured)
        spans = [slice(*span) for span in pairwise(boundaries)]
        counts = [int(size) for size, _ in self._sizes]
        return Balance(
            tuple(boundaries),
            tuple(sum(costs[span]) for span in spans),
            tuple(sum(counts[span]) for span in spans),
            seconds=measured is not None,
        )

    def layer_costs(self, method: str, measured: Sequence[float] | None = None) -> list[float]:
        """Return the cost of each layer, in the unit of the method: 1, elements, operations of a token, or
        seconds.

        Args:
            method: as `partition_method`.
            measured: measured seconds, for "profile".

        Raises:
            ConfigError: no layer matches "type:REGEX", "profile" without measurements, or the method is
                unknown.
        """
        return costs_of(known_method(method), self._layers, lambda: self._sizes, measured)

    def build(
        self, first: int, last: int, seed: int | None = None, made: dict[int, nn.Module] | None = None
    ) -> PipelineStage:
        """Build the layers `first` .. `last` - 1, on the context's device; the random state is preserved.

        Args:
            seed: replaces `base_seed`.
            made: home index -> module already built; newly built modules are added to it.

        Raises:
            ConfigError: there are no such layers, or a tied layer lacks its `tied_weight_attr`.
        """
        if not 0 <= first < last <= len(self):
            raise ConfigError(
                f"layers {first} to {last - 1} are out of range: this PipelineModule has {len(self)} layers"
            )
        seed = self.base_seed if seed is None else seed
        made = {} if made is None else made
        modules: dict[int, nn.Module] = {}
        calls = []
        for source, home in self._layers[first:last]:
            if not isinstance(source, LayerSpec | nn.Module):
                calls.append(LayerCall(None, source))
                continue
            if home not in made:
                made[home] = self._module(home, seed)
            module = modules[home] = made[home]
            function = None
            if isinstance(source, TiedLayerSpec):
                check_attributes(source, module)
                function = source.forward_fn
            calls.append(LayerCall(self._names[home], function))
        return PipelineStage(
            {self._names[home]: module for home, module in modules.items()},
            tuple(calls),
            interval=self.activation_checkpoint_interval,
            checkpoint=self._functions[2],
            checkpointable=self.checkpointable_layers,
        )

    def name_of(self, index: int) -> str:
        """Return the name of the module of a layer: the first part of the names of its parameters."""
        return self._names[self.home_of(index)]

    def home_of(self, index: int) -> int:
        """Return the index of the layer whose module a layer runs."""
        return self._layers[index].home

    def whole(self) -> nn.Module:
        """Return all layers under their names, for names and shapes: layers not built yet are on meta."""
        whole = nn.Module()
        for index, (source, home) in enumerate(self._layers):
            if home == index and isinstance(source, LayerSpec | nn.Module):
                whole.add_module(self._names[index], self._shapes(index))
        return whole

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise LauncherError(
            "a PipelineModule cannot be called directly",
            where=type(self).__name__,
            fix="pass it to launcher.initialize() and call engine.train_batch(), or run module.build(first, last)",
        )

    def _module(self, index: int, seed: int) -> nn.Module:
        source = self._layers[index].source
        if not isinstance(source, LayerSpec):
            assert isinstance(source, nn.Module)
            return source
        with drawn_from(seed + index if self.seed_layers else number_of(seed, index), self._functions[1]):
            return source.build()

    @cached_property
    def _sizes(self) -> list[tuple[int, float]]:
        """Return the `LayerSize` of each layer."""
        return sizes_of(self._layers, self._shapes)

    def _shapes(self, index: int) -> nn.Module:
        """Return a layer for its shapes: on meta, or on a real device if its class requires it."""
        source = self._layers[index].source
        if index in self.made:
            return self.made[index]
        try:
            with torch.device("meta"), drawn_from(0):
                return source.build() if isinstance(source, LayerSpec) else self._module(index, 0)
        except (RuntimeError, NotImplementedError):  # its __init__ reads values
            return self._module(index, self.base_seed)


def _built_as_ever() -> bool:
    """Return whether modules keep the parameters they are built with: not inside zero.Init, nor on meta."""
    watched = nn.modules.module._global_module_registration_hooks
    return not watched and torch.get_default_device().type != "meta"


def _named(layers: Iterable[Source]) -> list[tuple[str, Source]]:
    """Return the layers with the names of their modules."""
    if isinstance(layers, nn.Sequential):
        return list(layers._modules.items())  # named_children() skips a module's second occurrence
    named = [(str(index), source) for index, source in enumerate(layers)]
    for index, source in named:
        kind = source.typename if isinstance(source, LayerSpec) else type(source)
        if issubclass(kind, PipelineModule):
            raise ConfigError(
                f"layer {index} is a PipelineModule",
                where=WHERE,
                fix="insert its layers into the list instead",
            )
    return named


def _checked_loss(loss_fn: Any) -> Any:
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ConfigError(
            f"the loss_fn {type(loss_fn).__name__} has parameters, which no stage would train",
            where="PipelineModule(loss_fn=...)",
            fix="move the part with parameters into the last layer",
        )
    return loss_fn
