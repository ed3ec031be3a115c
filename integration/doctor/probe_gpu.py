"""Asks a GPU's driver what it can do, tries it on a few pages, and times a copy over the link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from vamp_integration.doctor.facts import Gpu
from vamp_runtime.errors import ConfigError, DriverError
from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.cuda_api import CudaApi
from vamp_runtime.memory.driver import MemoryDriver, Tier
from vamp_runtime.memory.peer import find_peers

# Large enough that the start of a copy does not count: an H200 reaches its full rate from 228 MiB up.
COPY_BYTES = 256 << 20
COPIES = 5

_VMM = "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
_HOST_VMM = "CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
_NODE = "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID"
_CAPABILITY = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_"


def probe_gpu(device: int, copy_bytes: int = COPY_BYTES, peer_bytes: int = 0) -> tuple[Gpu, tuple[int, int]]:
    """The GPU, with its peers' room for ``peer_bytes``, and the CUDA version of its driver.

    Raises ``ConfigError`` where there is no driver, no cuda-bindings, or no such GPU.
    """
    api = CudaApi(device)
    try:
        version = int(api.plain("cuDriverGetVersion"))
        gpu = _describe(api)
    finally:
        api.close()
    if gpu.vmm and gpu.host_vmm:
        gpu = replace(_try(gpu, device, copy_bytes), peers=find_peers(device, peer_bytes))
    return gpu, (version // 1000, version % 1000 // 10)


def _describe(api: CudaApi) -> Gpu:
    free, total = api.call("cuMemGetInfo")
    return Gpu(
        name=api.plain("cuDeviceGetName", 128, api.device).split(b"\0")[0].decode(),
        capability=(api.attribute(f"{_CAPABILITY}MAJOR"), api.attribute(f"{_CAPABILITY}MINOR")),
        total=int(total),
        free=int(free),
        vmm=bool(api.attribute(_VMM)),
        host_vmm=bool(api.attribute(_HOST_VMM)),
        numa_node=api.attribute(_NODE),
        nodes=tuple(_nodes(api)),
    )


def _nodes(api: CudaApi) -> Iterator[int]:
    """NUMA node of every visible GPU; needs no context on them."""
    attribute = getattr(api.driver.CUdevice_attribute, _NODE)
    for ordinal in range(api.plain("cuDeviceGetCount")):
        yield int(api.plain("cuDeviceGetAttribute", attribute, api.plain("cuDeviceGet", ordinal)))


def _try(gpu: Gpu, device: int, copy_bytes: int) -> Gpu:
    """``gpu`` with what a driver of VAMP's own makes of it."""
    try:
        driver = CudaDriver(device)  # maps, uses and gives back a page of each tier
    except ConfigError as error:
        return replace(gpu, trial=str(error))
    try:
        return replace(gpu, granularity=driver.granularity, host_to_device=copy_rate(driver, copy_bytes))
    except DriverError as error:
        return replace(gpu, granularity=driver.granularity, trial=str(error))
    finally:
        driver.close()


def copy_rate(driver: MemoryDriver, nbytes: int) -> float | None:
    """Fastest of a few copies of ``nbytes`` from HOST to HBM, B/s; ``None`` where a tier has no room.

    What it maps is given back when the driver is closed.
    """
    handles = [driver.create(nbytes, tier) for tier in (Tier.HOST, Tier.HBM)]
    base = driver.reserve(2 * nbytes)
    for place, handle in enumerate(handles):
        if handle is None:
            return None
        driver.map(base + place * nbytes, handle)
        driver.set_access(base + place * nbytes, nbytes)
    seconds = []
    driver.zero(base, nbytes)
    for _ in range(1 + COPIES):  # the first one warms up
        driver.synchronize()
        started = time.perf_counter()
        driver.copy(base + nbytes, base, nbytes)
        driver.synchronize()
        seconds.append(time.perf_counter() - started)
    return nbytes / min(seconds[1:])
