"""Whether the host can hold the home pages that the settings ask for. Asked before anything is loaded, by the
worker with the real sizes, and by ``vamp doctor``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from vamp_integration.settings import VampSettings
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.host_memory import HostMemory, Room, read_host_memory, room_for, try_allocation

# vLLM builds an engine's configuration more than once; the same question is answered once.
_trial = functools.cache(try_allocation)


def fitting_ratio(geometry: SlabGeometry, room: int) -> float:
    """The largest ``max_offload_ratio``, in hundredths, whose homes of one rank fit into ``room`` bytes."""
    on_host = room // (geometry.layers * geometry.group_bytes)
    slots = min(on_host + geometry.peer_homes, geometry.movable_groups)
    levels = max(0, slots - geometry.spare_homes)
    return math.floor(100 * levels * geometry.group / geometry.experts) / 100


def check_homes(
    settings: VampSettings,
    geometry: SlabGeometry,
    ranks: int,
    memory: HostMemory | None = None,
    trial: Callable[[int], int] = _trial,
    beside: int = 0,
) -> Room:
    """Room for the home pages of ``ranks`` ranks of this host, none of which has any yet.

    Args:
        memory: default: as read now.
        beside: bytes that vLLM's KV offloading will take of the same host memory.

    Raises:
        ConfigError: ``host_gib`` or the host has less; one line with a ratio that would fit.
    """
    each = geometry.host_home_bytes
    limit = int(settings.host_gib * 2**30)
    if settings.host_gib and each > limit:
        raise ConfigError(
            f"host_gib: {settings.host_gib:g} is less than the {_gib(each)} of home pages of a rank at "
            f"max_offload_ratio {settings.max_offload_ratio:g}; use {math.ceil(each / 2**28) / 4:g}, or "
            f"max_offload_ratio {fitting_ratio(geometry, limit):g}"
        )
    needed = each * ranks
    beside = beside if needed else 0  # without homes, it is vLLM's to say what does not fit
    room = room_for(needed + beside, memory or read_host_memory(), trial)
    if room.nbytes < needed + beside:
        also = f" beside {_gib(beside)} of KV offloading" if beside else ""
        less = ", a smaller --kv-offloading-size" if beside else ""
        left = max(0, room.nbytes - beside)
        raise ConfigError(
            f"max_offload_ratio: {settings.max_offload_ratio:g} needs {_gib(needed)} of host memory for home "
            f"pages{also}, and {room.source} leaves {_gib(room.nbytes)}; "
            f"use {fitting_ratio(geometry, left // ranks):g}{less}, or give the host more"
        )
    return room


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
