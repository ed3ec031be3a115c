"""Experts whose homes lie in a peer are read in place, as in HBM, and never count as the host's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.rigs import RECORDS, Rig, build_rig

from vamp_integration.host_reads import experts_in
from vamp_integration.moe_kernel import SlotTables
from vamp_integration.staging import Staging
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.policy.staging import StagingCosts

CPU = torch.device("cpu")
# Groups of two experts: 3 and 2 leave first and have homes on the host, 1 has one in the peer.
MIXED = replace(RECORDS, peer_homes=1, staging=12)
COSTS = StagingCosts(
    experts=9,
    top_k=2,
    expert_bytes=6144,
    weight_bytes=2,
    hbm_rate=1e15,
    read_rate=1e6,
    copy_rate=1e6,
    compute_rate=1e18,
    token_s=1.0,
)


@pytest.fixture
def rig() -> Iterator[Rig]:
    driver = HostDriver(4096, dict.fromkeys(Tier, 1 << 24))
    yield build_rig(driver, MIXED)
    driver.close()


def test_the_kernel_is_told_of_host_experts_only(rig: Rig) -> None:
    tables = SlotTables(rig.slab, CPU)
    for level, hosted in ((1, {6, 7}), (2, {4, 5, 6, 7}), (3, {4, 5, 6, 7})):
        assert rig.boundary.offload(1).ok
        tables.update()
        assert tables.slots.tolist() == rig.table
        for row, slots in zip(tables.hosted, rig.slab.slot_table, strict=True):
            assert set(row.nonzero().flatten().tolist()) == hosted
            out = {expert for expert, slot in enumerate(slots) if slot >= rig.geometry.home_slot_base}
            assert len(out) == 2 * level and out >= hosted


def test_reads_are_told_apart(rig: Rig) -> None:
    assert rig.boundary.offload(3).ok
    assert experts_in(rig.slab, Tier.HOST) == [[4, 5, 6, 7]] * 2
    assert experts_in(rig.slab, Tier.PEER) == [[2, 3]] * 2


@pytest.mark.parametrize("by_record", [False, True], ids=["vamp", "vllm"])
def test_a_staged_step_reads_the_peer_in_place(rig: Rig, by_record: bool) -> None:
    staging = Staging(rig.slab, rig.driver, CPU, "region", COSTS, 64, by_record)
    assert rig.boundary.offload(3).ok
    staging.update()
    assert staging.wanted(1) and staging.needs_host_code and not staging.hosted.any()
    geometry, poison = rig.geometry, b"\xff" * rig.geometry.staging_records * rig.geometry.expert_bytes
    rig.driver.write(rig.slab.address(0, 0, geometry.own_slots), poison)
    for layer in range(geometry.layers):
        with staging.ahead(layer, tokens=1):
            for expert, slot in enumerate(staging.slots[layer].tolist()):
                assert rig.expert(layer, expert, slot) == rig.weights[layer][expert]
                assert (geometry.own_slots <= slot < geometry.home_slot_base) is (expert in (4, 5, 6, 7))
                in_place = rig.slab.record(layer, expert) if by_record else rig.slab.slot_table[layer][expert]
                assert slot == in_place or expert in (4, 5, 6, 7)


def test_with_all_homes_in_the_peer_no_step_is_staged() -> None:
    driver = HostDriver(4096, dict.fromkeys(Tier, 1 << 24))
    rig = build_rig(driver, replace(MIXED, peer_homes=3))
    staging = Staging(rig.slab, driver, CPU, "region", COSTS, 64)
    assert rig.boundary.offload(3).ok
    for mode in ("region", "auto"):
        staging.choose(mode)
        assert not staging.needs_host_code and staging.staged_from is None and not staging.wanted(64)
    staging.learn([[9] * 9] * 2)
    assert staging.staged_from is None
    driver.close()
