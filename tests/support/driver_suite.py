"""What every memory driver must do. A test file subclasses ``DriverSuite`` and gives it its fixtures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest

from vamp_runtime.errors import DriverError
from vamp_runtime.memory.driver import MemoryDriver, Tier

BUDGET_PAGES = 12  # granules of each tier that the ``driver`` fixture must offer


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that differ between seeds and do not repeat at a power of two."""
    block = bytes((seed * 37 + i * 11) % 251 for i in range(1009))
    return (block * (nbytes // len(block) + 1))[:nbytes]


def create(driver: MemoryDriver, pages: int = 1, tier: Tier = Tier.HBM) -> int:
    handle = driver.create(pages * driver.granularity, tier)
    assert handle is not None
    return handle


def back(driver: MemoryDriver, address: int, handle: int, nbytes: int) -> None:
    driver.map(address, handle)
    driver.set_access(address, nbytes)


@dataclass(frozen=True)
class Scene:
    """Five reserved pages: ``one`` with access, both of ``two`` without, nothing, ``last`` with access."""

    driver: MemoryDriver
    page: int
    address: int
    one: int
    two: int
    last: int
    loose: int

    def at(self, page: float) -> int:
        return self.address + int(page * self.page)


REFUSED: dict[str, Callable[[Scene], object]] = {
    "map over a mapping": lambda s: s.driver.map(s.at(0), s.loose),
    "map reaching a mapping": lambda s: s.driver.map(s.at(3), s.loose),
    "map into a mapping": lambda s: s.driver.map(s.at(2), s.one),
    "map past the reservation": lambda s: s.driver.map(s.at(5), s.one),
    "map off the granularity": lambda s: s.driver.map(s.at(3.5), s.one),
    "map of no handle": lambda s: s.driver.map(s.at(3), s.loose + 1000),
    "map of nothing": lambda s: s.driver.map(s.at(3)),
    "map of several reaching a mapping": lambda s: s.driver.map(s.at(3), s.one, s.one),
    "map of several with one that is none": lambda s: s.driver.map(s.at(3), s.one, s.loose + 1000),
    "unmap of part": lambda s: s.driver.unmap(s.at(1), s.page),
    "unmap ending inside": lambda s: s.driver.unmap(s.at(0), 2 * s.page),
    "unmap of nothing": lambda s: s.driver.unmap(s.at(3), s.page),
    "unmap across a gap": lambda s: s.driver.unmap(s.at(0), 5 * s.page),
    "access across a gap": lambda s: s.driver.set_access(s.at(0), 5 * s.page),
    "access to part": lambda s: s.driver.set_access(s.at(2), s.page),
    "free with mappings": lambda s: s.driver.free(s.at(0), 5 * s.page),
    "free of part": lambda s: s.driver.free(s.at(3), s.page),
    "release while mapped": lambda s: s.driver.release(s.one),
    "release of no handle": lambda s: s.driver.release(s.loose + 1000),
    "reserve off the granularity": lambda s: s.driver.reserve(s.page + s.page // 2),
    "create of nothing": lambda s: s.driver.create(0, Tier.HBM),
    "copy to no access": lambda s: s.driver.copy(s.at(1), s.at(0), s.page),
    "copy onto itself": lambda s: s.driver.copy(s.at(0) + 8, s.at(0), s.page // 2),
    "zero past a mapping": lambda s: s.driver.zero(s.at(0.5), s.page),
}


class DriverSuite:
    """Fixtures to provide: ``driver``, with ``BUDGET_PAGES`` granules of HBM, HOST and where it can PEER."""

    @pytest.fixture(params=list(Tier), ids=lambda tier: tier.value)
    def tier(self, request: pytest.FixtureRequest, driver: MemoryDriver) -> Tier:
        tier = request.param
        if tier not in driver.tiers:
            pytest.skip(f"no {tier.value} tier on this machine")
        return tier

    def test_addresses_are_aligned_and_apart(self, driver: MemoryDriver) -> None:
        page = driver.granularity
        ranges = sorted((driver.reserve(pages * page), pages * page) for pages in (1, 3, 2))
        assert all(address % page == 0 for address, _ in ranges)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(ranges))

    def test_bytes_stay_what_was_written(self, driver: MemoryDriver, tier: Tier) -> None:
        page = driver.granularity
        address = driver.reserve(4 * page)
        driver.map(address, create(driver, 1, tier))
        driver.map(address + page, create(driver, 2, tier))
        driver.set_access(address, 3 * page)
        data = pattern(1, 3 * page)
        driver.write(address, data)
        assert driver.read(address, 3 * page) == data
        assert driver.read(address + page - 5, 10) == data[page - 5 : page + 5]

    def test_two_addresses_of_one_handle_show_the_same_bytes(self, driver: MemoryDriver, tier: Tier) -> None:
        page = driver.granularity
        first, second = driver.reserve(page), driver.reserve(2 * page) + page
        handle = create(driver, 1, tier)
        back(driver, first, handle, page)
        back(driver, second, handle, page)
        driver.write(first, pattern(2, page))
        assert driver.read(second, page) == pattern(2, page)
        driver.zero(second, page)
        assert driver.read(first, page) == bytes(page)
        driver.write(second, pattern(3, page))
        driver.unmap(second, page)
        assert driver.read(first, page) == pattern(3, page)

    def test_a_page_keeps_its_bytes_on_its_way_there_and_back(self, driver: MemoryDriver, tier: Tier) -> None:
        page = driver.granularity
        there, here = driver.reserve(page), driver.reserve(page)
        handle = create(driver, 1, tier)
        for step, address in enumerate((here, there, here)):
            back(driver, address, handle, page)
            if step == 0:
                driver.write(address, pattern(4, page))
            assert driver.read(address, page) == pattern(4, page)
            driver.unmap(address, page)

    def test_another_page_behind_the_same_address(self, driver: MemoryDriver) -> None:
        """The move of an expert: HBM away, host memory at its address, and back."""
        page = driver.granularity
        address = driver.reserve(page)
        hbm, host = create(driver, 1, Tier.HBM), create(driver, 1, Tier.HOST)
        for handle, seed in ((hbm, 5), (host, 6)):
            back(driver, address, handle, page)
            driver.write(address, pattern(seed, page))
            driver.unmap(address, page)
        for handle, seed in ((hbm, 5), (host, 6), (hbm, 5)):
            back(driver, address, handle, page)
            assert driver.read(address, page) == pattern(seed, page)
            driver.unmap(address, page)

    def test_copy_and_zero_across_tiers(self, driver: MemoryDriver, tier: Tier) -> None:
        page = driver.granularity
        address = driver.reserve(4 * page)
        for index, place in enumerate((Tier.HBM, tier, Tier.HOST, Tier.HBM)):
            driver.map(address + index * page, create(driver, 1, place))
        driver.set_access(address, 4 * page)
        data = pattern(7, 2 * page)
        driver.write(address, data)
        driver.zero(address + 2 * page, 2 * page)
        driver.copy(address + 2 * page, address, 2 * page)
        driver.zero(address + page // 2, page)
        driver.synchronize()
        assert driver.read(address + 2 * page, 2 * page) == data
        half = page // 2
        assert driver.read(address, 2 * page) == data[:half] + bytes(page) + data[half + page :]

    def test_access_to_many_mappings_at_once(self, driver: MemoryDriver) -> None:
        page = driver.granularity
        address = driver.reserve((BUDGET_PAGES + 1) * page)
        handles = [create(driver) for _ in range(BUDGET_PAGES)]
        for index, handle in enumerate(handles):
            driver.map(address + index * page, handle)
        driver.set_access(address, page)
        driver.set_access(address, BUDGET_PAGES * page)
        driver.write(address, pattern(8, BUDGET_PAGES * page))
        assert driver.read(address, BUDGET_PAGES * page) == pattern(8, BUDGET_PAGES * page)
        driver.unmap(address + page, (BUDGET_PAGES - 2) * page)
        assert driver.usage().mappings == 2
        assert driver.read(address, page) == pattern(8, page)

    def test_many_handles_at_once(self, driver: MemoryDriver, tier: Tier) -> None:
        """Neighbours map, open and unmap together, whatever sizes they have and where else they lie."""
        page = driver.granularity
        here, there = driver.reserve(6 * page), driver.reserve(6 * page)
        handles = [create(driver, pages, tier) for pages in (1, 2, 1)]
        driver.map(here, *handles)
        driver.set_access(here, 4 * page)
        driver.write(here, pattern(12, 4 * page))
        driver.map(there + page, *handles[::-1])
        driver.set_access(there + page, 4 * page)
        driver.unmap(here, 4 * page)
        data = pattern(12, 4 * page)
        assert driver.read(there + page, 4 * page) == data[3 * page :] + data[page : 3 * page] + data[:page]
        driver.unmap(there + page, 3 * page)
        assert driver.usage().mappings == 1
        assert driver.read(there + 4 * page, page) == data[:page]

    def test_a_tier_that_is_full_gives_none(self, driver: MemoryDriver, tier: Tier) -> None:
        page = driver.granularity
        handles = [create(driver, 2, tier) for _ in range(BUDGET_PAGES // 2)]
        before = driver.usage()
        assert before.tier_bytes == {tier: BUDGET_PAGES * page}
        assert driver.create(page, tier) is None
        assert driver.usage() == before
        driver.release(handles[1])
        assert driver.create(3 * page, tier) is None
        again = driver.create(2 * page, tier)
        assert again is not None and again not in handles

    def test_marks_pass(self, driver: MemoryDriver) -> None:
        first, second = driver.mark(), driver.mark()
        driver.wait(second)
        assert driver.passed(second)
        assert driver.passed(first)
        driver.wait(first)

    def test_500_cycles_leave_nothing(self, driver: MemoryDriver) -> None:
        page = driver.granularity
        address = driver.reserve(4 * page)
        kept = create(driver)
        back(driver, address, kept, page)
        driver.write(address, pattern(9, page))
        before = driver.usage()
        for _ in range(500):
            handle = create(driver)
            back(driver, address + page, kept, page)
            back(driver, address + 2 * page, handle, page)
            driver.unmap(address + page, 2 * page)
            driver.release(handle)
        assert driver.usage() == before
        assert driver.read(address, page) == pattern(9, page)

    @pytest.mark.parametrize("name", REFUSED)
    def test_a_refused_call_changes_nothing(self, driver: MemoryDriver, name: str) -> None:
        page = driver.granularity
        handles = [create(driver, pages) for pages in (1, 2, 1, 2)]
        scene = Scene(driver, page, driver.reserve(5 * page), *handles)
        back(driver, scene.at(0), scene.one, page)
        driver.map(scene.at(1), scene.two)
        back(driver, scene.at(4), scene.last, page)
        driver.write(scene.at(0), pattern(10, page))
        driver.write(scene.at(4), pattern(11, page))
        before = driver.usage()
        with pytest.raises(DriverError):
            REFUSED[name](scene)
        assert driver.usage() == before
        assert driver.read(scene.at(0), page) == pattern(10, page)
        assert driver.read(scene.at(4), page) == pattern(11, page)
        for inaccessible in (1, 3):
            with pytest.raises(DriverError):
                driver.read(scene.at(inaccessible), 1)
        back(driver, scene.at(3), scene.one, page)
        driver.set_access(scene.at(1), 2 * page)
        driver.unmap(scene.at(0), 5 * page)
        for handle in handles:
            driver.release(handle)
        driver.free(scene.at(0), 5 * page)

    @pytest.mark.parametrize("call", ["read", "write", "zero", "copy"])
    def test_no_access_before_it_is_granted(self, driver: MemoryDriver, call: str) -> None:
        page = driver.granularity
        address, other = driver.reserve(page), driver.reserve(page)
        back(driver, other, create(driver), page)
        driver.map(address, create(driver))
        attempts: dict[str, Callable[[], object]] = {
            "read": lambda: driver.read(address, 1),
            "write": lambda: driver.write(address, b"x"),
            "zero": lambda: driver.zero(address, page),
            "copy": lambda: driver.copy(other, address, page),
        }
        with pytest.raises(DriverError):
            attempts[call]()
        driver.set_access(address, page)
        attempts[call]()
        driver.unmap(address, page)
        driver.map(address, create(driver))
        with pytest.raises(DriverError):
            attempts[call]()

    def test_a_closed_driver_refuses(self, driver: MemoryDriver) -> None:
        page = driver.granularity
        address = driver.reserve(page)
        back(driver, address, create(driver), page)
        driver.close()
        usage = driver.usage()
        assert (usage.reservations, usage.mappings, usage.handles) == (0, 0, 0)
        for call in (lambda: driver.reserve(page), lambda: driver.create(page, Tier.HBM)):
            with pytest.raises(DriverError):
                call()
        driver.close()
