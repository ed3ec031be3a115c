"""What the boundary must do on every driver. A test file subclasses the suites and gives them ``driver``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress

import pytest

from support.faulty import CALLS, FaultyDriver
from support.rigs import BARE, PEER_SHAPES, RECORDS, SHAPES, Rig, Shape, build_rig
from vamp_runtime.errors import DriverError, IntegrityError, StateLost
from vamp_runtime.memory.agreement import Vote
from vamp_runtime.memory.boundary import Boundary, Move, MoveKind
from vamp_runtime.memory.driver import DriverUsage, MemoryDriver, Tier
from vamp_runtime.memory.ledger import Owner, OwnerKind
from vamp_runtime.memory.move import Swap

OFFLOAD, RESTORE, SWAP = MoveKind.OFFLOAD, MoveKind.RESTORE, MoveKind.SWAP
MAPPING = frozenset({"map", "set_access", "unmap"})
EVERY_CALL = CALLS | {"mark", "wait"}
EMPTY = DriverUsage(reservations=0, mappings=0, handles=0)


def move(boundary: Boundary, kind: MoveKind, levels: int, claimed: int | None = None) -> Move:
    """The next move of ``levels`` levels, or a swap in every layer where groups can be swapped."""
    blocks = boundary.region.claimed if claimed is None else claimed
    if kind is not SWAP:
        return Move(boundary.epoch + 1, kind, levels, boundary.slab.level, blocks)
    return Move(boundary.epoch + 1, kind, 0, boundary.slab.level, blocks, swaps(boundary))


def swaps(boundary: Boundary) -> tuple[Swap, ...]:
    """In every layer, the coldest group that may leave for the one that left first."""
    slab = boundary.slab
    return tuple(
        Swap(layer, slab.ready(layer, 1)[0], slab.out(layer)[0]) for layer in range(slab.geometry.layers)
    )


def reverse_coldness(rig: Rig) -> None:
    """Make the coldest groups the hottest, in every layer."""
    for layer in range(rig.geometry.layers):
        rig.slab.set_coldness(layer, range(rig.geometry.movable_groups))


def stale(rig: Rig) -> None:
    """From level 0 to level 1, where every kind of move finds other pages than it needs where it maps.

    The group that is out has got another's page, and the next to leave is not the one that came back last.
    """
    rig.moved(rig.boundary.offload(2))
    rig.moved(rig.boundary.swap(swaps(rig.boundary)))
    rig.moved(rig.boundary.restore(1))
    reverse_coldness(rig)
    for _ in range(2):  # the homes of those that are back stay for one
        rig.slab.refresh_homes(1 << 40)


def away(rig: Rig, layer: int) -> set[int]:
    """Experts that the slot table reads at a home alias; all others it reads at their own records."""
    row = rig.slab.slot_table[layer]
    found = {expert for expert, slot in enumerate(row) if slot != rig.slab.record(layer, expert)}
    assert all(rig.geometry.home_slot_base <= row[expert] < rig.geometry.slots for expert in found)
    return found


class Refusing:
    """An agreement in which some other rank always votes against."""

    def all_agree(self, vote: Vote) -> bool:
        return False


class Silent:
    """An agreement in which some other rank never answers."""

    def all_agree(self, vote: Vote) -> bool:
        raise StateLost("a rank did not answer")


class RigSuite:
    """Fixture to provide: ``driver``, with nothing in it and room for any rig."""

    @pytest.fixture(params=SHAPES, ids=lambda shape: shape.name)
    def shape(self, request: pytest.FixtureRequest) -> Shape:
        found: Shape = request.param
        return found

    @pytest.fixture
    def rig(self, driver: MemoryDriver, shape: Shape) -> Rig:
        return build_rig(driver, shape)


class PeerSuite(RigSuite):
    """A ``RigSuite`` whose homes lie in a peer and on the host; mixed in before the suite to run."""

    @pytest.fixture(params=PEER_SHAPES, ids=lambda shape: shape.name)
    def shape(self, request: pytest.FixtureRequest) -> Shape:
        found: Shape = request.param
        return found


# Moves that must be refused, and a word of the reason. A rig at level 1 of 3, half of its blocks claimed.
REFUSALS: dict[str, tuple[Callable[[Rig], Move], str]] = {
    "above max_level": (lambda rig: move(rig.boundary, OFFLOAD, 3), "level"),
    "below 0": (lambda rig: move(rig.boundary, RESTORE, 2), "level"),
    "no levels": (lambda rig: move(rig.boundary, OFFLOAD, 0), "level"),
    "negative levels": (lambda rig: move(rig.boundary, RESTORE, -1), "level"),
    "claimed blocks in the way": (lambda rig: move(rig.boundary, RESTORE, 1, rig.region.blocks), "claimed"),
    "more claimed than backed": (
        lambda rig: move(rig.boundary, OFFLOAD, 1, rig.region.blocks + 1),
        "claimed",
    ),
    "an epoch skipped": (
        lambda rig: dataclasses.replace(move(rig.boundary, OFFLOAD, 1), epoch=rig.boundary.epoch + 2),
        "epoch",
    ),
    "an old epoch": (
        lambda rig: dataclasses.replace(move(rig.boundary, OFFLOAD, 1), epoch=rig.boundary.epoch),
        "epoch",
    ),
    "another level": (
        lambda rig: dataclasses.replace(move(rig.boundary, OFFLOAD, 1), level_before=0),
        "level",
    ),
    "nothing to swap": (lambda rig: dataclasses.replace(move(rig.boundary, SWAP, 0), swaps=()), "0 pairs"),
    "a swap that offloads": (
        lambda rig: dataclasses.replace(move(rig.boundary, SWAP, 0), levels=1),
        "1 levels and 2 pairs",
    ),
    "an offload that swaps": (
        lambda rig: dataclasses.replace(move(rig.boundary, OFFLOAD, 1), swaps=swaps(rig.boundary)),
        "1 levels and 2 pairs",
    ),
    "no such layer": (lambda rig: swapping(rig, layer=2), "layers [0, 2]"),
    "a layer twice": (lambda rig: swapping(rig, layer=0), "layers [0, 0]"),
    "a group that is in": (lambda rig: swapping(rig, returning=0), "layer 1: group 0 is not out"),
    "a group that is out": (
        lambda rig: swapping(rig, leaving=rig.slab.out(1)[0]),
        "is not in HBM with a valid home",
    ),
    "a group without home": (lambda rig: swapping(rig, leaving=0), "layer 1: group 0 is not in HBM with"),
    "no such group": (lambda rig: swapping(rig, leaving=99), "layer 1: group 99 is not in HBM with"),
}


def swapping(rig: Rig, **changes: int) -> Move:
    """A swap in both layers, the second with ``changes``."""
    first, second = swaps(rig.boundary)
    return dataclasses.replace(
        move(rig.boundary, SWAP, 0), swaps=(first, dataclasses.replace(second, **changes))
    )


class BoundarySuite(RigSuite):
    cycles = 500

    def test_pages_go_to_the_kv_tail_and_come_back(self, rig: Rig, shape: Shape) -> None:
        rig.dirty_kv()
        before, kv, geometry = rig.snapshot(), rig.kv_pages(), rig.geometry
        outcome = rig.moved(rig.boundary.offload(2))
        pages = 2 * geometry.pages_per_level
        assert (outcome.level, outcome.epoch, outcome.reason) == (2, 1, "")
        assert (outcome.bytes_moved, outcome.copied_bytes) == (pages * geometry.page_bytes, 0)
        assert rig.region.pages == before.pages + pages
        assert outcome.blocks == rig.region.geometry.blocks_for_pages(rig.region.pages)
        # The homes now may lie behind the experts' own addresses as well, a mapping more for each page.
        assert not any(0 in rig.slab.out(layer) for layer in range(geometry.layers))
        mappings = before.usage.mappings + (pages if shape.mirror else 0)
        assert rig.needed() == dataclasses.replace(before.usage, mappings=mappings)
        assert rig.kv_pages() == kv + [bytes(geometry.page_bytes)] * pages
        outcome = rig.moved(rig.boundary.restore(2))
        assert (outcome.level, outcome.epoch, outcome.reason) == (0, 2, "")
        assert outcome.bytes_moved == outcome.copied_bytes == pages * geometry.page_bytes
        assert rig.kv_pages() == kv
        # Pages are interchangeable: which of them lies behind a group now is free to differ.
        assert dataclasses.replace(rig.snapshot(), owners=before.owners) == before

    def test_something_always_lies_at_the_first_address(self, rig: Rig, shape: Shape) -> None:
        """The address of the tensor over a layer's records, which launches beside a move ask about too."""
        slab, geometry, driver = rig.slab, rig.geometry, rig.driver
        for layer in range(geometry.layers):
            slab.set_coldness(layer, range(geometry.groups))
        slab.refresh_homes(1 << 40)

        def look(*args: object) -> None:
            for layer in range(geometry.layers):
                for part in range(geometry.parts):
                    driver.read(slab.address(layer, part), geometry.part_bytes[part])

        rig.moved(rig.boundary.offload(geometry.max_level))
        look()
        assert all((0 in slab.out(layer)) is shape.mirror for layer in range(geometry.layers))
        unmap = driver.unmap
        with pytest.MonkeyPatch.context() as patch:
            if not shape.mirror:
                patch.setattr(driver, "unmap", lambda *args: (unmap(*args), look())[0])
            rig.moved(rig.boundary.restore(geometry.max_level))
            rig.moved(rig.boundary.offload(geometry.max_level))

    def test_a_swap_gives_a_groups_pages_to_another(self, rig: Rig) -> None:
        rig.moved(rig.boundary.offload(2))
        rig.dirty_kv()
        before, kv, pairs = rig.snapshot(), rig.kv_pages(), swaps(rig.boundary)
        stays = [rig.slab.out(layer)[1] for layer in range(rig.geometry.layers)]
        outcome = rig.moved(rig.boundary.swap(pairs))
        assert (outcome.level, outcome.blocks, outcome.reason) == (2, rig.region.blocks, "")
        assert outcome.bytes_moved == outcome.copied_bytes == len(pairs) * rig.geometry.group_bytes
        for layer, leaving, returning in map(dataclasses.astuple, pairs):
            # In the place of the one that returned: what left last still returns first.
            assert rig.slab.out(layer) == (leaving, stays[layer])
            old = before.owners[Owner(OwnerKind.EXPERT, layer, leaving)]
            assert rig.ledger.pages(Owner(OwnerKind.EXPERT, layer, returning)) == old
            wanted = {*rig.slab.experts_of(layer, leaving), *rig.slab.experts_of(layer, stays[layer])}
            assert away(rig, layer) == wanted
        after = rig.snapshot()
        assert (rig.kv_pages(), after.usage, after.experts) == (kv, before.usage, before.experts)
        rig.moved(rig.boundary.restore(2))

    def test_some_layers_may_swap_alone(self, rig: Rig) -> None:
        rig.moved(rig.boundary.offload(1))
        out = [rig.slab.out(layer) for layer in range(rig.geometry.layers)]
        pair = swaps(rig.boundary)[1]
        rig.moved(rig.boundary.swap([pair]))
        assert [rig.slab.out(layer) for layer in range(rig.geometry.layers)] == [out[0], (pair.leaving,)]

    def test_a_spare_home_lets_groups_swap_at_the_highest_level(
        self, driver: MemoryDriver, shape: Shape
    ) -> None:
        rig = build_rig(driver, dataclasses.replace(shape, spare_homes=1))
        top = shape.slab(driver.granularity).max_level
        assert (rig.geometry.max_level, rig.geometry.home_slots) == (top, top + 1)
        rig.moved(rig.boundary.offload(top))
        assert not rig.boundary.offload(1).ok
        for _ in range(3):
            rig.moved(rig.boundary.swap(swaps(rig.boundary)))
            reverse_coldness(rig)
            rig.slab.refresh_homes(1 << 40)
        rig.moved(rig.boundary.restore(top))

    def test_restored_experts_do_not_depend_on_what_kv_wrote(self, rig: Rig) -> None:
        rig.moved(rig.boundary.offload(3))
        rig.dirty_kv()
        rig.moved(rig.boundary.restore(2))
        rig.moved(rig.boundary.offload(1))
        pages = rig.geometry.pages_per_level
        assert rig.kv_pages()[-pages:] == [bytes(rig.geometry.page_bytes)] * pages

    def test_groups_leave_coldest_first_and_return_last_out_first(self, rig: Rig) -> None:
        coldest = [rig.slab.coldest(layer, 3) for layer in range(rig.geometry.layers)]
        rig.moved(rig.boundary.offload(1))
        rig.moved(rig.boundary.offload(2))
        assert [list(rig.slab.out(layer)) for layer in range(rig.geometry.layers)] == coldest
        rig.moved(rig.boundary.restore(2))
        assert [list(rig.slab.out(layer)) for layer in range(rig.geometry.layers)] == [
            groups[:1] for groups in coldest
        ]

    def test_slot_table_names_home_aliases_from_redirect_to_publish(self, rig: Rig) -> None:
        boundary, layers = rig.boundary, range(rig.geometry.layers)
        coldest = [set(rig.slab.experts_of(layer, *rig.slab.coldest(layer, 1))) for layer in layers]
        nobody: list[set[int]] = [set() for _ in layers]
        assert boundary.request(move(boundary, OFFLOAD, 1)) == ""
        assert [away(rig, layer) for layer in layers] == nobody
        boundary.redirect()
        for step in (boundary.prepare, boundary.agree, boundary.publish):
            assert [away(rig, layer) for layer in layers] == coldest
            rig.check()
            assert step()
        assert boundary.request(move(boundary, RESTORE, 1)) == ""
        boundary.redirect()
        for step in (boundary.prepare, boundary.agree, boundary.publish):
            assert [away(rig, layer) for layer in layers] == coldest
            rig.check()
            assert step()
        assert [away(rig, layer) for layer in layers] == nobody
        rig.check()

    @pytest.mark.parametrize("name", REFUSALS)
    def test_refusal_changes_nothing(self, rig: Rig, name: str) -> None:
        rig.moved(rig.boundary.offload(1))
        before, kv = rig.snapshot(), rig.kv_pages()
        make, word = REFUSALS[name]
        asked = make(rig)
        outcome = rig.boundary.run(asked)
        assert not outcome.ok and word in outcome.reason
        assert (outcome.level, outcome.blocks, outcome.bytes_moved) == (1, rig.region.blocks, 0)
        assert rig.boundary.epoch >= asked.epoch, "a refused epoch is consumed all the same"
        assert (rig.snapshot(), rig.kv_pages()) == (before, kv)
        rig.check()
        rig.moved(rig.boundary.offload(1))

    def test_group_without_home_cannot_leave(self, driver: MemoryDriver, shape: Shape) -> None:
        rig = build_rig(driver, shape, homes=0)
        before = rig.snapshot()
        outcome = rig.boundary.offload(1)
        assert not outcome.ok and "valid home" in outcome.reason
        assert rig.snapshot() == before
        rig.slab.refresh_homes(rig.geometry.layers * rig.geometry.group_bytes)
        rig.moved(rig.boundary.offload(1))
        assert not rig.boundary.offload(1).ok

    def test_home_given_away_after_the_request_is_a_refusal(self, rig: Rig) -> None:
        rig.boundary.request(move(rig.boundary, OFFLOAD, 3))
        reverse_coldness(rig)
        rig.slab.refresh_homes(rig.geometry.group_bytes)
        before = rig.snapshot()
        rig.boundary.redirect()
        assert not rig.boundary.prepare() and not rig.boundary.agree()
        assert "home" in rig.boundary.abandon().reason
        assert rig.snapshot() == before
        rig.check()

    @pytest.mark.parametrize("kind", list(MoveKind), ids=lambda kind: kind.value)
    @pytest.mark.parametrize("steps", [1, 2, 3])
    def test_abandon_restores_the_old_state(self, rig: Rig, kind: MoveKind, steps: int) -> None:
        rig.moved(rig.boundary.offload(1))
        rig.dirty_kv()
        before, kv, boundary = rig.snapshot(), rig.kv_pages(), rig.boundary
        walk = (lambda: boundary.request(move(boundary, kind, 1)), boundary.redirect, boundary.prepare)
        for step in walk[:steps]:
            step()
            rig.check()
        outcome = boundary.abandon("changed our mind")
        assert (outcome.ok, outcome.reason, outcome.bytes_moved) == (False, "changed our mind", 0)
        assert rig.snapshot() == before
        self.check_kv(rig, kv, zeroed=rig.geometry.pages_per_level if kind is RESTORE and steps == 3 else 0)
        rig.check()
        rig.moved(boundary.offload(1))
        rig.moved(boundary.restore(2))

    def test_abandoned_restore_claims_cordoned_blocks_again(self, rig: Rig) -> None:
        rig.moved(rig.boundary.offload(1))
        rig.region.claim(rig.region.blocks)
        before, boundary = rig.snapshot(), rig.boundary
        assert boundary.request(move(boundary, RESTORE, 1, claimed=1)) == ""
        boundary.redirect()
        assert boundary.prepare()
        boundary.abandon()
        assert dataclasses.replace(rig.snapshot(), owners=before.owners) == before
        rig.check()

    def test_another_rank_against_it_abandons(self, driver: MemoryDriver, shape: Shape) -> None:
        rig = build_rig(driver, shape, agreement=Refusing())
        before, kv = rig.snapshot(), rig.kv_pages()
        outcome = rig.boundary.offload(1)
        assert not outcome.ok and "another rank" in outcome.reason
        assert (rig.snapshot(), rig.kv_pages()) == (before, kv)
        rig.check()

    def test_silent_rank_loses_the_state(self, driver: MemoryDriver, shape: Shape) -> None:
        with pytest.raises(StateLost, match="did not answer"):
            build_rig(driver, shape, agreement=Silent()).boundary.offload(1)

    def test_homes_follow_the_coldest_groups_within_the_budget(self, rig: Rig, shape: Shape) -> None:
        slab, geometry, first = rig.slab, rig.geometry, 0 if shape.mirror else 1
        rig.moved(rig.boundary.offload(1))
        out = [slab.out(layer)[0] for layer in range(geometry.layers)]
        assert slab.refresh_homes(1 << 40) == 0
        reverse_coldness(rig)
        missing = [
            (layer, group)
            for layer in range(geometry.layers)
            for group in slab.coldest(layer, geometry.home_slots - 1)
            if slab.home_of(layer, group) is None
        ]
        assert slab.refresh_homes(geometry.group_bytes - 1) == 0
        assert slab.refresh_homes(geometry.group_bytes) == geometry.group_bytes
        assert slab.refresh_homes(1 << 40) == (len(missing) - 1) * geometry.group_bytes
        rig.check()
        for layer in range(geometry.layers):
            assert slab.home_of(layer, out[layer]) is not None
            assert slab.ready(layer, 9) == list(range(first, first + geometry.home_slots - 1))
        rig.moved(rig.boundary.offload(2))
        left = [(group, first, first + 1) for group in out]
        assert [slab.out(layer) for layer in range(geometry.layers)] == left

    def test_changed_byte_of_a_home_is_found(self, rig: Rig) -> None:
        rig.moved(rig.boundary.offload(1))
        layer, expert = 1, rig.slab.experts_of(1, rig.slab.out(1)[0])[-1]
        address = rig.slab.address(layer, 0, rig.slab.slot_table[layer][expert]) + 5
        rig.driver.write(address, bytes([rig.driver.read(address, 1)[0] ^ 1]))
        with pytest.raises(IntegrityError, match=f"layer {layer}, expert {expert}:"):
            rig.slab.verify_all()

    def test_record_order_decides_who_leaves(self, driver: MemoryDriver, shape: Shape) -> None:
        experts = range(shape.experts)
        order = [
            [(expert * 5 + layer) % shape.experts for expert in experts] for layer in range(shape.layers)
        ]
        rig = build_rig(driver, shape, order=order)
        rig.moved(rig.boundary.offload(2))
        for layer, row in enumerate(order):
            out, size = rig.slab.out(layer), rig.geometry.group
            assert away(rig, layer) == {expert for expert in experts if row[expert] // size in out}
            assert len(away(rig, layer)) == 2 * size
        rig.moved(rig.boundary.restore(1))

    def test_short_last_group_never_leaves(self, driver: MemoryDriver) -> None:
        rig = build_rig(driver, dataclasses.replace(RECORDS, ratio=1.0))
        geometry = rig.geometry
        assert (geometry.groups, geometry.movable_groups, geometry.max_level) == (5, 4, 4)
        rig.slab.set_coldness(0, [4, 0, 1, 2, 3])
        rig.moved(rig.boundary.offload(4))
        assert rig.slab.out(0) == (0, 1, 2, 3)
        assert rig.slab.slot_table[0][8] == 8

    def test_cycles_leave_nothing_behind(self, rig: Rig) -> None:
        rig.moved(rig.boundary.offload(1))
        rig.moved(rig.boundary.restore(1))
        before = self.footprint(rig)
        for _ in range(self.cycles):
            assert rig.boundary.offload(1).ok
            assert rig.boundary.restore(1).ok
        assert self.footprint(rig) == before
        rig.check()

    def test_close_gives_everything_back_at_any_level(self, rig: Rig) -> None:
        rig.moved(rig.boundary.offload(2))
        rig.close()
        assert rig.driver.usage() == EMPTY
        assert not any(rig.ledger.total(tier) for tier in Tier)

    def test_pages_stay_where_they_were_unless_strays_should_fault(self, rig: Rig, shape: Shape) -> None:
        """Behind the tail those of the groups that came back, and behind groups that are out their own."""
        pages = rig.geometry.pages_per_level
        for walk, own, tail in (
            (lambda: rig.boundary.offload(2), 2, 0),
            (lambda: rig.boundary.restore(1), 1, 1),
        ):
            rig.moved(walk())
            own = 0 if shape.mirror else own
            assert len(rig.region.covered) == (0 if shape.strict else tail * pages)
            assert len(rig.strays()) == (0 if shape.strict else (own + tail) * pages)
        rig.boundary.clear()
        assert not rig.strays() and not rig.region.covered
        rig.check()
        if not shape.mirror:
            for address in (rig.kv_addresses()[-1], rig.own_addresses(out=True)[0]):
                with pytest.raises(DriverError):
                    rig.driver.read(address, 1)
        rig.moved(rig.boundary.restore(1))
        rig.moved(rig.boundary.offload(3))

    def test_what_would_leave_next_is_mapped_ahead(self, driver: MemoryDriver, shape: Shape) -> None:
        counting = FaultyDriver(driver, calls=MAPPING)
        rig = build_rig(counting, shape)
        rig.moved(rig.boundary.offload(1))
        before, pages = rig.snapshot(), rig.geometry.pages_per_level
        for levels, turns in ((1, pages), (9, pages), (2, 0)):
            counting.arm(0)
            covered = list(rig.boundary.cover_ahead(levels, slice_pages=1))
            assert covered == [1] * (0 if shape.strict else turns) and rig.snapshot() == before
            rig.check()
        counting.arm(0)
        rig.moved(rig.boundary.offload(2))
        if not shape.mirror and not shape.strict:
            assert not counting.log
        assert list(rig.boundary.cover_ahead(1)) == [], "there is no further level"

    def test_as_many_levels_are_mapped_ahead_as_have_homes(self, driver: MemoryDriver, shape: Shape) -> None:
        rig = build_rig(driver, shape, homes=0)
        assert list(rig.boundary.cover_ahead(9)) == []
        for _ in range(rig.geometry.layers):
            assert list(rig.boundary.cover_ahead(9)) == [], "some layer has no home yet"
            rig.slab.refresh_homes(rig.geometry.group_bytes)
        covered = sum(rig.boundary.cover_ahead(9))
        assert covered == (0 if shape.strict else rig.geometry.pages_per_level)

    def test_pages_that_come_and_go_in_any_number_of_moves_take_no_mapping(
        self, driver: MemoryDriver, shape: Shape
    ) -> None:
        counting = FaultyDriver(driver, calls=MAPPING)
        rig = build_rig(counting, shape)
        for levels in ((3, -3), (1, 2, -3), (3, -1, -2), (2, -1, 2, -3)):
            counting.arm(0)
            for n in levels:
                rig.moved(rig.boundary.offload(n) if n > 0 else rig.boundary.restore(-n))
            if shape == BARE:
                first = levels == (3, -3)
                assert set(counting.log) == ({"map", "set_access"} if first else set())

    def test_close_gives_back_what_lies_anywhere(self, driver: MemoryDriver, shape: Shape) -> None:
        """Also where calls were refused: of covering, of a move and of what follows a strict one."""
        for call in sorted(MAPPING):
            for k in range(1, 5):
                faulty = FaultyDriver(driver, calls={call})
                rig = build_rig(faulty, shape)
                stale(rig)
                faulty.arm(k)
                with suppress(DriverError):
                    list(rig.boundary.cover_ahead(1, slice_pages=1))
                rig.boundary.offload(1)
                faulty.arm(0)
                rig.check()
                rig.close()
                assert driver.usage() == EMPTY

    def footprint(self, rig: Rig) -> object:
        """What must not grow; a suite may add what the operating system says."""
        return rig.driver.usage()

    def check_kv(self, rig: Rig, before: list[bytes], zeroed: int) -> None:
        """KV pages are as before, but for the last ``zeroed``, which are zero."""
        kept = len(before) - zeroed
        assert rig.kv_pages() == before[:kept] + [bytes(len(page)) for page in before[kept:]]


class FaultSuite(RigSuite):
    """Refuse the k-th driver call of a move, for every k until none is left to refuse.

    A suite whose driver is slow to look at may leave some out with a larger ``step``.
    """

    step = 1

    @pytest.fixture
    def faulty(self, driver: MemoryDriver) -> FaultyDriver:
        faulty = FaultyDriver(driver)
        faulty.counted = EVERY_CALL
        return faulty

    @pytest.mark.parametrize("kind", list(MoveKind), ids=lambda kind: kind.value)
    def test_one_refused_call_leaves_the_old_state(
        self, faulty: FaultyDriver, shape: Shape, kind: MoveKind
    ) -> None:
        refused: set[str] = set()
        for k in range(1, 1000, self.step):
            rig = self.with_stale_mappings(faulty, shape)
            before, kv = rig.snapshot(), rig.kv_pages()
            faulty.arm(k)
            outcome = rig.boundary.run(move(rig.boundary, kind, 1))
            fired = faulty.counter >= k
            name = faulty.log[k - 1 : k]
            refused.update(name)
            faulty.arm(0)
            rig.check()
            if not fired:
                assert outcome.ok
                break
            if outcome.ok:
                # Only what follows a strict one, where the pages are somebody else's already.
                assert (name, shape.strict) == (["unmap"], True)
                before, kv = rig.snapshot(), rig.kv_pages()
            else:
                assert "refused on purpose" in outcome.reason
            assert rig.snapshot() == before
            self.check_kv(rig, kv, popped=rig.geometry.pages_per_level if kind is RESTORE else 0)
            again = OFFLOAD if outcome.ok and kind is RESTORE else kind
            rig.moved(rig.boundary.run(move(rig.boundary, again, 1)))
            rig.close()
            assert faulty.usage() == EMPTY
        assert not fired, "the loop ends with a move that nothing refused"
        wanted = {"mark", "wait", "unmap", "map", "set_access", "synchronize"}
        wanted.add("zero" if kind is OFFLOAD else "copy")  # a swap copies, and leaves KV pages alone
        assert refused == wanted or (self.step > 1 and refused < wanted)

    @pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
    @pytest.mark.parametrize("kind", list(MoveKind), ids=lambda kind: kind.value)
    def test_a_refused_undo_loses_the_state(
        self, faulty: FaultyDriver, shape: Shape, kind: MoveKind, share: float
    ) -> None:
        rig = self.at_level_1(faulty, shape)
        faulty.arm(0)
        assert rig.boundary.run(move(rig.boundary, kind, 1)).ok
        # What follows the last "synchronize" is done once the move is agreed, and not undone.
        first, last = (
            faulty.log.index("wait") + 1,
            faulty.counter - faulty.log[::-1].index("synchronize"),
        )
        rig.close()
        rig = self.at_level_1(faulty, shape)
        faulty.mode = "from_then_on"
        faulty.arm(first + round(share * (last - first)))
        with pytest.raises(StateLost):
            rig.boundary.run(move(rig.boundary, kind, 1))

    def test_refused_copy_down_leaves_its_home_empty(self, faulty: FaultyDriver, shape: Shape) -> None:
        for k in range(1, 1000):
            rig = self.at_level_1(faulty, shape)
            reverse_coldness(rig)
            faulty.arm(k)
            try:
                rig.slab.refresh_homes(1 << 40)
                fired = False
            except DriverError as error:
                fired = error.call in ("copy", "synchronize")
                assert fired
            faulty.arm(0)
            rig.check()
            if not fired:
                break
            rig.slab.refresh_homes(1 << 40)
            rig.moved(rig.boundary.offload(2))
            rig.close()
        assert not fired and k > rig.geometry.layers

    def test_a_refused_call_of_covering_leaves_the_rest(self, faulty: FaultyDriver, shape: Shape) -> None:
        refused: set[str] = set()
        for k in range(1, 1000):
            rig = self.with_stale_mappings(faulty, shape)
            before, kv = rig.snapshot(), rig.kv_pages()
            faulty.arm(k)
            with suppress(DriverError):
                list(rig.boundary.cover_ahead(2))
            fired = faulty.log[k - 1 : k]
            refused.update(fired)
            faulty.arm(0)
            rig.check()
            assert (rig.snapshot(), rig.kv_pages()) == (before, kv)
            rig.moved(rig.boundary.offload(1))
            rig.moved(rig.boundary.restore(2))
            rig.close()
            assert faulty.usage() == EMPTY
            if not fired:
                break
        assert refused == (set() if shape.strict else MAPPING)

    def with_stale_mappings(self, driver: MemoryDriver, shape: Shape) -> Rig:
        rig = build_rig(driver, shape)
        stale(rig)
        rig.dirty_kv()
        return rig

    def at_level_1(self, driver: MemoryDriver, shape: Shape) -> Rig:
        rig = build_rig(driver, shape)
        rig.moved(rig.boundary.offload(1))
        rig.dirty_kv()
        return rig

    def check_kv(self, rig: Rig, before: list[bytes], popped: int) -> None:
        """KV pages are as before; each of the last ``popped`` may be zero instead."""
        kept = len(before) - popped
        now = rig.kv_pages()
        assert now[:kept] == before[:kept]
        assert all(
            page in (old, bytes(len(old))) for page, old in zip(now[kept:], before[kept:], strict=True)
        )
