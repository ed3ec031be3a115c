"""Checked calls into the CUDA driver on one device's primary context, beside torch."""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vamp_runtime.errors import ConfigError, DriverError, StateLost
from vamp_runtime.memory.driver import Tier

_DEVICE_NEEDS = (
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING",
)
_HOST_NEEDS = "CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
#: Calls of a microsecond or two, with the number of their arguments, all of 64 bits. cuda.bindings gives the
#: interpreter lock away in every call, and beside a busy thread of steps it comes back only after a switch
#: interval, fifty times as long as the call. So these keep the lock.
SHORT_CALLS = {"cuMemMap": 5}


class CudaApi:
    """``cuda.bindings.driver`` with the context set and every result checked.

    The context is pushed and popped around each call, so that a call works on any thread and leaves the
    thread's own current context as it was.

    Args:
        device: CUDA ordinal.

    Raises:
        ConfigError: cuda-bindings or the GPU driver is missing, or there is no such device.
    """

    def __init__(self, device: int) -> None:
        try:
            self.driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise ConfigError(f"driver=cuda needs cuda-bindings: {error}; install vamp-moe[gpu]") from error
        try:
            self.plain("cuInit", 0)
            self.device = self.plain("cuDeviceGet", device)
            self._context = self.plain("cuDevicePrimaryCtxRetain", self.device)
        except RuntimeError as error:  # a DriverError, or libcuda is not installed
            raise ConfigError(f"device={device} cannot be used ({error}); use a visible CUDA GPU") from error
        self.ordinal = device
        self._bound: set[int] = set()
        self._short = short_calls()

    def plain(self, name: str, *args: object) -> Any:
        """Call without a context; its one result, or ``None``, or a tuple. Raises ``DriverError``."""
        error, *results = getattr(self.driver, name)(*args)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise DriverError(name, error.name)
        return results[0] if len(results) == 1 else tuple(results) or None

    def bind_thread(self) -> None:
        """Make the context current on this thread for good: its calls then need not push and pop it."""
        self.plain("cuCtxSetCurrent", self._context)
        self._bound.add(threading.get_ident())

    def call(self, name: str, *args: object) -> Any:
        """``plain``, with the device's primary context current."""
        with self.held():
            return self.plain(name, *args)

    def quick(self, name: str, *args: int) -> None:
        """``call`` for one of ``SHORT_CALLS``, without giving the interpreter lock away."""
        short = self._short.get(name)
        if short is None:
            self.call(name, *args)
            return
        with self.held():
            error = short(*args)
        if error:
            raise DriverError(name, self.driver.CUresult(error).name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the context current on this thread, so that the calls inside need not push and pop it each.

        Raises:
            StateLost: the thread's own context could not be brought back.
        """
        thread = threading.get_ident()
        if thread in self._bound:
            yield
            return
        self.plain("cuCtxPushCurrent", self._context)
        self._bound.add(thread)
        try:
            yield
        finally:
            self._bound.remove(thread)
            try:
                self.plain("cuCtxPopCurrent")
            except DriverError as error:
                raise StateLost(f"the context of a thread is not restored: {error}") from error

    def attribute(self, name: str) -> int:
        return int(
            self.plain("cuDeviceGetAttribute", getattr(self.driver.CUdevice_attribute, name), self.device)
        )

    def close(self) -> None:
        self.plain("cuDevicePrimaryCtxRelease", self.device)


def short_calls() -> dict[str, Callable[..., int]]:
    """``SHORT_CALLS`` in the driver's library; none where it goes by another name."""
    found: dict[str, Callable[..., int]] = {}
    try:
        library = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return found
    for name, arguments in SHORT_CALLS.items():
        call = getattr(library, name)
        call.argtypes = [ctypes.c_uint64] * arguments
        found[name] = call
    return found


def require_tiers(api: CudaApi, tiers: frozenset[Tier], peer: int | None) -> None:
    """Raise ``ConfigError`` where the device lacks what the tiers need."""
    for name in (*_DEVICE_NEEDS, *([_HOST_NEEDS] if Tier.HOST in tiers else [])):
        if not api.attribute(name):
            instead = "use budgets without the host tier" if name == _HOST_NEEDS else "use another GPU"
            raise ConfigError(f"device={api.ordinal}: {name} is 0; {instead}")
    if Tier.PEER not in tiers:
        return
    if peer is None or peer == api.ordinal:
        raise ConfigError(f"peer={peer} cannot serve the peer tier; use another GPU than {api.ordinal}")
    try:
        other = api.plain("cuDeviceGet", peer)
    except DriverError as error:
        raise ConfigError(f"peer={peer} cannot be used ({error}); use a visible CUDA GPU") from error
    if not api.plain("cuDeviceCanAccessPeer", api.device, other):
        raise ConfigError(f"peer={peer} is out of reach of device {api.ordinal}; use a GPU joined to it")


def allocation_prop(api: CudaApi, tier: Tier, peer: int | None) -> Any:
    """What ``cuMemCreate`` is told for a tier: pinned memory of the device, its peer, or its NUMA node."""
    kinds = api.driver.CUmemLocationType
    prop = api.driver.CUmemAllocationProp()
    prop.type = api.driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = api.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    if tier is Tier.HOST:
        prop.location.type = kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA
        prop.location.id = max(api.attribute("CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID"), 0)  # -1: one node only
    else:
        prop.location.type = kinds.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = peer if tier is Tier.PEER else api.ordinal
    return prop


def access_list(api: CudaApi) -> list[Any]:
    """Who may touch a mapping: the device alone, which also makes every copy.

    Access for the CPU would make granting access to host pages several times as slow.
    """
    descriptor = api.driver.CUmemAccessDesc()
    descriptor.location.type = api.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    descriptor.location.id = api.ordinal
    descriptor.flags = api.driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return [descriptor]
