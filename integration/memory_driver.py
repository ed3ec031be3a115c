"""The memory driver of an engine: which tiers it offers, and how much of each."""

from __future__ import annotations

import os

import torch

from vamp_integration.peer_room import peer_for
from vamp_integration.plan import granularity
from vamp_integration.settings import VampSettings
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.driver import MemoryDriver, Tier
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.host import HostDriver


def open_driver(settings: VampSettings, geometry: SlabGeometry, device: torch.device) -> MemoryDriver:
    """The driver for a slab of ``geometry`` on ``device``; the caller closes it.

    Raises:
        ConfigError: the GPU or its peer cannot do what the settings ask for, in one line.
    """
    budgets = _budgets(settings, geometry, device)
    if device.type == "cpu":
        return HostDriver(granularity=granularity(settings, "cpu"), budgets=budgets)
    ordinal = device.index or 0
    driver = CudaDriver(
        ordinal,
        peer_for(settings, geometry, ordinal),
        budgets,
        # Commands come between steps, when the current stream is the one that the model runner uses.
        compute_stream=lambda: torch.cuda.current_stream(device).cuda_stream,
    )
    if granularity(settings, "cuda") % driver.granularity:
        raise ConfigError(
            f"granule_kib: {granularity(settings, 'cuda') / 1024:g} is not a multiple of this GPU's "
            f"{driver.granularity >> 10} KiB; use 0 and a hardware profile that fits"
        )
    return driver


def _budgets(settings: VampSettings, geometry: SlabGeometry, device: torch.device) -> dict[Tier, int] | None:
    """Limits of the tiers in bytes; ``None`` leaves each at the machine's memory."""
    if not settings.host_gib:
        return None
    if device.type == "cuda":
        hbm = torch.cuda.get_device_properties(device).total_memory
    else:
        hbm = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    budgets = {Tier.HBM: hbm, Tier.HOST: int(settings.host_gib * 2**30)}
    # The driver tries a page of every tier that it is given.
    return budgets | ({Tier.PEER: geometry.peer_home_bytes} if geometry.peer_homes else {})
