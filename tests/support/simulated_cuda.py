"""As much of ``cuda.bindings.driver`` as the CUDA driver calls, over host memory.

It proves the driver's own logic (what it calls, in which order, and how it undoes a refused call), not
CUDA: that is for the tests in ``tests/gpu``.
"""

from __future__ import annotations

import ctypes
import enum
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vamp_runtime.errors import DriverError
from vamp_runtime.memory import cuda_api
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.host import HostDriver

GRANULARITY = 65536


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_UNKNOWN = 999


def install(monkeypatch: pytest.MonkeyPatch, cuda: SimulatedCuda) -> SimulatedCuda:
    """Let ``cuda`` stand for the bindings, and for the driver's library where they are passed over."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cuda)  # type: ignore[arg-type]
    monkeypatch.setattr(cuda_api, "SHORT_CALLS", {})
    return cuda


def _names(*names: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: SimpleNamespace(name=name, value=i + 1) for i, name in enumerate(names)})


def _location() -> SimpleNamespace:
    return SimpleNamespace(type=None, id=None)


class SimulatedCuda:
    """Two joined GPUs and one NUMA node.

    Args:
        pages: of each GPU, and of the node.

    Attributes:
        refusals: call name -> results of its next calls; ``None`` lets a call through.
        refuse_at: refuse the call that many calls from now, 1 for the next; 0 for none.
        refuse_on: refuse all after it too.
        by_halves: a refused call over several mappings has dealt with the first half of them.
        refused: names of the calls refused at ``refuse_at`` and after.
        zeros: device attributes that read 0.
        log: names of the calls, in order.
        ready: whether events have passed.
        gpus: how many are visible, the first two at most; joined: whether they reach each other.
    """

    CUresult = CUresult
    CUdevice_attribute = _names(
        "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        "CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING",
        "CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    )
    CUmemLocationType = _names("CU_MEM_LOCATION_TYPE_DEVICE", "CU_MEM_LOCATION_TYPE_HOST_NUMA")
    CUmemAllocationType = _names("CU_MEM_ALLOCATION_TYPE_PINNED")
    CUmemAllocationHandleType = _names("CU_MEM_HANDLE_TYPE_NONE")
    CUmemAccess_flags = _names("CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
    CUmemAllocationGranularity_flags = _names("CU_MEM_ALLOC_GRANULARITY_MINIMUM")
    CUstream_flags = _names("CU_STREAM_NON_BLOCKING")
    CUevent_flags = _names("CU_EVENT_DISABLE_TIMING")

    def __init__(self, pages: int = 16) -> None:
        self.host = HostDriver(GRANULARITY, dict.fromkeys(Tier, pages * GRANULARITY))
        self.refusals: dict[str, list[CUresult | None]] = {}
        self.refuse_at = 0
        self.refuse_on = False
        self.by_halves = False
        self.refused: list[str] = []
        self.zeros: set[str] = set()
        self.log: list[str] = []
        self.ready = True
        self.gpus = 2
        self.joined = True
        self.depth = 0  # contexts pushed
        self.retained = 0
        self.events = 0

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(type=None, requestedHandleTypes=None, location=_location())

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace(flags=None, location=_location())

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        call = object.__getattribute__(self, "_" + name)

        def checked(*args: Any) -> tuple[Any, ...]:
            self.log.append(name)
            refusal = self.refusals[name].pop(0) if self.refusals.get(name) else self._due(name)
            if refusal is not None:
                if self.by_halves and name in ("cuMemUnmap", "cuMemSetAccess"):
                    self._half(call, *args)
                return (refusal, None)
            try:
                result = call(*args)
            except DriverError:
                return (CUresult.CUDA_ERROR_INVALID_VALUE, None)
            if isinstance(result, CUresult):
                return (result,)
            return (CUresult.CUDA_SUCCESS, *(result if isinstance(result, tuple) else (result,)))

        return checked

    def _cuInit(self, flags: int) -> tuple[()]:
        return ()

    def _cuDriverGetVersion(self) -> int:
        return 13020

    def _cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"Simulated" + bytes(length - 9)

    def _cuMemGetInfo(self) -> tuple[int, int]:
        return (12 * GRANULARITY, 16 * GRANULARITY)

    def _cuDeviceGetCount(self) -> int:
        return self.gpus

    def _cuDeviceGet(self, ordinal: int) -> Any:
        return ordinal if ordinal in range(self.gpus) else CUresult.CUDA_ERROR_INVALID_DEVICE

    def _cuDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        return 0 if attribute.name in self.zeros else 1

    def _cuDeviceCanAccessPeer(self, device: int, peer: int) -> int:
        return int(device != peer and self.joined)

    def _cuDevicePrimaryCtxRetain(self, device: int) -> object:
        self.retained += 1
        return object()

    def _cuDevicePrimaryCtxRelease(self, device: int) -> tuple[()]:
        self.retained -= 1
        return ()

    def _cuCtxPushCurrent(self, context: object) -> tuple[()]:
        self.depth += 1
        return ()

    def _cuCtxSetCurrent(self, context: object) -> tuple[()]:
        assert self.retained
        return ()

    def _cuCtxPopCurrent(self) -> object:
        self.depth -= 1
        return object()

    def _cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        return (0, -5)

    def _cuStreamCreateWithPriority(self, flags: int, priority: int) -> str:
        assert (flags, priority) == (1, 0)
        return "stream"

    def _cuStreamSynchronize(self, stream: str) -> tuple[()]:
        return ()

    def _cuStreamDestroy(self, stream: str) -> tuple[()]:
        return ()

    def _cuMemGetAllocationGranularity(self, prop: SimpleNamespace, option: Any) -> int:
        return GRANULARITY // 2 if self._tier(prop.location) is Tier.HOST else GRANULARITY

    def _cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> int:
        return self.host.reserve(nbytes)

    def _cuMemAddressFree(self, address: int, nbytes: int) -> tuple[()]:
        self.host.free(address, nbytes)
        return ()

    def _cuMemCreate(self, nbytes: int, prop: SimpleNamespace, flags: int) -> Any:
        handle = self.host.create(nbytes, self._tier(prop.location))
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY if handle is None else handle

    def _cuMemRelease(self, handle: int) -> tuple[()]:
        self.host.release(handle)
        return ()

    def _cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[()]:
        assert offset == 0
        self.host.map(address, handle)
        return ()

    def _cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> tuple[()]:
        places = [descriptor.location.type.name for descriptor in access]
        self._one_tier(address, nbytes)
        assert count == len(access)
        assert places == ["CU_MEM_LOCATION_TYPE_DEVICE"]
        self.host.set_access(address, nbytes)
        return ()

    def _cuMemUnmap(self, address: int, nbytes: int) -> tuple[()]:
        self._one_tier(address, nbytes)
        self.host.unmap(address, nbytes)
        return ()

    def _cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: str) -> tuple[()]:
        self._one_tier(target, nbytes)
        self._one_tier(source, nbytes)
        ctypes.memmove(target, source, nbytes)
        return ()

    def _cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: str) -> tuple[()]:
        self._one_tier(address, nbytes)
        ctypes.memset(address, value, nbytes)
        return ()

    def _cuEventCreate(self, flags: int) -> object:
        self.events += 1
        return object()

    def _cuEventRecord(self, event: object, stream: int) -> tuple[()]:
        return ()

    def _cuEventQuery(self, event: object) -> CUresult:
        return CUresult.CUDA_SUCCESS if self.ready else CUresult.CUDA_ERROR_NOT_READY

    def _cuEventSynchronize(self, event: object) -> tuple[()]:
        self.ready = True
        return ()

    def _cuEventDestroy(self, event: object) -> tuple[()]:
        self.events -= 1
        return ()

    def _due(self, name: str) -> CUresult | None:
        """The refusal that ``refuse_at`` asks for, if it is this call's."""
        if self.refuse_at:
            self.refuse_at -= 1
            if not self.refuse_at:
                self.refused.append(name)
                self.refuse_at = int(self.refuse_on)
                return CUresult.CUDA_ERROR_UNKNOWN
        return None

    def _half(self, call: Callable[..., object], address: int, nbytes: int, *rest: Any) -> None:
        found = self.host._space.mappings(address, nbytes)
        done = found[: len(found) // 2]
        if done:
            call(address, sum(mapping.nbytes for mapping in done), *rest)

    def _one_tier(self, address: int, nbytes: int) -> None:
        if self.host._space.seams(address, nbytes):
            raise DriverError("range", "holds two kinds of memory")

    def _tier(self, location: SimpleNamespace) -> Tier:
        if location.type is self.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA:
            return Tier.HOST
        return Tier.PEER if location.id == 1 else Tier.HBM
