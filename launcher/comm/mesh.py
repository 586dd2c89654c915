"""The device mesh: the degree of each kind of parallelism, and the process group of each axis."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm.choose import choose, plain_transports
from launcher.comm.transport import Alone, Transport, Transports, peers_of
from launcher.errors import ConfigError

logger = logging.getLogger(__name__)

AXES = ("pp", "dp", "cp", "tp")  # outermost first: tp ranks are neighbours, so they share a node
MANY = 8  # longer lists of ranks are abbreviated


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this rank sees it.

    Args:
        name: "dp", "tp", ...
        degree: number of ranks along the axis; 1 is the degenerate case and has no process group.
        rank: this rank's coordinate on the axis, 0 .. degree - 1.
        group: process group of the ranks along the axis. None if there is no rank to communicate with: with
            degree 1, and in a rehearsal. Nothing is sent then, and receive buffers have arbitrary content.
        transports: how its ranks communicate, chosen when the group was created; None without a group.
        levels: (across nodes, inside a node): gathers along this axis use these two hops; None: one hop.
    """

    name: str
    degree: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    transports: Transports | None = None
    levels: tuple[Axis, Axis] | None = None

    @classmethod
    def over(cls, name: str, group: dist.ProcessGroup | None = None) -> Axis:
        """Return an axis over an existing process group (None: all ranks), without probing for transports."""
        group = group or dist.group.WORLD
        assert group is not None, "torch.distributed is initialized"
        return cls(name, group.size(), group.rank(), group, plain_transports(group))

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        """Return the axis itself: a copied module communicates with the same ranks."""
        return self

    def transport(self, tensor: Tensor) -> Transport:
        """Return the transport for a tensor."""
        return self._alone if self.transports is None else self.transports.of(tensor)

    @cached_property
    def _alone(self) -> Transport:
        return Alone(self.rank, self.degree)

    @cached_property
    def members(self) -> str:
        """Return the ranks along the axis, for display: "ranks 0,2", "ranks 0,8,...,56"."""
        ranks = dist.get_process_group_ranks(self.group) if self.group is not None else []
        few = ranks if len(ranks) <= MANY else [*ranks[:2], "...", ranks[-1]]
        return f"ranks {','.join(map(str, few))}" if ranks else self.name

    @cached_property
    def peers(self) -> list[int]:
        """Return the coordinates of the other ranks."""
        return peers_of(self.rank, self.degree)

    def span(self, numel: int) -> slice:
        """Return this rank's slice of a flat buffer of `numel` elements, which the degree must divide."""
        size = numel // self.degree
        return slice(self.rank * size, (self.rank + 1) * size)


@dataclass(frozen=True)
class Mesh:
    """All axes of a run. Built once; every package receives the axis it works on."""

    device: torch.device
    world_size: int = 1
    rank: int = 0
    axes: dict[str, Axis] = field(default_factory=dict)
    on_paper: bool = False  # simulated ranks: axes have degrees, but no groups
    experts: dict[str, Axis] = field(default_factory=dict)  # ep and edp, once experts are sharded

    @classmethod
    def planned(cls, device: torch.device, world_size: int, rank: int, **degrees: int) -> Mesh:
        """Return the mesh that one rank of a run would see, without a run.

        Args:
            degrees: as in `build`; all degrees other than 1.
        """
        ranks = torch.arange(world_size).view([degrees.get(name, 1) for name in AXES])
        axes = {name: _on_paper(name, rank, ranks, dim) for dim, name in enumerate(AXES)}
        return cls(device, world_size, rank, axes, on_paper=True)

    @classmethod
    def build(cls, device: torch.device, **degrees: int) -> Mesh:
        """Arrange the ranks of the default process group along the axes.

        Args:
            device: the device of this rank.
            degrees: degree of each axis by name; axes not named have degree 1, and `dp` takes the rest.

        Raises:
            ConfigError: the degrees do not multiply to the world size.
        """
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        given = 1
        for degree in degrees.values():
            given *= degree
        if "dp" not in degrees and world % given == 0:
            degrees["dp"] = world // given
            given = world
        if given != world:
            product = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
            raise ConfigError(
                f"the degrees {product} multiply to {given}, but there are {world} ranks",
                fix="make their product equal the number of ranks, or omit dp so that it takes the rest",
            )
        warning = warning_of_tp_over_nodes(
            degrees.get("tp", 1), world, int(os.environ.get("LOCAL_WORLD_SIZE", world))
        )
        if warning and rank == 0:
            logger.warning(warning)
        if world > 1 and dist.get_backend() == "fake":  # a rehearsal: one process plays a rank
            return cls.planned(device, world, rank, **degrees)
        shape = tuple(degrees.get(name, 1) for name in AXES)
        return cls(device, world, rank, _axes(device, shape, world))

    @property
    def dp(self) -> Axis:
        return self.axes["dp"]

    @cached_property
    def dp_cp(self) -> Axis:
        """Return the axis of the ranks with the same parameters: dp, and ranks that share sequences (cp).

        Every rank must access this property, because it may create a process group.
        """
        return self.joined("dp", "cp")

    def joined(self, outer: str, inner: str) -> Axis:
        """Return one axis over two that are adjacent in the mesh, or have only axes of degree 1 between them.

        Its name is "outer_inner", or that of the only axis with more than one rank. Every rank must call
        this.
        """
        one, other = self.axes[outer], self.axes[inner]
        if one.degree == 1 or other.degree == 1:
            return one if other.degree == 1 else other
        first, last = AXES.index(outer), AXES.index(inner)
        degrees = [self.axes[name].degree for name in AXES]
        shape = (*degrees[:first], one.degree * other.degree, *degrees[last + 1 :])
        assert all(degree == 1 for degree in degrees[first + 1 : last]), "all axes in between have degree 1"
        return self._line(f"{outer}_{inner}", torch.arange(self.world_size).view(shape), first)

    def split_cp(self, inner: int) -> tuple[Axis, Axis]:
        """Return two axes inside cp: `ring`, across groups of `inner` neighbours, and `ulysses`, inside each.

        Every rank must call this; `inner` must divide the degree of cp.
        """
        cp = self.axes["cp"]
        if inner == cp.degree:
            return Axis("ring"), replace(cp, name="ulysses")
        if inner == 1:
            return replace(cp, name="ring"), Axis("ulysses")
        ring, ulysses = self._inside("cp", "cp", ring=cp.degree // inner, ulysses=inner)
        return ring, ulysses

    def split_dp(self, size: int) -> tuple[Axis, Axis]:
        """Return two axes inside dp_cp: `shard`, groups of `size` neighbours, and `replicate`, across them.

        Every rank must call this; `size` must divide the degree of dp_cp.
        """
        if size == self.dp_cp.degree:
            return self.dp_cp, Axis("replicate")
        if size == 1:
            return Axis("shard"), replace(self.dp_cp, name="replicate")
        replicate, shard = self._inside("dp", "cp", replicate=self.dp_cp.degree // size, shard=size)
        return shard, replicate

    def split_for_experts(self, size: int) -> tuple[Axis, Axis]:
        """Return two axes over the ranks of dp, cp and tp: `ep`, groups of `size` neighbours, which have
        different experts, and `edp`, across these groups, whose ranks have the same experts (Liu et al. 2025,
        arXiv:2504.14960).

        Every rank must call this; `size` must divide the product of the degrees.
        """
        ranks = self.dp_cp.degree * self.axes["tp"].degree
        edp, ep = self._inside("dp", "tp", edp=ranks // size, ep=size)
        self.experts.update(edp=edp, ep=ep)
        return edp, ep

    def with_levels(self, shard: Axis, node: int) -> Axis:
        """Return the axis `shard`, the innermost part of dp_cp, with gathers in two hops: across nodes of
        `node` of its ranks, then inside each node.

        Every rank must call this; `node` must divide the degree of `shard`.
        """
        sizes = {"": self.dp_cp.degree // shard.degree, "across": shard.degree // node, "inside": node}
        across, inside = self._inside("dp", "cp", **sizes)
        return replace(shard, levels=(across, inside))

    def part_of(self, name: str, coordinates: Sequence[int]) -> Axis:
        """Return an axis over some coordinates of the axis `name`, in order; other ranks get degree 1.

        Every rank must call this.
        """
        whole = self.axes[name]
        if len(coordinates) == whole.degree:
            return whole
        ranks = torch.arange(self.world_size).view([self.axes[axis].degree for axis in AXES])
        dim = AXES.index(name)
        axis = self._line(name, ranks.index_select(dim, torch.tensor(coordinates)), dim)
        return axis if whole.rank in coordinates else Axis(name)

    def _inside(self, first: str, last: str, **sizes: int) -> list[Axis]:
        """Return an axis for each size; together they span the mesh's axes from `first` to `last`, outermost
        first. A size without a name yields no axis."""
        degrees = [self.axes[name].degree for name in AXES]
        place = AXES.index(first)
        shape = (*degrees[:place], *sizes.values(), *degrees[AXES.index(last) + 1 :])
        ranks = torch.arange(self.world_size).view(shape)
        return [self._line(name, ranks, place + i) for i, name in enumerate(sizes) if name]

    def _line(self, name: str, ranks: torch.Tensor, dim: int) -> Axis:
        if self.on_paper:
            return _on_paper(name, self.rank, ranks, dim)
        return _line(name, self.device, ranks, dim)

    @property
    def degrees(self) -> dict[str, int]:
        return {name: axis.degree for name, axis in self.axes.items()}


def warning_of_tp_over_nodes(degree: int, world: int, node: int) -> str | None:
    """Return a warning about tensor parallelism across nodes; None if every tp group is inside one node.

    Args:
        degree: of the tp axis.
        world: number of ranks.
        node: ranks per node.
    """
    if world <= node or node % degree == 0:
        return None
    fitting = ", ".join(str(size) for size in range(1, node + 1) if node % size == 0)
    return (
        f"tensor parallelism over {degree} ranks crosses nodes, which have {node} ranks each: every layer sends 4 "
        "reductions of tokens x hidden values per microbatch between nodes, and the compute waits for them; "
        f"tensor_parallel.autotp_size {fitting} would keep them inside a node"
    )


def _axes(device: torch.device, shape: tuple[int, ...], world: int) -> dict[str, Axis]:
    if world == 1:
        return {name: Axis(name) for name in AXES}
    from launcher.comm.groups import all_ranks

    ranks = torch.arange(world).view(shape)
    whole = all_ranks(device) if world in shape else None
    return {
        name: _line(name, device, ranks, dim, whole if degree == world else None)
        for dim, (name, degree) in enumerate(zip(AXES, shape, strict=True))
    }


def _line(
    name: str, device: torch.device, ranks: torch.Tensor, dim: int, group: dist.ProcessGroup | None = None
) -> Axis:
    """Return this rank's line along dimension `dim` of the mesh, with new process groups, or with `group`."""
    degree = ranks.shape[dim]
    if degree == 1:
        return Axis(name)
    from launcher.comm.groups import line_of

    lines = ranks.movedim(dim, -1).reshape(-1, degree).tolist()
    group = group or line_of(lines, device)
    reductions = line_of(lines, device) if device.type == "cuda" else None
    if group is None:
        return Axis(name)  # this rank is on no such line; it only took part in creating the groups
    return Axis(name, degree, group.rank(), group, choose(device, group, reductions))


def _on_paper(name: str, rank: int, ranks: torch.Tensor, dim: int) -> Axis:
    """Return a rank's line along dimension `dim` of the mesh, without process groups."""
    place = (ranks == rank).nonzero()
    if ranks.shape[dim] == 1 or not len(place):
        return Axis(name)
    return Axis(name, ranks.shape[dim], int(place[0, dim]))
