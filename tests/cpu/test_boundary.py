from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.boundary_suite import EVERY_CALL, MAPPING, OFFLOAD, RESTORE, BoundarySuite, PeerSuite, move
from support.deferring import DeferringDriver
from support.faulty import FaultyDriver
from support.hashed_moves import move_and_compare
from support.rigs import SHAPES, Rig, Shape, build_rig

from vamp_kernels import ranges
from vamp_runtime.errors import DriverError, IntegrityError
from vamp_runtime.memory.boundary import MoveKind
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.ledger import Owner, OwnerKind
from vamp_runtime.memory.move import Swap


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(4096)
    yield driver
    driver.close()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_hundred_moves_leave_every_expert(driver: HostDriver, shape: Shape) -> None:
    move_and_compare(build_rig(driver, shape), torch.device("cpu"), moves=100)


class TestBoundary(BoundarySuite):
    def footprint(self, rig: Rig) -> object:
        gc.collect()
        files = len(os.listdir("/proc/self/fd"))
        regions = len(Path("/proc/self/maps").read_text().splitlines())
        return rig.driver.usage(), files, regions


class TestBoundaryWithCopiesPutOff(BoundarySuite):
    cycles = 20

    @pytest.fixture
    def driver(self, driver: HostDriver) -> DeferringDriver:
        return DeferringDriver(driver)


class TestBoundaryWithPeerHomes(PeerSuite, BoundarySuite):
    cycles = 20

    @pytest.fixture
    def driver(self) -> Iterator[DeferringDriver]:
        driver = HostDriver(4096, dict.fromkeys(Tier, 1 << 24))
        yield DeferringDriver(driver)
        driver.close()


def test_a_lost_page_is_found(driver: HostDriver) -> None:
    rig = build_rig(driver, SHAPES[0])
    page = rig.ledger.pages(Owner(OwnerKind.EXPERT, 1, 2))[0]
    rig.ledger.move([page], Owner(OwnerKind.EXPERT, 1, 2), Owner(OwnerKind.FREE))
    with pytest.raises(IntegrityError, match="layer 1: groups \\(\\) are out"):
        rig.boundary.check_integrity()


def test_a_page_the_kv_cache_gave_away_by_itself_is_found(driver: HostDriver) -> None:
    rig = build_rig(driver, SHAPES[0])
    rig.region._drop(1)
    with pytest.raises(IntegrityError, match="the KV cache has 7 pages at level 0"):
        rig.boundary.check_integrity()


def test_the_phases_of_a_move_stand_in_their_ranges(driver: HostDriver) -> None:
    rig, seen = build_rig(driver, SHAPES[0]), []

    @contextmanager
    def named(name: str) -> Iterator[None]:
        seen.append(name)
        yield
        seen.append("/")

    ranges.install(named)
    try:
        assert rig.boundary.offload(1).ok
        assert not rig.boundary.restore(9).ok
        rig.slab.refresh_homes(0)
        assert list(rig.boundary.cover_ahead(0)) == []
    finally:
        ranges.install(None)
    walk = "move request / redirect / prepare / agree / {} / / "
    assert " ".join(seen) == walk.format("publish") + walk.format("abandon") + "home refresh / cover ahead /"


faults = st.one_of(st.just(0), st.integers(1, 40))


class Moves(RuleBasedStateMachine):
    """Any sequence of moves, claims and changes of coldness, held against a few lines of arithmetic.

    Any driver call of a move, or of covering ahead of one, may be refused.
    """

    @initialize(
        shape=st.sampled_from(SHAPES),
        ratio=st.sampled_from([0.3, 0.7, 1.0]),
        homes=st.integers(0, 9),
        spare=st.integers(0, 1),
        peer=st.integers(0, 6),
    )
    def build(self, shape: Shape, ratio: float, homes: int, spare: int, peer: int) -> None:
        self.driver = FaultyDriver(HostDriver(4096, dict.fromkeys(Tier, 1 << 24)))
        self.driver.counted = EVERY_CALL
        shape = replace(shape, ratio=ratio, spare_homes=spare)
        shape = replace(shape, peer_homes=min(peer, shape.slab(4096).home_slots))
        budget = homes * shape.slab(4096).group_bytes
        self.rig = build_rig(self.driver, shape, homes=budget)
        self.level = 0

    @rule(
        kind=st.sampled_from([OFFLOAD, RESTORE]), levels=st.integers(0, 3), cordon=st.booleans(), fault=faults
    )
    def move(self, kind: MoveKind, levels: int, cordon: bool, fault: int) -> None:
        rig, geometry, region = self.rig, self.rig.geometry, self.rig.region
        claimed = region.claimed // 2 if cordon and kind is RESTORE else region.claimed
        held = region.geometry.pages_for_blocks(claimed)
        kept = rig.kv_pages()[:held]
        layers = range(geometry.layers)
        if kind is OFFLOAD:
            room = self.level + levels <= geometry.max_level
            possible = room and all(len(rig.slab.ready(layer, levels)) == levels for layer in layers)
        else:
            possible = levels <= self.level and held <= region.pages - levels * geometry.pages_per_level
        with self.refusing(fault):
            outcome = rig.boundary.run(move(rig.boundary, kind, levels, claimed))
        assert outcome.ok is (possible and levels > 0) or (self.refused and not outcome.ok), outcome.reason
        if outcome.ok:
            self.level += levels if kind is OFFLOAD else -levels
            assert region.claimed == claimed
        assert outcome.level == self.level
        assert rig.kv_pages()[:held] == kept

    @rule(
        pairs=st.lists(st.tuples(*[st.integers(0, 5)] * 2), min_size=2, max_size=2),
        alone=st.booleans(),
        fault=faults,
    )
    def swap(self, pairs: list[tuple[int, int]], alone: bool, fault: int) -> None:
        rig, kv = self.rig, self.rig.kv_pages()
        asked = [Swap(layer, *pair) for layer, pair in enumerate(pairs)][alone:]
        out = [list(rig.slab.out(layer)) for layer in range(2)]
        possible = all(
            pair.returning in out[pair.layer]
            and pair.leaving not in out[pair.layer]
            and rig.slab.home_of(pair.layer, pair.leaving) is not None
            for pair in asked
        )
        with self.refusing(fault):
            outcome = rig.boundary.swap(asked)
        assert outcome.ok is possible or (self.refused and not outcome.ok), outcome.reason
        for pair in asked if outcome.ok else ():
            out[pair.layer][out[pair.layer].index(pair.returning)] = pair.leaving
        assert [list(rig.slab.out(layer)) for layer in range(2)] == out
        assert outcome.level == self.level and rig.kv_pages() == kv

    @rule(levels=st.integers(0, 4), slice_pages=st.integers(1, 9), turns=st.integers(0, 9), fault=faults)
    def cover(self, levels: int, slice_pages: int, turns: int, fault: int) -> None:
        before, covered = self.rig.snapshot(), []
        with self.refusing(fault), suppress(DriverError):
            covered += islice(self.rig.boundary.cover_ahead(levels, slice_pages), turns)
        assert all(1 <= pages <= slice_pages for pages in covered)
        assert self.rig.snapshot() == before

    @rule(levels=st.integers(1, 3))
    def come_and_go(self, levels: int) -> None:
        """What lies where it goes is not mapped again, in however many moves it goes and comes back."""
        rig, boundary, geometry = self.rig, self.rig.boundary, self.rig.geometry
        levels = min(levels, geometry.max_level - self.level)
        if min(len(rig.slab.ready(layer, levels)) for layer in range(geometry.layers)) < max(levels, 1):
            return
        assert sum(boundary.cover_ahead(levels)) <= levels * geometry.pages_per_level
        with self.refusing(0):
            assert boundary.offload(levels).ok
            assert all(boundary.restore(1).ok for _ in range(levels))
            rig.check()
            assert all(boundary.offload(1).ok for _ in range(levels))
            assert boundary.restore(levels).ok
            called = set(self.driver.log)
        assert rig.slab._records.mirror or boundary.strict or called.isdisjoint(MAPPING)

    @rule()
    def unmap_strays(self) -> None:
        self.rig.boundary.clear()
        assert not self.rig.strays()

    @rule(share=st.floats(0, 1))
    def claim(self, share: float) -> None:
        self.rig.region.claim(round(share * self.rig.region.blocks))

    @rule(seed=st.integers(0, 9))
    def serve(self, seed: int) -> None:
        self.rig.dirty_kv(seed)

    @rule(data=st.data(), budget=st.integers(0, 5))
    def follow_coldness(self, data: st.DataObject, budget: int) -> None:
        for layer in range(self.rig.geometry.layers):
            groups = data.draw(st.permutations(range(self.rig.geometry.movable_groups)))
            self.rig.slab.set_coldness(layer, groups)
        nbytes = budget * self.rig.geometry.group_bytes
        assert self.rig.slab.refresh_homes(nbytes) <= nbytes

    @contextmanager
    def refusing(self, fault: int) -> Iterator[None]:
        """Inside, the ``fault``-th driver call is refused; whether there was one is known afterwards."""
        self.driver.arm(fault)
        yield
        self.refused, self.driver.fail_at = 0 < fault <= self.driver.counter, 0

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()
            usage = self.driver.usage()
            assert (usage.reservations, usage.mappings, usage.handles) == (0, 0, 0)
            self.driver.close()


TestMoves = Moves.TestCase
TestMoves.settings = settings(
    max_examples=50, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
