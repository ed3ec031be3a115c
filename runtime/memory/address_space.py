"""What a driver has reserved, created and mapped: pure bookkeeping that both drivers check calls against.

A refused call must change nothing, and a CUDA context does not survive every bad call, so the rules are
checked here before any of them reaches the operating system or the GPU.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from vamp_runtime.errors import ConfigError, DriverError
from vamp_runtime.memory.driver import DriverUsage, Tier


@dataclass(frozen=True)
class Handle:
    """Physical memory of one tier; ``raw`` is the driver's own value (CUDA handle, or memfd offset)."""

    nbytes: int
    tier: Tier
    raw: int


@dataclass(frozen=True)
class Mapping:
    """One whole handle behind ``[address, address + nbytes)``."""

    address: int
    nbytes: int
    handle: int


def check_budgets(budgets: MappingOf[Tier, int]) -> None:
    """Raise ``ConfigError`` unless ``budgets`` offers a tier, and none of them less than nothing."""
    if not budgets:
        raise ConfigError("budgets={} offers no tier; name at least the bytes of the hbm tier")
    for tier, budget in budgets.items():
        if budget < 0:
            raise ConfigError(f"budget of tier {tier.value}={budget} is negative; use 0 or more bytes")


class AddressSpace:
    """Reservations, handles, mappings and access. ``check_*`` raise ``DriverError`` and change nothing."""

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.reservations: dict[int, int] = {}
        self.handles: dict[int, Handle] = {}
        self._bases: list[int] = []
        self._mappings: dict[int, Mapping] = {}
        self._starts: list[int] = []
        self._accessible: set[int] = set()
        self._uses: dict[int, int] = {}
        self._next_handle = 1

    def check_size(self, call: str, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % self.granularity:
            raise DriverError(call, f"{nbytes} bytes is not a positive multiple of {self.granularity}")

    def add_reservation(self, address: int, nbytes: int) -> None:
        assert address % self.granularity == 0 and address not in self.reservations
        self.reservations[address] = nbytes
        insort(self._bases, address)

    def check_free(self, address: int, nbytes: int) -> None:
        if self.reservations.get(address) != nbytes:
            raise DriverError("free", f"{nbytes} bytes at {address:#x} is not one reservation")
        if self.mappings(address, nbytes):
            raise DriverError("free", f"the reservation at {address:#x} still has mappings")

    def drop_reservation(self, address: int) -> None:
        del self.reservations[address]
        del self._bases[bisect_left(self._bases, address)]

    def add_handle(self, handle: Handle) -> int:
        """Number of a new handle; numbers are never used twice."""
        number = self._next_handle
        self._next_handle += 1
        self.handles[number] = handle
        self._uses[number] = 0
        return number

    def check_release(self, handle: int) -> Handle:
        found = self._handle("release", handle)
        if self._uses[handle]:
            raise DriverError("release", f"handle {handle} is mapped {self._uses[handle]} time(s)")
        return found

    def drop_handle(self, handle: int) -> None:
        assert self._uses[handle] == 0
        del self.handles[handle], self._uses[handle]

    def check_map(self, address: int, handles: Sequence[int]) -> list[Mapping]:
        """The mappings that ``handles`` one behind the other make from ``address`` on."""
        sizes = [self._handle("map", handle).nbytes for handle in handles]
        if not sizes or address % self.granularity:
            raise DriverError("map", f"{len(sizes)} handles at {address:#x}, granularity {self.granularity}")
        nbytes = sum(sizes)
        self._check_reserved("map", address, nbytes)
        if self.mappings(address, nbytes):
            raise DriverError("map", f"part of {nbytes} bytes at {address:#x} is backed already")
        starts = accumulate(sizes[:-1], initial=address)
        return [Mapping(*each) for each in zip(starts, sizes, handles, strict=True)]

    def add_mappings(self, found: list[Mapping]) -> None:
        """Enter neighbouring mappings, as ``check_map`` returned them."""
        first = bisect_left(self._starts, found[0].address)
        self._starts[first:first] = [mapping.address for mapping in found]
        for mapping in found:
            assert mapping.address not in self._mappings
            self._mappings[mapping.address] = mapping
            self._uses[mapping.handle] += 1

    def drop_mappings(self, found: Sequence[Mapping]) -> None:
        """Forget neighbouring mappings, as ``check_whole`` returned them, and their access."""
        first = bisect_left(self._starts, found[0].address)
        assert self._starts[first : first + len(found)] == [mapping.address for mapping in found]
        del self._starts[first : first + len(found)]
        for mapping in found:
            del self._mappings[mapping.address]
            self._accessible.discard(mapping.address)
            self._uses[mapping.handle] -= 1
            assert self._uses[mapping.handle] >= 0

    def mappings(self, address: int, nbytes: int) -> list[Mapping]:
        """Mappings that touch a range, by address."""
        first = max(bisect_right(self._starts, address) - 1, 0)
        last = bisect_left(self._starts, address + nbytes)
        found = [self._mappings[start] for start in self._starts[first:last]]
        return [mapping for mapping in found if mapping.address + mapping.nbytes > address]

    def check_whole(self, call: str, address: int, nbytes: int) -> list[Mapping]:
        """The mappings of a range that has no gap and cuts none of them."""
        self.check_size(call, nbytes)
        found = self._check_backed(call, address, nbytes)
        if found[0].address != address or found[-1].address + found[-1].nbytes != address + nbytes:
            raise DriverError(call, f"{nbytes} bytes at {address:#x} cuts a mapping")
        return found

    def grant(self, found: list[Mapping]) -> None:
        self._accessible.update(mapping.address for mapping in found)

    def accessible(self, mapping: Mapping) -> bool:
        return mapping.address in self._accessible

    def check_accessible(self, call: str, address: int, nbytes: int) -> list[Mapping]:
        """The mappings behind any range of bytes, all of them backed and accessible."""
        if nbytes <= 0:
            raise DriverError(call, f"{nbytes} bytes is not a size")
        found = self._check_backed(call, address, nbytes)
        closed = next((mapping for mapping in found if not self.accessible(mapping)), None)
        if closed is not None:
            raise DriverError(call, f"no access to the mapping at {closed.address:#x}")
        return found

    def check_copy(self, target: int, source: int, nbytes: int) -> list[Mapping]:
        """The mappings of two accessible ranges that do not overlap."""
        found = self.check_accessible("copy", target, nbytes) + self.check_accessible("copy", source, nbytes)
        if abs(target - source) < nbytes:
            raise DriverError("copy", f"{nbytes} bytes at {target:#x} and {source:#x} overlap")
        return found

    def runs(self, found: Sequence[Mapping]) -> list[list[Mapping]]:
        """Neighbouring mappings cut where memory of another tier begins: what one call may span."""
        return [list(run) for _, run in groupby(found, lambda mapping: self.handles[mapping.handle].tier)]

    def seams(self, address: int, nbytes: int) -> list[int]:
        """Offsets inside a fully mapped range at which memory of another tier begins."""
        return [run[0].address - address for run in self.runs(self.mappings(address, nbytes))[1:]]

    def tier_at(self, address: int) -> Tier:
        """Tier of the memory behind one mapped address."""
        return self.handles[self.mappings(address, 1)[0].handle].tier

    def usage(self) -> DriverUsage:
        tier_bytes: dict[Tier, int] = {}
        for handle in self.handles.values():
            tier_bytes[handle.tier] = tier_bytes.get(handle.tier, 0) + handle.nbytes
        return DriverUsage(len(self.reservations), len(self._mappings), len(self.handles), tier_bytes)

    def _handle(self, call: str, handle: int) -> Handle:
        found = self.handles.get(handle)
        if found is None:
            raise DriverError(call, f"no handle {handle}")
        return found

    def _check_reserved(self, call: str, address: int, nbytes: int) -> None:
        index = bisect_right(self._bases, address) - 1
        base = self._bases[index] if index >= 0 else address + 1
        if base > address or address + nbytes > base + self.reservations[base]:
            raise DriverError(call, f"{nbytes} bytes at {address:#x} lies in no reservation")

    def _check_backed(self, call: str, address: int, nbytes: int) -> list[Mapping]:
        self._check_reserved(call, address, nbytes)
        found = self.mappings(address, nbytes)
        reached = address
        for mapping in found:
            if mapping.address > reached:
                break
            reached = mapping.address + mapping.nbytes
        if reached < address + nbytes:
            raise DriverError(call, f"nothing is mapped at {reached:#x}")
        return found
