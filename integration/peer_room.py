"""Which GPU's HBM holds the home pages that ``peer_hbm_gib`` asks for, and why none can.

Asked by the worker before it loads, and by ``vamp doctor``. The engine's first process, which must not start
CUDA before it forks, only counts GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from vamp_integration.settings import VampSettings
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.peer import Peer, choose_peer, find_peers

GIB = 2**30


def check_visible(settings: VampSettings, geometry: SlabGeometry, visible: int) -> None:
    """Raise ``ConfigError`` where ``geometry`` has peer homes and ``visible`` counts one GPU or none."""
    if geometry.peer_homes and visible < 2:
        raise ConfigError(shortage(settings.peer_hbm_gib, (), geometry.peer_home_bytes, least=0))


def peer_for(
    settings: VampSettings,
    geometry: SlabGeometry,
    device: int,
    find: Callable[[int, int], tuple[Peer, ...]] = find_peers,
) -> int | None:
    """Ordinal of a GPU with room for the peer homes of ``geometry``; ``None`` where it has none.

    Raises:
        ConfigError: no other GPU is in reach of ``device``, or none has the room.
    """
    needed = geometry.peer_home_bytes
    if not needed:
        return None
    peers = find(device, needed)
    reason = shortage(settings.peer_hbm_gib, peers, needed, geometry.layers * geometry.group_bytes)
    if reason:
        raise ConfigError(reason)
    peer = choose_peer(peers, needed)
    assert peer is not None
    return peer.ordinal


def shortage(asked_gib: float, peers: tuple[Peer, ...], needed: int, least: int) -> str:
    """Why ``peers`` cannot hold ``needed`` bytes, in one line with what would work; empty where one can.

    Args:
        asked_gib: ``peer_hbm_gib``.
        least: bytes below which a peer is of no use: a group of every layer.
    """
    peer = choose_peer(peers, needed)
    if peer is None:
        return f"peer_hbm_gib: {asked_gib:g} needs another GPU, and none is visible and in reach; use 0"
    if peer.room >= needed:
        return ""
    fitting = math.floor(peer.room / GIB * 100) / 100
    return (
        f"peer_hbm_gib: {asked_gib:g} needs {needed / GIB:.2f} GiB of another GPU's HBM, and GPU "
        f"{peer.ordinal} has {peer.room / GIB:.2f} GiB left; "
        f"use {fitting if fitting * GIB >= least else 0:g}, or free its memory"
    )
