"""Translation of `offload_param` and `offload_optimizer` to tier budgets for shards, fastest tier first."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from launcher.comm import Mesh
from launcher.config import Config
from launcher.config.offload import OffloadConfig
from launcher.offload.buffer_cache import MakeBuffer
from launcher.offload.offloaded import HostBuffers
from launcher.offload.placement import Placement, Placements, TierBudget
from launcher.offload.tier import Tier

ITEM = 4  # maximum bytes per element, for keys that count elements
STATES = {"SGD": 1, "Adagrad": 1, "Lion": 1}  # states per parameter; 2 for other optimizers
HOST = torch.device("cpu")


def open_placements(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    tier_at: Callable[[str], Tier] | None = None,
    make: MakeBuffer | None = None,
) -> Placements:
    """Return the placements of this rank's shards; opens NVMe tiers if needed.

    Args:
        tier_at: opens the tier of a directory; default: a file in it.
        make: see `HostBuffers`.

    Raises:
        OffloadError: the directory is missing, not writable, or does not support direct I/O.
    """
    zero = config.zero_optimization
    params, optim = zero.parameters_elsewhere, zero.offload_optimizer
    opened = _OpenTiers(tier_at or (lambda path: _file_in(path, config, mesh)))
    placements = Placements(device)
    if params is not None:
        in_host = params.max_in_cpu * ITEM if params.host_budget is None else params.host_budget
        placements.parameters = _rooms(params, device, opened, in_host)
        placements.max_loaded_numel, placements.max_loaded_units = (
            params.buffer_count * params.buffer_size,
            params.buffer_count,
        )
    if optim is not None and optim.device != "none":
        placements.optimizer = _rooms(
            optim, device, opened, optim.host_budget or 0, share=1 - float(optim.ratio)
        )
        placements.reads_ahead = bool(optim.pipeline_read)
        if optim.device == "nvme":
            placements.cut = int(zero.sub_group_size)
    kind = config.optimizer.type if config.optimizer is not None else ""
    placements.states = STATES.get(kind, 2)
    writes = optim.buffer_count if optim is not None and optim.pipeline_write else 0
    pins = [bool(section.pin_memory) for section in (params, optim) if section is not None]
    placements.buffers = HostBuffers(writes, pin=all(pins) and device.type == "cuda", make=make)
    weakref.finalize(placements, _close, list(opened.values()))
    return placements


def _file_in(directory: str, config: Config, mesh: Mesh) -> Tier:
    from launcher.offload.nvme import NvmeTier

    return NvmeTier(directory, config.aio, rank=mesh.rank)


class _OpenTiers(dict[str, Tier]):
    """Tiers by directory, opened on first access."""

    def __init__(self, tier_at: Callable[[str], Tier]) -> None:
        super().__init__()
        self._tier_at = tier_at

    def __missing__(self, path: str) -> Tier:
        tier = self[path] = self._tier_at(path)
        return tier


def _rooms(
    section: OffloadConfig,
    device: torch.device,
    opened: _OpenTiers,
    in_host: int,
    *,
    share: float = 0.0,
) -> list[TierBudget]:
    """Return the budgets of the tiers, fastest first.

    Args:
        in_host: bytes that stay in host memory if the rest is on NVMe.
        share: fraction of the bytes that stays on the device.
    """
    budgets = []
    if section.device_budget is not None:
        budgets.append(TierBudget(Placement(device), section.device_budget))
    elif share > 0:
        budgets.append(TierBudget(Placement(device), share=share))
    if section.device == "cpu":
        return [*budgets, TierBudget(Placement(HOST))]
    path = str(section.nvme_path)
    if in_host:
        budgets.append(TierBudget(Placement(HOST), in_host))
    return [*budgets, TierBudget(Placement(HOST, opened[path]))]


def _close(tiers: list[Tier]) -> None:
    for tier in tiers:
        tier.close()
