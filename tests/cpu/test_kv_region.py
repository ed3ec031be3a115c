from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.boundary_suite import EMPTY
from support.faulty import FaultyDriver

from vamp_runtime.errors import ConfigError, DriverError, IntegrityError
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.geometry import KVGeometry
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.kv_region import FREE, KVRegion
from vamp_runtime.memory.ledger import OwnerKind, PageLedger
from vamp_runtime.memory.transaction import Transaction

PAGE = 4096
# 5 pages hold 3 blocks and a bit in each of two positions.
GEOMETRY = KVGeometry(
    positions=2, block_stride=6000, position_stride=8 * PAGE, virtual_blocks=5, page_bytes=PAGE
)


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(PAGE, {Tier.HBM: 16 * PAGE})
    yield driver
    driver.close()


def build(driver: HostDriver, pages: int) -> KVRegion:
    return KVRegion(driver, PageLedger(PAGE), GEOMETRY, pages)


def kinds(region: KVRegion) -> tuple[int, int, int]:
    """Pages that are KV, RESERVE and FREE."""
    ledger = region._ledger
    return ledger.count(OwnerKind.KV), ledger.count(OwnerKind.RESERVE), ledger.count(OwnerKind.FREE)


def test_the_head_is_backed_and_zero(driver: HostDriver) -> None:
    region = build(driver, 7)
    assert (region.nbytes, region.pages, region.blocks, region.claimed) == (16 * PAGE, 7, 2, 0)
    assert region.address(2, 1) - region.address(0) == 8 * PAGE + 12000
    assert driver.read(region.address(0, 0), 4 * PAGE) == bytes(4 * PAGE)
    assert driver.read(region.address(0, 1), 3 * PAGE) == bytes(3 * PAGE)
    with pytest.raises(DriverError):
        driver.read(region.address(0, 1) + 3 * PAGE, 1)
    region.close()
    assert driver.usage() == EMPTY


def test_no_room_is_an_error_that_knows_a_way(driver: HostDriver) -> None:
    ledger = PageLedger(PAGE)
    handle = driver.create(9 * PAGE, Tier.HBM)
    before = driver.usage()
    with pytest.raises(ConfigError, match="needs 40960 bytes and 28672 could be had; 2 blocks would work"):
        KVRegion(driver, ledger, GEOMETRY, 10)
    assert driver.usage() == before and ledger.total(Tier.HBM) == 0
    driver.release(handle)
    assert KVRegion(driver, ledger, GEOMETRY, GEOMETRY.pages_for_blocks(2)).blocks == 2


def test_a_refused_call_while_building_leaves_nothing_behind(driver: HostDriver) -> None:
    for k in range(1, 100):
        faulty, ledger = FaultyDriver(driver, k), PageLedger(PAGE)
        try:
            region = KVRegion(faulty, ledger, GEOMETRY, 7)
            break
        except DriverError:
            assert driver.usage() == EMPTY and ledger.total(Tier.HBM) == 0
    assert k > 12
    faulty.arm(0)
    region.close()
    assert driver.usage() == EMPTY


def test_claims_move_pages_between_reserve_and_kv(driver: HostDriver) -> None:
    region = build(driver, 10)
    assert kinds(region) == (0, 10, 0)
    for claimed, expected in ((1, (4, 6, 0)), (3, (10, 0, 0)), (2, (6, 4, 0)), (0, (0, 10, 0))):
        region.claim(claimed)
        assert kinds(region) == expected
        region.check_integrity()
    with pytest.raises(AssertionError, match="4 blocks claimed of 3"):
        region.claim(4)


def test_claimed_pages_are_not_popped(driver: HostDriver) -> None:
    region = build(driver, 9)
    region.claim(2)
    with Transaction() as tx, pytest.raises(AssertionError, match="claimed block"):
        region.shrink(tx, 4)
    with Transaction() as tx:
        assert len(region.shrink(tx, 3)) == 3
        tx.commit()
    region.check_integrity()
    assert kinds(region) == (6, 0, 3)


def test_pushed_pages_are_zero_whatever_they_held(driver: HostDriver) -> None:
    region = build(driver, 9)
    driver.write(region.address(0), b"x" * 5 * PAGE)
    driver.write(region.address(0, 1), b"x" * 4 * PAGE)
    with Transaction() as tx:
        region.push(tx, region.shrink(tx, 5))
        tx.commit()
    assert driver.read(region.address(0), 5 * PAGE) == b"x" * 2 * PAGE + bytes(3 * PAGE)
    assert driver.read(region.address(0, 1), 4 * PAGE) == b"x" * 2 * PAGE + bytes(2 * PAGE)


def test_access_is_set_once_for_each_contiguous_range(driver: HostDriver) -> None:
    faulty = FaultyDriver(driver)
    region = KVRegion(faulty, PageLedger(PAGE), GEOMETRY, 3)
    with Transaction() as tx:
        popped = region.shrink(tx, 3)
        region.uncover()
        faulty.arm(0)
        region.push(tx, popped)
        tx.commit()
    assert sorted(faulty.log) == ["map"] * 2 + ["set_access"] * 2 + ["zero"] * 2


def shrunk(region: KVRegion, n: int) -> list[int]:
    with Transaction() as tx:
        handles = region.shrink(tx, n)
        tx.commit()
    return handles


def covered(region: KVRegion, driver: HostDriver) -> dict[int, int]:
    """Of every page beyond the tails, what lies there: as recorded, which is what the driver has mapped."""
    found = {}
    for page in range(region.pages, GEOMETRY.max_pages):
        address = region.address(0) + GEOMETRY.page_offset(page)
        for mapping in driver._space.mappings(address, PAGE):
            found[page] = mapping.handle
            lies_open = (address, [mapping.handle]) in region._mapped
            assert driver._space.accessible(mapping) is lies_open
    assert region.covered == found
    return found


def test_a_page_that_lies_where_it_goes_takes_no_call(driver: HostDriver) -> None:
    faulty = FaultyDriver(driver)
    region = KVRegion(faulty, PageLedger(PAGE), GEOMETRY, 9)
    handles = shrunk(region, 6)
    assert covered(region, driver) == dict(zip(range(3, 9), handles, strict=True))
    faulty.arm(0)
    assert region.cover(handles) == region.cover(handles[:3]) == 0 and not faulty.log
    with Transaction() as tx:
        region.extend(tx, handles[:4])
        tx.commit()
    assert faulty.log == ["zero"] * 2
    assert covered(region, driver) == dict(zip((7, 8), handles[4:], strict=True))


def test_only_what_differs_is_mapped(driver: HostDriver) -> None:
    faulty = FaultyDriver(driver)
    region = KVRegion(faulty, PageLedger(PAGE), GEOMETRY, 9)
    a, b, c, d, e, f = shrunk(region, 6)
    faulty.arm(0)
    # Pages 4, 6 and 8 are neighbours in their position, 3, 5 and 7 in the other.
    assert region.cover([a, d, c, b, e]) == 2
    assert faulty.log == ["unmap", "map", "set_access"]
    assert covered(region, driver) == {3: a, 4: d, 5: c, 6: b, 7: e, 8: f}
    faulty.arm(0)
    assert region.cover([e, d, c, f, a, b]) == 4
    mapped = ["map", "set_access"]
    assert faulty.log == ["unmap", "unmap", *mapped, *mapped, "unmap", *mapped]
    region.uncover()
    assert covered(region, driver) == {}
    faulty.arm(0)
    slices = region.cover_slices([a, b, c, d, e, f], most=4)
    assert next(slices) == 4 and covered(region, driver) == {3: a, 4: b, 5: c, 7: e}
    assert list(slices) == [2] and list(region.cover_slices([a, b, c, d, e, f], most=4)) == []
    assert set(faulty.log) == {"map", "set_access"}
    region.close()
    assert driver.usage().mappings == driver.usage().reservations == 0


@pytest.mark.parametrize("call", ["map", "set_access", "unmap"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("mode", ["once", "from_then_on"])
def test_what_covers_the_tails_is_known_after_a_refusal(
    driver: HostDriver, call: str, k: int, mode: str
) -> None:
    faulty = FaultyDriver(driver, calls={call})
    region = KVRegion(faulty, PageLedger(PAGE), GEOMETRY, 9)
    handles = shrunk(region, 6)
    faulty.mode = mode
    faulty.arm(k)
    with pytest.raises(DriverError):
        region.cover(handles[::-1])
    covered(region, driver)
    faulty.arm(0)
    with Transaction() as tx, pytest.raises(AssertionError, match="do not lie there"):
        region.extend(tx, handles[::-1])
    with Transaction() as tx:
        region.push(tx, handles[::-1])
        tx.commit()
    assert driver.read(region.address(0), 5 * PAGE) == bytes(5 * PAGE)
    region.check_integrity()
    region.close()
    assert driver.usage() == EMPTY


@pytest.mark.parametrize("pages", [0, 1, 4])
def test_undone_pop_zeroes(driver: HostDriver, pages: int) -> None:
    region = build(driver, 9)
    driver.write(region.address(0), b"x" * 5 * PAGE)
    driver.write(region.address(0, 1), b"x" * 4 * PAGE)
    before = driver.usage()
    with Transaction() as tx:
        region.shrink(tx, pages)
    assert driver.usage() == before and region.pages == 9
    region.check_integrity()
    both = driver.read(region.address(0), 5 * PAGE) + driver.read(region.address(0, 1), 4 * PAGE)
    assert both.count(0) == pages * PAGE and both.count(b"x") == (9 - pages) * PAGE


def test_undone_push_takes_the_pages_back(driver: HostDriver) -> None:
    region = build(driver, 9)
    with Transaction() as tx:
        handles = region.shrink(tx, 4)
        tx.commit()
    before = driver.usage()
    with Transaction() as tx:
        region.push(tx, handles)
    assert driver.usage() == before and region.pages == 5 and len(region.covered) == 4
    assert region._ledger.pages(FREE) == tuple(handles)
    region.check_integrity()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(0, 5), st.booleans()), max_size=12))
def test_any_pushes_and_pops_keep_the_books(walk: list[tuple[bool, int, int, bool]]) -> None:
    """An odd claim lets the newest spare pages go first: other pages than before lie there."""
    driver = HostDriver(PAGE, {Tier.HBM: 16 * PAGE})
    region, spare = build(driver, 8), []
    usage = driver.usage()
    for push, count, claim, commit in walk:
        region.claim(min(claim, region.blocks))
        with Transaction() as tx:
            if push:
                ordered = spare[::-1] if claim % 2 else spare
                region.push(tx, ordered[:count])
                left = ordered[count:]
            else:
                top = region.pages - GEOMETRY.pages_for_blocks(region.claimed)
                left = spare + region.shrink(tx, min(count, top))
            if commit:
                tx.commit()
                spare = left
        region.check_integrity()
        assert region.pages + len(spare) == 8
        assert region.blocks == GEOMETRY.blocks_for_pages(region.pages)
        assert driver.usage().mappings == usage.mappings - len(spare) + len(covered(region, driver))
        for block in range(region.blocks):
            assert all(len(driver.read(region.address(block, position), 6000)) == 6000 for position in (0, 1))
    driver.close()


def test_a_page_that_changed_hands_is_found(driver: HostDriver) -> None:
    region = build(driver, 4)
    region._ledger.move([region._pages[0]], region._ledger.owner(region._pages[0]), FREE)
    with pytest.raises(IntegrityError, match="KV page 0 belongs to"):
        region.check_integrity()
