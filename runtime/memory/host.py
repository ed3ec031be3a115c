"""The memory driver of a machine without a GPU: real pages, real remaps, real faults.

A tier is a memfd, a handle a run of it, a reservation an inaccessible anonymous mapping, and ``map`` lays
the run over reserved addresses. Nothing is emulated: an unbacked address faults, and the memory of a
released handle goes back to the system.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Mapping as MappingOf
from typing import NoReturn

from vamp_runtime.errors import ConfigError, DriverError, StateLost
from vamp_runtime.memory.address_space import AddressSpace, Handle, Mapping, check_budgets
from vamp_runtime.memory.driver import DriverUsage, Tier
from vamp_runtime.memory.host_pool import HostPool

_PROT_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10  # these two: asm-generic/mman.h, absent from the mmap module
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, number, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    libc.munmap.argtypes = [pointer, size]
    libc.mprotect.argtypes = [pointer, size, number]
    libc.fallocate.argtypes = [number, number, ctypes.c_int64, ctypes.c_int64]
    return libc


def _errno_name() -> str:
    return errno.errorcode.get(ctypes.get_errno(), "unknown error")


class HostDriver:
    """``MemoryDriver`` on memfd and mmap. For one thread at a time; copies are done when the call returns.

    Args:
        granularity: bytes; a multiple of the system's page size.
        budgets: bytes of each tier the driver offers, rounded down to the granularity. Default: HBM and
            HOST, each as large as the machine's memory.

    Raises:
        ConfigError: the granularity is no multiple of the page size, or a budget is negative.
    """

    def __init__(self, granularity: int = 65536, budgets: MappingOf[Tier, int] | None = None) -> None:
        page = mmap.PAGESIZE
        if granularity <= 0 or granularity % page:
            fit = max(granularity // page, 1) * page
            raise ConfigError(f"granularity={granularity} is not a multiple of the page size; use {fit}")
        if budgets is None:
            budgets = dict.fromkeys((Tier.HBM, Tier.HOST), os.sysconf("SC_PHYS_PAGES") * page)
        check_budgets(budgets)
        self._libc = _load_libc()
        self._space = AddressSpace(granularity)
        self._pools: dict[Tier, HostPool] = {}
        for tier, budget in budgets.items():
            self._pools[tier] = HostPool(self._libc, f"vamp-{tier.value}", budget - budget % granularity)

    @property
    def granularity(self) -> int:
        return self._space.granularity

    @property
    def tiers(self) -> frozenset[Tier]:
        return frozenset(self._pools)

    def bind_thread(self) -> None:
        pass  # any thread can call the kernel

    def reserve(self, nbytes: int) -> int:
        self._space.check_size("reserve", nbytes)
        if not self._pools:
            raise DriverError("reserve", "the driver is closed")
        slack = self.granularity - mmap.PAGESIZE
        found = self._libc.mmap(None, nbytes + slack, _PROT_NONE, _RESERVED, -1, 0)
        if found == _MAP_FAILED:
            raise DriverError("reserve", _errno_name())
        address = -(-found // self.granularity) * self.granularity
        for start, length in ((found, address - found), (address + nbytes, found + slack - address)):
            if length and self._libc.munmap(start, length):
                name = _errno_name()
                self._libc.munmap(found, nbytes + slack)
                raise DriverError("reserve", name)
        self._space.add_reservation(address, nbytes)
        return int(address)

    def free(self, address: int, nbytes: int) -> None:
        self._space.check_free(address, nbytes)
        if self._libc.munmap(address, nbytes):
            raise DriverError("free", _errno_name())
        self._space.drop_reservation(address)

    def create(self, nbytes: int, tier: Tier) -> int | None:
        self._space.check_size("create", nbytes)
        if tier not in self._pools:
            raise DriverError("create", f"this driver has no tier {tier.value}")
        offset = self._pools[tier].take(nbytes)
        return None if offset is None else self._space.add_handle(Handle(nbytes, tier, offset))

    def release(self, handle: int) -> None:
        found = self._space.check_release(handle)
        self._pools[found.tier].give(found.raw, found.nbytes)
        self._space.drop_handle(handle)

    def map(self, address: int, *handles: int) -> None:
        found = self._space.check_map(address, handles)
        for mapping in found:
            if not self._lay(mapping, _PROT_NONE):
                name = _errno_name()
                # A failed MAP_FIXED may leave a hole, which another thread's mmap could take.
                if not self._cover(address, mapping.address + mapping.nbytes - address):
                    raise StateLost(f"map: {name}, and the reservation at {address:#x} is not restored")
                raise DriverError("map", name)
        self._space.add_mappings(found)

    def set_access(self, address: int, nbytes: int) -> None:
        found = self._space.check_whole("set_access", address, nbytes)
        if self._libc.mprotect(address, nbytes, _READ_WRITE):
            self._restore("set_access", found)
        self._space.grant(found)

    def unmap(self, address: int, nbytes: int) -> None:
        found = self._space.check_whole("unmap", address, nbytes)
        if not self._cover(address, nbytes):
            self._restore("unmap", found)
        self._space.drop_mappings(found)

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        self._space.check_copy(target, source, nbytes)
        ctypes.memmove(target, source, nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        self._space.check_accessible("zero", address, nbytes)
        ctypes.memset(address, 0, nbytes)

    def synchronize(self) -> None:
        """Nothing to wait for: copies and zeroing are done when they return."""

    def mark(self) -> object:
        """Work on a host is done when its call returns, so every mark has passed."""
        return object()

    def passed(self, mark: object) -> bool:
        return True

    def wait(self, mark: object) -> None:
        """Every mark has passed."""

    def read(self, address: int, nbytes: int) -> bytes:
        self._space.check_accessible("read", address, nbytes)
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        self._space.check_accessible("write", address, len(data))
        ctypes.memmove(address, data, len(data))

    def usage(self) -> DriverUsage:
        return self._space.usage()

    def close(self) -> None:
        for address, nbytes in self._space.reservations.items():
            if self._libc.munmap(address, nbytes):
                raise StateLost(f"close: {_errno_name()} for {nbytes} bytes at {address:#x}")
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._space = AddressSpace(self.granularity)

    def _lay(self, mapping: Mapping, protection: int) -> bool:
        """Put a handle's run behind addresses; False where the system refuses."""
        handle = self._space.handles[mapping.handle]
        flags, fd = mmap.MAP_SHARED | _MAP_FIXED, self._pools[handle.tier].fd
        done = self._libc.mmap(mapping.address, mapping.nbytes, protection, flags, fd, handle.raw)
        return bool(done != _MAP_FAILED)

    def _cover(self, address: int, nbytes: int) -> bool:
        """Turn a range back into a bare reservation; False where the system refuses."""
        done = self._libc.mmap(address, nbytes, _PROT_NONE, _RESERVED | _MAP_FIXED, -1, 0)
        return bool(done != _MAP_FAILED)

    def _restore(self, call: str, found: list[Mapping]) -> NoReturn:
        """Bring mappings back to what the bookkeeping says after ``call`` was refused half-way."""
        name = _errno_name()
        for mapping in found:
            if not self._lay(mapping, _READ_WRITE if self._space.accessible(mapping) else _PROT_NONE):
                raise StateLost(f"{call}: {name}, and the mapping at {mapping.address:#x} is not restored")
        raise DriverError(call, name)
