"""The host driver against a model of a few dictionaries, over random sequences of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vamp_runtime.errors import DriverError
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.host import HostDriver

PAGE = 4096
ROOM = {Tier.HBM: 6, Tier.HOST: 4}
LENGTH = 8

Sizes = st.integers(1, 3)
Places = st.integers(0, LENGTH - 1)
Picks = st.integers(0, 5)


class HostDriverMachine(RuleBasedStateMachine):
    """Two reservations of ``LENGTH`` pages; pages are (reservation, index) and hold one byte value each."""

    @initialize()
    def start(self) -> None:
        self.driver = HostDriver(PAGE, {tier: pages * PAGE for tier, pages in ROOM.items()})
        self.bases = [self.driver.reserve(LENGTH * PAGE) for _ in range(2)]
        self.handles: dict[int, tuple[Tier, list[int]]] = {}  # handle -> tier, value of each page
        self.mapped: dict[tuple[int, int], int] = {}  # first page -> handle
        self.open: set[tuple[int, int]] = set()  # first pages of accessible mappings

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.close()

    def pages(self, start: tuple[int, int]) -> list[tuple[int, int]]:
        base, first = start
        return [(base, first + i) for i in range(len(self.handles[self.mapped[start]][1]))]

    def whole(self, base: int, first: int, length: int) -> list[tuple[int, int]] | None:
        """The mappings that make up a range exactly, or ``None``."""
        starts, page = [], first
        while page < first + length:
            if (base, page) not in self.mapped:
                return None
            starts.append((base, page))
            page += len(self.pages((base, page)))
        return starts if page == first + length else None

    def attempt(self, allowed: bool, call: str, *args: int) -> bool:
        if not allowed:
            with pytest.raises(DriverError):
                getattr(self.driver, call)(*args)
            return False
        getattr(self.driver, call)(*args)
        return True

    @rule(pages=Sizes, tier=st.sampled_from(list(ROOM)))
    def create(self, pages: int, tier: Tier) -> None:
        held = sum(len(values) for place, values in self.handles.values() if place is tier)
        handle = self.driver.create(pages * PAGE, tier)
        if handle is None:
            assert held + pages > ROOM[tier] or held > 0, "an empty tier has one free run"
        else:
            assert handle not in self.handles and held + pages <= ROOM[tier]
            self.handles[handle] = (tier, [0] * pages)

    @rule(pick=Picks)
    def release(self, pick: int) -> None:
        if self.handles:
            handle = sorted(self.handles)[pick % len(self.handles)]
            if self.attempt(handle not in self.mapped.values(), "release", handle):
                del self.handles[handle]

    @rule(pick=Picks, base=st.integers(0, 1), first=Places)
    def map(self, pick: int, base: int, first: int) -> None:
        if not self.handles:
            return
        handle = sorted(self.handles)[pick % len(self.handles)]
        wanted = {(base, first + i) for i in range(len(self.handles[handle][1]))}
        taken = {page for start in self.mapped for page in self.pages(start)}
        fits = first + len(wanted) <= LENGTH
        if self.attempt(fits and not wanted & taken, "map", self.bases[base] + first * PAGE, handle):
            self.mapped[base, first] = handle

    @rule(base=st.integers(0, 1), first=Places, length=st.integers(1, LENGTH))
    def unmap(self, base: int, first: int, length: int) -> None:
        starts = self.whole(base, first, length)
        if self.attempt(starts is not None, "unmap", self.bases[base] + first * PAGE, length * PAGE):
            for start in starts or []:
                del self.mapped[start]
                self.open.discard(start)

    @rule(base=st.integers(0, 1), first=Places, length=st.integers(1, LENGTH))
    def set_access(self, base: int, first: int, length: int) -> None:
        starts = self.whole(base, first, length)
        if self.attempt(starts is not None, "set_access", self.bases[base] + first * PAGE, length * PAGE):
            self.open.update(starts or [])

    @rule(base=st.integers(0, 1), first=Places, value=st.integers(1, 255))
    def write(self, base: int, first: int, value: int) -> None:
        owner = next((start for start in self.mapped if (base, first) in self.pages(start)), None)
        address = self.bases[base] + first * PAGE
        if owner not in self.open:
            with pytest.raises(DriverError):
                self.driver.write(address, bytes([value]) * PAGE)
            return
        assert owner is not None
        self.driver.write(address, bytes([value]) * PAGE)
        self.handles[self.mapped[owner]][1][first - owner[1]] = value

    @rule(base=st.integers(0, 1))
    def free(self, base: int) -> None:
        allowed = all(start[0] != base for start in self.mapped)
        if self.attempt(allowed, "free", self.bases[base], LENGTH * PAGE):
            self.bases[base] = self.driver.reserve(LENGTH * PAGE)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "driver"):
            return
        usage = self.driver.usage()
        assert (usage.reservations, usage.mappings, usage.handles) == (2, len(self.mapped), len(self.handles))
        for tier in ROOM:
            held = sum(len(values) for place, values in self.handles.values() if place is tier)
            assert usage.tier_bytes.get(tier, 0) == held * PAGE
        for start in self.open:
            values = self.handles[self.mapped[start]][1]
            found = self.driver.read(self.bases[start[0]] + start[1] * PAGE, len(values) * PAGE)
            assert found == b"".join(bytes([value]) * PAGE for value in values)


TestHostDriverModel = HostDriverMachine.TestCase
TestHostDriverModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
