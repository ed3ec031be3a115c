"""Other GPUs whose HBM this one's kernels can read: which are in reach, and how much of it can be had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vamp_runtime.errors import ConfigError, DriverError
from vamp_runtime.memory.cuda_api import CudaApi, allocation_prop
from vamp_runtime.memory.driver import Tier

# What is left over is looked for in steps of this.
STEP_BYTES = 1 << 28


@dataclass(frozen=True)
class Peer:
    """A GPU in reach. ``room`` is what could be had of the bytes that were asked for."""

    ordinal: int
    room: int


def find_peers(device: int, nbytes: int) -> tuple[Peer, ...]:
    """Every GPU that ``device`` can reach, with its room for ``nbytes``, tried and given back.

    Needs no context on the peers, which would take memory of theirs. With 0 bytes nothing is tried.

    Raises:
        ConfigError: cuda-bindings, the GPU driver or the device is missing, or a peer failed the trial.
    """
    api = CudaApi(device)
    try:
        return tuple(Peer(ordinal, _room(api, ordinal, nbytes)) for ordinal in _reachable(api))
    finally:
        api.close()


def choose_peer(peers: tuple[Peer, ...], nbytes: int) -> Peer | None:
    """The first that has room for ``nbytes``, or that with the most; ``None`` where there is none."""
    return max(peers, key=lambda peer: (min(peer.room, nbytes), -peer.ordinal), default=None)


def _reachable(api: CudaApi) -> Iterator[int]:
    for ordinal in range(api.plain("cuDeviceGetCount")):
        if ordinal == api.ordinal:
            continue
        if api.plain("cuDeviceCanAccessPeer", api.device, api.plain("cuDeviceGet", ordinal)):
            yield ordinal


def _room(api: CudaApi, ordinal: int, nbytes: int) -> int:
    """Bytes of ``nbytes`` that a trial gets from the peer, to a step of ``STEP_BYTES``."""
    if not nbytes or _fits(api, ordinal, nbytes):
        return nbytes
    fits, too_many = 0, -(-nbytes // STEP_BYTES)  # in steps
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if _fits(api, ordinal, middle * STEP_BYTES) else (fits, middle)
    return fits * STEP_BYTES


def _fits(api: CudaApi, ordinal: int, nbytes: int) -> bool:
    prop = allocation_prop(api, Tier.PEER, ordinal)
    minimum = api.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granule = int(api.call("cuMemGetAllocationGranularity", prop, minimum))
    try:
        handle = api.call("cuMemCreate", -(-nbytes // granule) * granule, prop, 0)
    except DriverError as error:
        if error.detail == "CUDA_ERROR_OUT_OF_MEMORY":
            return False
        raise ConfigError(
            f"peer_hbm_gib: GPU {ordinal} failed a trial allocation ({error}); use 0"
        ) from error
    api.call("cuMemRelease", handle)
    return True
