"""Staging ahead of a layer, on the host driver: real pages, real copies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rigs import DENSE, RECORDS, Rig, Shape, build_rig

from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.region import RegionCopies, StagedRegion, buffer_groups, plan_region

CPU = torch.device("cpu")
ROOMY = Shape("roomy", layers=5, experts=9, halves=(3,), ratio=1.0, positions=1, staging=20)
TIGHT = Shape("tight", layers=3, experts=8, halves=(2,), ratio=1.0, positions=1, staging=4)
PARTS = Shape("parts", layers=4, experts=6, halves=(4, 2), ratio=0.9, positions=1, staging=6)


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(4096)
    yield driver
    driver.close()


def plans(rig: Rig) -> list[StagedRegion]:
    return [plan_region(rig.slab, layer) for layer in range(rig.geometry.layers)]


def poison(rig: Rig) -> None:
    for part, size in enumerate(rig.geometry.part_bytes):
        nbytes = rig.geometry.staging_records * size
        rig.driver.write(rig.slab.address(0, part, rig.geometry.own_slots), b"\xff" * nbytes)


def take_a_step(rig: Rig, copies: RegionCopies, regions: list[StagedRegion]) -> int:
    """Every layer in turn reads its staged experts; how many it read."""
    read = 0
    for layer, region in enumerate(regions):
        copies.enter(layer)
        for expert, slot in region.slots.items():
            assert rig.expert(layer, expert, slot) == rig.weights[layer][expert]
            read += 1
        copies.leave(layer)
    return read


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from([ROOMY, TIGHT, PARTS]),
    peer=st.integers(0, 4),
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 1 << 16)), max_size=6),
)
def test_every_step_reads_this_layers_experts(
    shape: Shape, peer: int, moves: list[tuple[bool, int, int]]
) -> None:
    driver = HostDriver(4096, dict.fromkeys(Tier, 1 << 24))
    rig = build_rig(driver, replace(shape, peer_homes=peer))
    geometry, slab = rig.geometry, rig.slab
    copies = RegionCopies(slab, driver, CPU)
    for offload, levels, seed in [(True, 1, 0), *moves]:
        groups = list(range(geometry.movable_groups))
        for layer in range(geometry.layers):
            random.Random(seed + layer).shuffle(groups)
            slab.set_coldness(layer, groups)
        slab.refresh_homes(1 << 40)
        move = rig.boundary.offload if offload else rig.boundary.restore
        move(levels)
        regions = plans(rig)
        copies.follow([region.copies for region in regions])
        for _ in range(2):
            poison(rig)
            assert take_a_step(rig, copies, regions) == sum(len(region.slots) for region in regions)
            rig.check()
        for layer, region in enumerate(regions):
            on_host = {group for group in slab.out(layer) if (slab.home_of(layer, group) or 0) >= peer}
            hosted = {expert for group in on_host for expert in slab.experts_of(layer, group)}
            assert len(region.slots) + region.left == len(hosted) and hosted.issuperset(region.slots)
            assert len(region.slots) == min(len(hosted), buffer_groups(slab) * geometry.group)
            assert len(set(region.slots.values())) == len(region.slots)
    rig.close()
    driver.close()


def test_neighbours_use_different_buffers(driver: HostDriver) -> None:
    rig = build_rig(driver, ROOMY)
    rig.moved(rig.boundary.offload(4))
    geometry = rig.geometry
    used = [set(region.slots.values()) for region in plans(rig)]
    assert all(used) and used[0].isdisjoint(used[1]) and used[0] == used[2] and used[1] == used[3]
    assert set().union(*used) <= set(range(geometry.own_slots, geometry.home_slot_base))


def test_homes_side_by_side_are_one_copy(driver: HostDriver) -> None:
    rig = build_rig(driver, ROOMY)
    rig.moved(rig.boundary.offload(4))
    (copy,) = plans(rig)[0].copies
    assert copy.records == 8 and copy.source == rig.geometry.home_slot_base
    assert copy.target == rig.geometry.own_slots


def test_the_warmest_are_staged_where_not_all_fit(driver: HostDriver) -> None:
    rig = build_rig(driver, TIGHT)
    rig.moved(rig.boundary.offload(5))
    assert buffer_groups(rig.slab) == 2
    for layer, region in enumerate(plans(rig)):
        assert sorted(region.slots) == sorted(rig.slab.out(layer)[-2:]) and region.left == 3


def test_a_group_on_its_way_out_is_staged_too(driver: HostDriver) -> None:
    rig = build_rig(driver, RECORDS)
    group = rig.slab.ready(0, 1)[0]
    rig.slab.redirect(0, group)
    region = plan_region(rig.slab, 0)
    assert sorted(region.slots) == sorted(rig.slab.experts_of(0, group)) and region.left == 0
    rig.slab.point_back(0, group)
    assert plan_region(rig.slab, 0) == StagedRegion({}, (), 0)


def test_without_staging_records_all_is_left_in_place(driver: HostDriver) -> None:
    rig = build_rig(driver, DENSE)
    rig.moved(rig.boundary.offload(2))
    assert plans(rig) == [StagedRegion({}, (), 2)] * rig.geometry.layers


def test_a_step_cut_short_leaves_nothing_that_a_later_one_reads(driver: HostDriver) -> None:
    rig = build_rig(driver, ROOMY)
    copies = RegionCopies(rig.slab, driver, CPU)
    rig.moved(rig.boundary.offload(3))
    copies.follow([region.copies for region in plans(rig)])
    copies.enter(0)
    copies.leave(0)
    rig.moved(rig.boundary.restore(2))
    regions = plans(rig)
    copies.follow([region.copies for region in regions])
    poison(rig)
    assert take_a_step(rig, copies, regions) == rig.geometry.layers * rig.geometry.group
