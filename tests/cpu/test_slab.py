from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.boundary_suite import EMPTY, reverse_coldness
from support.deferring import DeferringDriver
from support.faulty import FaultyDriver
from support.rigs import DENSE, RECORDS, SHAPES, Rig, Shape, build_rig

from vamp_runtime.errors import ConfigError, DriverError, IntegrityError
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.homes import HomeCopies, HomeSlots
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.ledger import Owner, OwnerKind, PageLedger
from vamp_runtime.memory.records import staging_owner
from vamp_runtime.memory.slab import ExpertSlab

PAGE = 4096


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(PAGE)
    yield driver
    driver.close()


@pytest.fixture
def peer_driver() -> Iterator[HostDriver]:
    driver = HostDriver(PAGE, dict.fromkeys(Tier, 1 << 24))
    yield driver
    driver.close()


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.name)
def rig(request: pytest.FixtureRequest, driver: HostDriver) -> Rig:
    shape: Shape = request.param
    return build_rig(driver, shape)


def test_records_follow_each_other_and_homes_follow_records(rig: Rig) -> None:
    geometry, slab = rig.geometry, rig.slab
    for part, size in enumerate(geometry.part_bytes):
        assert slab.address(1, part, 3) - slab.address(1, part) == 3 * size
    expert = slab.experts_of(0, slab.coldest(0, 1)[0])[0]
    home = slab.home_of(0, slab.coldest(0, 1)[0])
    assert home is not None
    alias = geometry.home_slot_base + home * geometry.group
    assert rig.expert(0, expert, alias) == rig.weights[0][expert] != rig.weights[1][expert]


def test_a_home_stays_what_it_was_while_the_record_changes(rig: Rig) -> None:
    group = rig.slab.coldest(0, 1)[0]
    expert = rig.slab.experts_of(0, group)[0]
    rig.driver.write(rig.slab.address(0, 0, rig.slab.record(0, expert)), b"changed")
    alias = rig.geometry.home_slot_base + rig.slab.home_of(0, group) * rig.geometry.group
    assert rig.expert(0, expert, alias) == rig.weights[0][expert]
    with pytest.raises(IntegrityError, match=f"layer 0, expert {expert}: the bytes at slot"):
        rig.slab.verify(0, expert)


def test_a_home_is_valid_only_when_its_bytes_are_there(driver: HostDriver) -> None:
    rig = build_rig(DeferringDriver(driver), DENSE, homes=0)
    rig.slab.refresh_homes(1 << 40)
    rig.driver = driver
    for group in rig.slab.ready(0, 9):
        alias = rig.geometry.home_slot_base + rig.slab.home_of(0, group)
        assert rig.expert(0, group, alias) == rig.weights[0][group]


@pytest.mark.parametrize("groups", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 3, 3], []])
def test_coldness_must_name_every_movable_group(driver: HostDriver, groups: list[int]) -> None:
    slab = build_rig(driver, RECORDS).slab
    with pytest.raises(ValueError, match="layer 1: coldness"):
        slab.set_coldness(1, groups)
    assert slab.coldest(1, 9) == [3, 2, 1, 0]


def test_whole_levels_become_ready_first(driver: HostDriver) -> None:
    rig = build_rig(driver, DENSE, homes=0)
    size, layers = rig.geometry.group_bytes, range(rig.geometry.layers)
    for copied in range(1, 7):
        assert rig.slab.refresh_homes(size) == size
        ready = [len(rig.slab.ready(layer, 9)) for layer in layers]
        assert sum(ready) == copied and max(ready) - min(ready) <= 1
    assert rig.slab.refresh_homes(size) == 0
    assert all(rig.slab.ready(layer, 9) == rig.slab.coldest(layer, 3) for layer in layers)


def test_a_wanted_home_is_not_copied_again(rig: Rig) -> None:
    slab, layers = rig.slab, range(rig.geometry.layers)
    before = [[slab.home_of(layer, group) for group in slab.coldest(layer, 3)] for layer in layers]
    for layer in layers:
        first, second, third, *rest = slab.coldest(layer, 9)
        last = set(range(rig.geometry.movable_groups)) - {first, second, third, rest[0]}
        slab.set_coldness(layer, [third, rest[0], first, second, *last])
    assert slab.refresh_homes(1 << 40) == rig.geometry.layers * rig.geometry.group_bytes
    for layer, homes in enumerate(before):
        third, new, first = slab.coldest(layer, 3)
        assert (slab.home_of(layer, first), slab.home_of(layer, third)) == (homes[0], homes[2])
        assert slab.home_of(layer, new) == homes[1]


def test_no_host_room_is_an_error_that_knows_a_way() -> None:
    geometry = RECORDS.slab(PAGE)
    driver = HostDriver(PAGE, {Tier.HBM: 1 << 30, Tier.HOST: 5 * geometry.page_bytes})
    ledger = PageLedger(geometry.page_bytes)
    with pytest.raises(ConfigError, match=r"max_offload_ratio=0.66\d*: .* host memory") as error:
        ExpertSlab(driver, ledger, geometry)
    assert driver.usage() == EMPTY and ledger.total(Tier.HBM) == ledger.total(Tier.HOST) == 0
    ratio = float(re.search(r"; ([\d.]+) would work", str(error.value))[1])
    fitting = SlabGeometry.plan(2, 9, geometry.part_bytes, PAGE, ratio)
    assert fitting.max_level == 2, "two levels of two pages fit into five"
    ExpertSlab(driver, ledger, fitting)
    driver.close()


def test_all_layers_share_the_staging_pages(driver: HostDriver) -> None:
    rig = build_rig(driver, RECORDS)
    geometry, slab = rig.geometry, rig.slab
    assert geometry.staging_records == 8 and rig.ledger.count(OwnerKind.STAGING, Tier.HBM) == 4
    for slot in range(geometry.own_slots, geometry.home_slot_base):
        data = bytes([slot]) * geometry.expert_bytes
        driver.write(slab.address(0, 0, slot), data)
        assert driver.read(slab.address(1, 0, slot), len(data)) == data
    rig.check()
    rig.moved(rig.boundary.offload(2))
    rig.close()
    assert driver.usage() == EMPTY and rig.ledger.total(Tier.HBM) == 0


def test_lost_staging_pages_are_noticed(driver: HostDriver) -> None:
    rig = build_rig(driver, RECORDS)
    page = rig.ledger.pages(staging_owner(1))[0]
    rig.ledger.move([page], staging_owner(1), Owner(OwnerKind.FREE))
    with pytest.raises(IntegrityError, match="staging group 1 has lost pages"):
        rig.slab.check_integrity()


def test_no_room_to_stage_is_an_error_that_knows_a_way() -> None:
    geometry = RECORDS.slab(PAGE)
    pages = geometry.layers * geometry.groups + 3
    driver = HostDriver(PAGE, {Tier.HBM: pages * geometry.page_bytes, Tier.HOST: 1 << 30})
    ledger = PageLedger(geometry.page_bytes)
    with pytest.raises(ConfigError, match=r"staging_mib: staging needs 49152 bytes .*; 0 would work"):
        ExpertSlab(driver, ledger, geometry)
    assert driver.usage() == EMPTY and ledger.total(Tier.HBM) == 0
    driver.close()


def test_no_hbm_room_is_an_error_that_knows_a_way() -> None:
    geometry = RECORDS.slab(PAGE)
    driver = HostDriver(PAGE, {Tier.HBM: 4 * geometry.page_bytes, Tier.HOST: 1 << 30})
    ledger = PageLedger(geometry.page_bytes)
    with pytest.raises(ConfigError, match=r"hbm: .* 3 times the tensor parallel size would work"):
        ExpertSlab(driver, ledger, geometry)
    assert driver.usage() == EMPTY and ledger.total(Tier.HBM) == 0
    driver.close()


def test_no_host_tier_is_an_error_that_knows_a_way() -> None:
    geometry = RECORDS.slab(PAGE)
    driver = HostDriver(PAGE, {Tier.HBM: 1 << 30})
    with pytest.raises(ConfigError, match=r"max_offload_ratio: .* 0 would work"):
        ExpertSlab(driver, PageLedger(geometry.page_bytes), geometry)
    fitting = SlabGeometry.plan(2, 9, geometry.part_bytes, PAGE, 0)
    ExpertSlab(driver, PageLedger(geometry.page_bytes), fitting).close()
    assert driver.usage() == EMPTY
    driver.close()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_refused_call_while_building_leaves_nothing_behind(driver: HostDriver, shape: Shape) -> None:
    geometry = shape.slab(PAGE)
    for k in range(1, 1000):
        faulty, ledger = FaultyDriver(driver, k), PageLedger(geometry.page_bytes)
        try:
            slab = ExpertSlab(faulty, ledger, geometry, mirror=shape.mirror)
            break
        except DriverError:
            assert driver.usage() == EMPTY and ledger.total(Tier.HBM) == ledger.total(Tier.HOST) == 0
    assert faulty.counter == k - 1 > geometry.groups * geometry.pages_per_level
    faulty.arm(0)
    slab.close()
    assert driver.usage() == EMPTY and ledger.total(Tier.HBM) == ledger.total(Tier.HOST) == 0


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([list(range(9))], "1 layers; 2 would work"),
        ([list(range(9)), [0, 1, 2, 3, 4, 5, 6, 7, 7]], "layer 1: .* is no permutation"),
        ([list(range(9)), list(range(8))], "layer 1: .* is no permutation"),
    ],
)
def test_record_order_must_be_a_permutation(driver: HostDriver, order: list[list[int]], message: str) -> None:
    geometry = RECORDS.slab(PAGE)
    with pytest.raises(ConfigError, match=f"record order.*{message}"):
        ExpertSlab(driver, PageLedger(geometry.page_bytes), geometry, order)
    assert driver.usage() == EMPTY


def test_experts_lie_where_the_order_says(driver: HostDriver) -> None:
    order = [[8, 7, 6, 5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4, 7, 6, 8]]
    rig = build_rig(driver, RECORDS, order=order)
    for layer, row in enumerate(order):
        for expert, record in enumerate(row):
            assert rig.slab.record(layer, expert) == rig.slab.slot_table[layer][expert] == record
            assert rig.expert(layer, expert, record) == rig.weights[layer][expert]
    assert rig.slab.experts_of(0, 0) == [8, 7] and rig.slab.experts_of(0, 4) == [0]


def test_wrong_slot_is_found(rig: Rig) -> None:
    rig.slab.slot_table[1][2] = 0
    with pytest.raises(IntegrityError, match=r"layer 1: group .: expert 2 is read at slot 0"):
        rig.slab.check_integrity()
    with pytest.raises(IntegrityError, match="layer 1, expert 2:"):
        rig.slab.verify_all()


def test_lost_home_of_a_group_that_is_out_is_found(rig: Rig) -> None:
    rig.moved(rig.boundary.offload(1))
    rig.slab._homes[0].empty(rig.slab.home_of(0, rig.slab.out(0)[0]))
    with pytest.raises(IntegrityError, match="without a valid home"):
        rig.slab.check_integrity()


def test_homes_of_leaving_groups_are_kept(rig: Rig) -> None:
    rig.moved(rig.boundary.offload(3))
    reverse_coldness(rig)
    assert rig.slab.refresh_homes(1 << 40) == 0
    rig.check()
    assert rig.ledger.count(OwnerKind.HOME, Tier.HOST) == 3 * rig.geometry.pages_per_level


@given(
    st.integers(0, 5),
    st.integers(0, 5),
    st.lists(st.tuples(st.permutations(range(8)), st.sets(st.integers(0, 7)), st.integers(0, 5))),
)
@settings(deadline=None)
def test_home_plans_keep_what_is_wanted(
    slots: int, peer: int, walk: list[tuple[list[int], set[int], int]]
) -> None:
    homes = HomeSlots(slots, min(slots, peer))
    for order, chosen, budget in walk:
        pinned = {group for group in chosen if homes.slot_of(group) is not None}
        wanted = [group for group in order if group not in pinned][: slots - len(pinned)]
        held = {group: homes.slot_of(group) for group in {*wanted, *pinned}}
        plan = homes.plan(wanted, pinned, budget)
        first = [job.copies[0][0] for job in plan if not job.exchange]
        assert first == [group for group in wanted if held[group] is None][:budget]
        places = [slot for job in plan for _, slot in job.copies]
        assert len(set(places)) == len(places) and not {homes.slot_of(group) for group in pinned} & {*places}
        assert all(wanted[job.rank] in {group for group, _ in job.copies} for job in plan)
        for job in plan[:budget]:
            make(homes, job)
            held |= dict(job.copies)
        homes.check_integrity()
        assert {group: homes.slot_of(group) for group in held} == held


@pytest.mark.parametrize(
    ("wanted", "peer", "slots"),
    [
        ([5, 4, 3, 2], 0, {2: 0, 3: 1, 4: 2, 5: 3}),
        ([2, 3, 4, 5], 0, {2: 0, 3: 1, 4: 2, 5: 3}),
        ([7, 1, 5, 4], 0, {7: 0, 1: 1, 4: 2, 5: 3}),
        ([0, 6, 2, 4], 0, {0: 0, 6: 1, 2: 2, 4: 3}),
        ([5, 4, 3, 2], 2, {2: 0, 3: 1, 4: 2, 5: 3}),
    ],
)
def test_homes_of_neighbours_are_neighbours(wanted: list[int], peer: int, slots: dict[int, int]) -> None:
    """Ascending, as the records are; groups that are not neighbours lie in the order of coldness."""
    homes = HomeSlots(4, peer)
    for job in homes.plan(wanted, ()):
        make(homes, job)
    assert {group: homes.slot_of(group) for group in wanted} == slots


def make(homes: HomeSlots, job: HomeCopies) -> None:
    homes.begin(job)
    for group, slot in job.copies:
        homes.fill(slot, group)


@given(
    st.integers(1, 6),
    st.integers(0, 6),
    st.lists(st.tuples(st.permutations(range(9)), st.sets(st.integers(0, 8))), min_size=1),
)
@settings(deadline=None)
def test_the_warmest_of_the_wanted_groups_settle_in_the_peer(
    slots: int, peer: int, walk: list[tuple[list[int], set[int]]]
) -> None:
    homes = HomeSlots(slots, min(slots, peer))
    for order, chosen in walk:
        pinned = {group for group in chosen if homes.slot_of(group) is not None}
        wanted = [group for group in order if group not in pinned][: slots - len(pinned)]
        for _ in range(3):
            for job in homes.plan(wanted, pinned):
                make(homes, job)
        assert homes.plan(wanted, pinned) == []
        taken = sum(homes.in_peer(group) for group in pinned)
        warm = wanted[len(wanted) - min(len(wanted), min(slots, peer) - taken) :]
        assert [group for group in wanted if homes.in_peer(group)] == warm


def test_homes_change_places_when_the_coldness_does(peer_driver: HostDriver) -> None:
    rig = build_rig(peer_driver, replace(DENSE, peer_homes=2))
    slab, size, layers = rig.slab, rig.geometry.group_bytes, range(rig.geometry.layers)

    def in_peer() -> list[set[int]]:
        return [{g for g in range(6) if slab.home_of(layer, g) in (0, 1)} for layer in layers]

    assert [slab.ready(layer, 9) for layer in layers] == [[5, 4, 3]] * 2 and in_peer() == [{4, 3}] * 2
    for layer in layers:
        slab.set_coldness(layer, [3, 4, 5, 2, 1, 0])
    assert slab.refresh_homes(size) == 0, "half an exchange would leave a group without a home"
    assert slab.refresh_homes(3 * size) == 2 * size and in_peer() == [{4, 5}, {4, 3}]
    assert slab.refresh_homes(1 << 40) == 2 * size and in_peer() == [{4, 5}] * 2
    rig.check()
    rig.moved(rig.boundary.offload(2))
    assert [slab.out(layer) for layer in layers] == [(3, 4)] * 2
    assert [slab.hosted(layer) for layer in layers] == [{3}] * 2
    rig.moved(rig.boundary.restore(2))
    assert not any(slab.hosted(layer) for layer in layers)


def test_a_refused_exchange_of_homes_is_made_up_for(peer_driver: HostDriver) -> None:
    faulty = FaultyDriver(peer_driver, calls={"copy", "synchronize"})
    for k in range(1, 100):
        rig = build_rig(faulty, replace(DENSE, peer_homes=2))
        for layer in range(rig.geometry.layers):
            rig.slab.set_coldness(layer, [3, 4, 5, 2, 1, 0])
        faulty.arm(k)
        try:
            rig.slab.refresh_homes(1 << 40)
            break
        except DriverError:
            faulty.arm(0)
        rig.check()
        assert sum(len(rig.slab.ready(layer, 9)) for layer in range(rig.geometry.layers)) < 6
        for _ in range(2):
            rig.slab.refresh_homes(1 << 40)
        assert [{g for g in range(6) if rig.slab.home_of(la, g) in (0, 1)} for la in (0, 1)] == [{4, 5}] * 2
        rig.moved(rig.boundary.offload(3))
        rig.close()
    assert k == 2 * 2 * rig.geometry.parts + 2, "every copy and the wait for them was refused once"


def test_homes_lie_where_the_geometry_says(peer_driver: HostDriver) -> None:
    rig = build_rig(peer_driver, replace(RECORDS, peer_homes=1))
    geometry, space = rig.geometry, peer_driver._space
    pages = rig.geometry.pages_per_level
    assert rig.ledger.count(OwnerKind.HOME, Tier.PEER) == pages == rig.ledger.total(Tier.PEER)
    assert rig.ledger.count(OwnerKind.HOME, Tier.HOST) == 2 * pages == rig.ledger.total(Tier.HOST)
    for slot in range(geometry.slots):
        expected = Tier.HBM if slot < geometry.home_slot_base else Tier.PEER
        expected = Tier.HOST if slot >= geometry.host_slot_base else expected
        assert space.tier_at(rig.slab.address(1, 0, slot)) is expected
    rig.moved(rig.boundary.offload(3))
    behind = [space.tier_at(rig.slab.address(0, 0, group * geometry.group)) for group in range(4)]
    assert behind == [Tier.HBM, Tier.PEER, Tier.HOST, Tier.HOST], "the warmest that may leave is in the peer"


def test_no_peer_room_is_an_error_that_knows_a_way() -> None:
    geometry = replace(RECORDS, peer_homes=2).slab(PAGE)
    room = {Tier.HBM: 1 << 30, Tier.HOST: 1 << 30, Tier.PEER: 3 * geometry.page_bytes}
    driver = HostDriver(PAGE, room)
    ledger = PageLedger(geometry.page_bytes)
    with pytest.raises(ConfigError, match=r"^peer_hbm_gib: homes need 49152 bytes .* and 36864 could"):
        ExpertSlab(driver, ledger, geometry)
    assert driver.usage() == EMPTY and not any(ledger.total(tier) for tier in Tier)
    driver.close()
    driver = HostDriver(PAGE)
    with pytest.raises(ConfigError, match=r"^peer_hbm_gib: this driver has no peer; 0 would work"):
        ExpertSlab(driver, PageLedger(geometry.page_bytes), geometry)
    driver.close()


def test_without_homes_on_the_host_no_host_memory_is_needed() -> None:
    geometry = replace(RECORDS, peer_homes=3).slab(PAGE)
    driver = HostDriver(PAGE, {Tier.HBM: 1 << 24, Tier.PEER: 1 << 24})
    rig = build_rig(driver, replace(RECORDS, peer_homes=3))
    rig.moved(rig.boundary.offload(3))
    assert geometry.host_homes == 0 and not rig.slab.hosted(0)
    driver.close()


def test_a_lazy_slab_backs_layer_by_layer() -> None:
    """What a model gives back for one layer is enough for the next; a layer without room leaves no page."""
    size = DENSE.slab(PAGE)
    layer_bytes = size.groups * size.group_bytes
    driver = HostDriver(PAGE, budgets={Tier.HBM: layer_bytes + PAGE, Tier.HOST: 1 << 30})
    slab = ExpertSlab(driver, PageLedger(size.page_bytes), size, lazily=True)
    assert slab.ledger.count(OwnerKind.EXPERT) == slab.ledger.count(OwnerKind.HOME) == 0
    slab.back()
    before = driver.usage()
    assert slab.ledger.count(OwnerKind.EXPERT) * size.page_bytes == layer_bytes
    with pytest.raises(ConfigError, match="hbm: experts need"):
        slab.back()
    assert driver.usage() == before
    slab.close()
    assert driver.usage().handles == driver.usage().reservations == 0
    driver.close()


@pytest.mark.parametrize("abandoned", [False, True], ids=["restored", "abandoned"])
def test_a_home_that_steps_on_their_way_read_is_not_copied_over(rig: Rig, abandoned: bool) -> None:
    """A step that was launched before the group came back reads it at its home, also after that."""
    slab, layers = rig.slab, range(rig.geometry.layers)
    group = slab.coldest(0, 1)[0]
    expert = slab.experts_of(0, group)[0]
    if abandoned:
        slab.redirect(0, group)
    else:
        rig.moved(rig.boundary.offload(1))
        slab.refresh_homes(0)
    slot, homes = slab.slot_table[0][expert], [slab.home_of(layer, group) for layer in layers]
    read = rig.driver.read(slab.address(0, 0, slot), rig.geometry.part_bytes[0])
    if abandoned:
        slab.point_back(0, group)
    else:
        rig.moved(rig.boundary.restore(1))
    reverse_coldness(rig)
    assert slab.refresh_homes(1 << 40) > 0
    assert slab.home_of(0, group) == homes[0]
    assert rig.driver.read(slab.address(0, 0, slot), rig.geometry.part_bytes[0]) == read
    slab.refresh_homes(1 << 40)
    assert slab.home_of(0, group) is None, "by the next look those steps have ended"
    rig.check()
