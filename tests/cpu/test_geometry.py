from __future__ import annotations

import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.geometry import KVGeometry, SlabGeometry

MIB = 1 << 20


@pytest.mark.parametrize(
    ("expert_mib", "group"), [(6, 1), (3, 2), (1.5, 4), (0.75, 8)], ids=["TP1", "TP2", "TP4", "fp8 TP4"]
)
def test_groups_of_qwen3_next(expert_mib: float, group: int) -> None:
    geometry = SlabGeometry.plan(48, 512, (int(expert_mib * MIB),), 2 * MIB, 0.15)
    assert (geometry.group, geometry.page_bytes, geometry.pages_per_group) == (group, 6 * MIB, 1)
    assert geometry.max_level == geometry.home_slots == int(76.8 / group)
    assert geometry.pages_per_level == 48
    assert geometry.home_slot_base == 512
    assert geometry.reservation_bytes(0) == (512 + geometry.max_level * group) * geometry.expert_bytes


def test_two_dense_parts_share_a_page_size() -> None:
    geometry = SlabGeometry.plan(8, 16, (131072, 65536), 65536, 0.25)
    assert (geometry.group, geometry.page_bytes, geometry.pages_per_group) == (1, 65536, 3)
    assert (geometry.parts, geometry.expert_bytes, geometry.part_group_bytes(0)) == (2, 196608, 131072)
    assert (geometry.max_level, geometry.slots, geometry.pages_per_level) == (4, 20, 24)


def test_short_last_group_is_padded_and_stays() -> None:
    geometry = SlabGeometry.plan(2, 10, (3072,), 4096, 1.0, staging_records=5)
    assert (geometry.group, geometry.groups, geometry.movable_groups) == (4, 3, 2)
    assert (geometry.own_slots, geometry.staging_records, geometry.home_slot_base) == (12, 8, 20)
    assert (geometry.max_level, geometry.slots) == (2, 28)


@pytest.mark.parametrize(
    ("gib", "homes"), [(0, 0), (0.14, 0), (0.141, 1), (3.0, 21), (7.2, 51), (7.25, 51), (100, 51)]
)
def test_a_peer_holds_as_many_homes_of_every_layer_as_fit(gib: float, homes: int) -> None:
    geometry = SlabGeometry.plan(24, 512, (6 * MIB,), 2 * MIB, 0.1, peer_bytes=int(gib * 2**30))
    assert (geometry.max_level, geometry.peer_homes, geometry.host_homes) == (51, homes, 51 - homes)
    assert geometry.peer_home_bytes == homes * 24 * 6 * MIB <= max(gib * 2**30, 0)
    assert geometry.peer_home_bytes + geometry.host_home_bytes == 51 * 24 * 6 * MIB
    assert geometry.host_slot_base == geometry.home_slot_base + homes
    assert geometry.slots == geometry.host_slot_base + geometry.host_homes


@pytest.mark.parametrize("ratio", [-0.1, 1.01, math.nan])
def test_ratio_outside_0_to_1_is_an_error(ratio: float) -> None:
    with pytest.raises(ConfigError, match=f"max_offload_ratio={ratio}: .* 0.15 would work"):
        SlabGeometry.plan(2, 8, (4096,), 4096, ratio)


def test_ratio_is_taken_as_written() -> None:
    assert SlabGeometry.plan(1, 100, (4096,), 4096, 0.29).max_level == 29


@pytest.mark.parametrize(
    ("parts", "granularity"),
    [
        ((1000, 24), 4096),
        ((2 * MIB + 4096,), 2 * MIB),
        ((40 * MIB, 3 * MIB), 2 * MIB),
        ((100 * MIB,), 2 * MIB),
    ],
)
def test_groups_too_large_are_an_error_that_knows_a_way(parts: tuple[int, ...], granularity: int) -> None:
    with pytest.raises(ConfigError, match="would work") as error:
        SlabGeometry.plan(2, 64, parts, granularity, 0.5)
    message = str(error.value)
    assert "\n" not in message and f"granularity={granularity}" in message
    if found := re.search(r"a granularity of (\d+) would work", message):
        SlabGeometry.plan(2, 64, parts, int(found[1]), 0.5)
    else:
        times = int(re.search(r"(\d+) times the tensor parallel size", message)[1])
        SlabGeometry.plan(2, 64, tuple(part // times for part in parts), granularity, 0.5)


@given(record=st.integers(1, 300 * 128).map(lambda n: n * 4096), granule=st.sampled_from([65536, 2 * MIB]))
def test_padding_makes_whole_pages_of_any_record(record: int, granule: int) -> None:
    geometry = SlabGeometry.plan(2, 64, (record,), granule, 0.25, pad=True)
    assert geometry.expert_bytes == record + geometry.padding_bytes
    assert geometry.group_bytes % granule == 0 and geometry.padding_bytes < granule
    assert geometry.group == 1 or geometry.group_bytes <= 64 * MIB
    try:
        unpadded = SlabGeometry.plan(2, 64, (record,), granule, 0.25)
    except ConfigError:
        assert geometry.padding_bytes or geometry.group == 1
    else:
        assert geometry == unpadded


@given(
    experts=st.integers(1, 70),
    parts=st.lists(st.integers(1, 40).map(lambda n: n * 512), min_size=1, max_size=3),
    ratio=st.floats(0, 1),
    staging=st.integers(0, 5),
)
def test_plans_are_whole_pages_everywhere(experts: int, parts: list[int], ratio: float, staging: int) -> None:
    geometry = SlabGeometry.plan(3, experts, tuple(parts), 4096, ratio, staging)
    smaller = [g for g in range(1, geometry.group) if all(g * part % 4096 == 0 for part in parts)]
    assert not smaller, "a smaller group would do"
    assert geometry.max_level * geometry.group <= ratio * experts + 1e-6
    assert geometry.max_level <= geometry.movable_groups
    assert geometry.staging_records >= staging
    assert geometry.pages_per_group * geometry.page_bytes == geometry.group_bytes
    for part, size in enumerate(parts):
        for slot in (geometry.own_slots, geometry.home_slot_base, geometry.slots, geometry.group):
            assert slot * size % geometry.page_bytes == 0
        assert geometry.reservation_bytes(part) % 4096 == 0


def test_position_that_is_no_whole_pages_is_an_error_that_knows_a_way() -> None:
    with pytest.raises(ConfigError, match=r"position_stride=98304: .* 196608 \(2 blocks\) would work"):
        KVGeometry(2, 98304, 98304, 1, 65536)
    KVGeometry(2, 98304, 196608, 2, 65536)


def test_position_too_short_for_its_blocks_is_an_error_that_knows_a_way() -> None:
    with pytest.raises(ConfigError, match=r"virtual_blocks=5: .*; 4 would work"):
        KVGeometry(1, 16384, 65536, 5, 65536)


kv_geometries = st.builds(
    lambda positions, block, page, pages, share: KVGeometry(
        positions, block, pages * page, int(pages * page // block * share), page
    ),
    st.integers(1, 4),
    st.integers(1, 50),
    st.integers(1, 24),
    st.integers(1, 12),
    st.floats(0, 1),
)


def deal(geometry: KVGeometry, pages: int) -> list[int]:
    """Pages of each position: each page goes to the position with the fewest, the first of them."""
    held = [0] * geometry.positions
    for _ in range(pages):
        held[held.index(min(held))] += 1
    return held


def blocks_by_bytes(geometry: KVGeometry, pages: int) -> int:
    """Blocks of which every byte is backed in every position, counted byte by byte from block 0."""
    backed = [set(range(held * geometry.page_bytes)) for held in deal(geometry, pages)]
    stride = geometry.block_stride
    for block in range(geometry.virtual_blocks):
        wanted = range(block * stride, (block + 1) * stride)
        if not all(there.issuperset(wanted) for there in backed):
            return block
    return geometry.virtual_blocks


@given(geometry=kv_geometries, data=st.data())
def test_blocks_for_pages_is_what_counting_bytes_says(geometry: KVGeometry, data: st.DataObject) -> None:
    pages = data.draw(st.integers(0, geometry.max_pages))
    assert geometry.blocks_for_pages(pages) == blocks_by_bytes(geometry, pages)


@given(geometry=kv_geometries, data=st.data())
def test_pages_for_blocks_is_the_fewest_that_do(geometry: KVGeometry, data: st.DataObject) -> None:
    blocks = data.draw(st.integers(0, geometry.virtual_blocks))
    counts = range(geometry.max_pages + 1)
    fewest = next(pages for pages in counts if geometry.blocks_for_pages(pages) >= blocks)
    assert geometry.pages_for_blocks(blocks) == fewest


@given(geometry=kv_geometries, data=st.data())
def test_page_ranges_cover_exactly_the_pages(geometry: KVGeometry, data: st.DataObject) -> None:
    last = data.draw(st.integers(0, geometry.max_pages))
    first = data.draw(st.integers(0, last))
    assume(first < last)
    page = geometry.page_bytes
    covered = [
        offset + n * page for offset, size in geometry.page_ranges(first, last) for n in range(size // page)
    ]
    assert sorted(covered) == sorted(geometry.page_offset(each) for each in range(first, last))
    assert len(geometry.page_ranges(first, last)) <= geometry.positions
    held = deal(geometry, last)
    tails = {
        position * geometry.position_stride + held[position] * page for position in range(geometry.positions)
    }
    assert {offset + size for offset, size in geometry.page_ranges(first, last)} <= tails
