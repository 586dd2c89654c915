"""`PipelineModule`: a model as a row of layers, each built only by the ranks that run it. DeepSpeed's API.

    LayerSpec, TiedLayerSpec   a class and its arguments: what a layer will be
    home                       the index of the layer whose module a layer runs (`specs.py`). Parameters are named by
                               it: `{home}.{name}`, as nn.Sequential names them

A layer takes what the one before it returns: a tensor, or a tuple of tensors, as one argument.
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
    """A row of layers. It keeps what layers are made from; `build` makes those of a stage. Where there is a process
    group already, and the number of stages is known, the layers of this rank's stage are made at once: its submodules.

    Args:
        layers: LayerSpecs, modules and functions; or an nn.Sequential, whose names stay. Modules that are there already
            keep their values: every rank must have made the same ones.
        num_stages: stages; None: as the topology or the JSON says.
        topology: names the degrees of the axes pipe, data and model.
        loss_fn: loss_fn(outputs, labels) -> loss, on the last stage. It has no parameters.
        seed_layers: layer i is made under the seed base_seed + i, else under one from (base_seed, i). Either way values
            depend neither on the cut nor on the rank.
        seed_fn: called with that number in place of seeding Python, numpy and torch.
        partition_method: "parameters", "uniform", "best", "profile" or "type:REGEX".
        activation_checkpoint_interval: so many neighbouring layers are recomputed together in backward; 0: none.
        activation_checkpoint_func: recomputes: func(function, *inputs); None: `launcher.checkpointing.checkpoint`.
        checkpointable_layers: class names: only groups of these alone are recomputed; None: those with parameters.
        dynamic_shape: taken as DeepSpeed has it; shapes may always differ between microbatches.

    Attributes:
        tied: key -> indices of the layers; of a module that stands in the row twice the key is "layer {first index}".
        made: modules of this rank's stage that are there before initialize(), by the index of their home.
        cut: the boundaries of the stages that they are of; None: there are none.

    Raises:
        ConfigError: what stands in `layers` is no layer, ties contradict each other, or stages do.
    """

    is_row_of_layers = True  # `engine/staging.py` asks, and need not import this file

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
        # Not as attributes of an nn.Module: it would take their parameters for those of a stage.
        self._functions = (_checked_loss(loss_fn), seed_fn, activation_checkpoint_func)
        self.seed_layers, self.base_seed = seed_layers, base_seed
        self.partition_method = known_method(partition_method)
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = None if checkpointable_layers is None else tuple(checkpointable_layers)
        self.dynamic_shape = dynamic_shape
        self.made: dict[int, nn.Module] = {}
        self.cut = self._make_own()

    def _make_own(self) -> list[int] | None:
        """Build the layers of this rank early: scripts give their parameters to an optimizer, or count them, before
        initialize()."""
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
        """Forget what was made of a stage that this rank does not run after all."""
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
        """Return the topology that was given."""
        return self._topology

    def configure(self, section: PipelineConfig) -> None:
        """Take the keys that the JSON writes before arguments; its stages are `Config.with_stages`' business."""
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
            ConfigError: one is another.
        """
        for axis, degree in degrees.items():
            wanted = self._topology.get_dim(axis) if self._topology else 0
            if wanted not in (0, degree):
                raise ConfigError(
                    f"the topology has degree {wanted} along {axis}, but the run has {degree}",
                    where="PipelineModule(topology=...)",
                    fix="leave topology out and give num_stages, or start as many ranks as it has",
                )

    def boundaries(self, virtual_stages: int, measured: Sequence[float] | None = None) -> list[int]:
        """Return the boundaries of the virtual stages, over the layers [virtual stages + 1], by `partition_method`."""
        return partition(self.layer_costs(self.partition_method, measured), virtual_stages)

    def balance(self, boundaries: Sequence[int], measured: Sequence[float] | None = None) -> Balance:
        """Return what each virtual stage has; a tied layer counts wherever it runs."""
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
        """Return the cost of each layer, in the unit of the method: 1, elements, operations of a token, or seconds.

        Args:
            method: as `partition_method`.
            measured: for "profile".

        Raises:
            ConfigError: no layer matches "type:REGEX", "profile" without numbers, or no such method.
        """
        return costs_of(known_method(method), self._layers, lambda: self._sizes, measured)

    def build(
        self, first: int, last: int, seed: int | None = None, made: dict[int, nn.Module] | None = None
    ) -> PipelineStage:
        """Return the layers `first` .. `last` - 1, on the device of the context; the random state stays as it was.

        Args:
            seed: in place of `base_seed`.
            made: modules by the index of their home, which are there already; gets those that are made.

        Raises:
            ConfigError: there are no such layers, or a tied layer lacks its `tied_weight_attr`.
        """
        if not 0 <= first < last <= len(self):
            raise ConfigError(
                f"layers {first} to {last - 1} are not among the {len(self)} of this PipelineModule"
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
        """Return all layers under their names, for names and shapes: what is not built yet is on meta."""
        whole = nn.Module()
        for index, (source, home) in enumerate(self._layers):
            if home == index and isinstance(source, LayerSpec | nn.Module):
                whole.add_module(self._names[index], self._shapes(index))
        return whole

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise LauncherError(
            "a PipelineModule has no layers of its own to run",
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
        """Return (elements of the parameters, of the weights that are multiplied) of each layer."""
        return sizes_of(self._layers, self._shapes)

    def _shapes(self, index: int) -> nn.Module:
        """Return a layer for its shapes: on meta, and for real where its class cannot be built there."""
        source = self._layers[index].source
        if index in self.made:
            return self.made[index]
        try:
            with torch.device("meta"), drawn_from(0):
                return source.build() if isinstance(source, LayerSpec) else self._module(index, 0)
        except (RuntimeError, NotImplementedError):  # its __init__ looks at values
            return self._module(index, self.base_seed)


def _built_as_ever() -> bool:
    """Return the modules keep the parameters that they are built with: this is not inside zero.Init."""
    watched = nn.modules.module._global_module_registration_hooks
    return not watched and torch.get_default_device().type != "meta"


def _named(layers: Iterable[Source]) -> list[tuple[str, Source]]:
    """Return the layers with the names of their modules."""
    if isinstance(layers, nn.Sequential):
        return list(layers._modules.items())  # named_children() leaves out what stands there twice
    named = [(str(index), source) for index, source in enumerate(layers)]
    for index, source in named:
        kind = source.typename if isinstance(source, LayerSpec) else type(source)
        if issubclass(kind, PipelineModule):
            raise ConfigError(
                f"layer {index} is a PipelineModule", where=WHERE, fix="write its layers in its place"
            )
    return named


def _checked_loss(loss_fn: Any) -> Any:
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ConfigError(
            f"the loss_fn {type(loss_fn).__name__} has parameters, which no stage would train",
            where="PipelineModule(loss_fn=...)",
            fix="make what has parameters the last layer",
        )
    return loss_fn
