"""A small rank: slab, KV region and boundary on a given driver, filled with random bytes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vamp_runtime.memory.agreement import Agreement, SoleRank
from vamp_runtime.memory.boundary import Boundary, Outcome
from vamp_runtime.memory.driver import DriverUsage, MemoryDriver
from vamp_runtime.memory.geometry import KVGeometry, SlabGeometry
from vamp_runtime.memory.kv_region import KVRegion
from vamp_runtime.memory.ledger import Owner, OwnerKind, PageLedger
from vamp_runtime.memory.slab import ExpertSlab

EVERYTHING = 1 << 60  # a home budget that never binds


@dataclass(frozen=True)
class Shape:
    """Sizes of a rig in half granules, so that they hold for any driver."""

    name: str
    layers: int
    experts: int
    halves: tuple[int, ...]
    ratio: float
    positions: int
    pages: int = 8
    staging: int = 0
    spare_homes: int = 0
    peer_homes: int = 0
    mirror: bool = True
    strict: bool = False

    def slab(self, granularity: int) -> SlabGeometry:
        parts = tuple(half * granularity // 2 for half in self.halves)
        geometry = SlabGeometry.plan(
            self.layers, self.experts, parts, granularity, self.ratio, self.staging, self.spare_homes
        )
        return replace(geometry, peer_homes=self.peer_homes)

    def kv(self, slab: SlabGeometry) -> KVGeometry:
        """Room for all levels; a block is 3/5 of a page, so that blocks and pages end apart."""
        pages = -(-(self.pages + slab.max_level * slab.pages_per_level) // self.positions)
        stride, block = pages * slab.page_bytes, slab.page_bytes * 3 // 5
        return KVGeometry(self.positions, block, stride, stride // block, slab.page_bytes)


# One record per expert, two experts to a group of one page, a short last group, staging; one KV tail.
RECORDS = Shape("records", layers=2, experts=9, halves=(3,), ratio=0.7, positions=1, staging=8)
# Dense w13 and w2, a group of three pages for each expert; a KV tail for each of three positions.
DENSE = Shape("dense", layers=2, experts=6, halves=(4, 2), ratio=0.5, positions=3)
# Own addresses lead nowhere while a group is out; the first one stays, so there is a group more.
BARE = replace(RECORDS, name="records, bare", experts=11, ratio=0.6, mirror=False)
STRICT = replace(BARE, name="records, bare, strict", strict=True)
SHAPES = (RECORDS, DENSE, BARE, STRICT)
# The same with homes in a peer: of some groups, and of all.
PEER_SHAPES = (
    replace(RECORDS, name="records, peer", peer_homes=1),
    replace(DENSE, name="dense, peer", peer_homes=2),
    replace(RECORDS, name="records, all in peer", peer_homes=3),
    replace(BARE, name="records, bare, peer", peer_homes=1),
)


@dataclass(frozen=True)
class Snapshot:
    """Everything of a rank that an abandoned move must leave alone."""

    owners: dict[Owner, tuple[int, ...]]
    usage: DriverUsage
    experts: list[bytes]
    slot_table: list[list[int]]
    out: list[tuple[int, ...]]
    homes: list[list[int | None]]
    claimed: int
    pages: int


@dataclass
class Rig:
    driver: MemoryDriver
    ledger: PageLedger
    slab: ExpertSlab
    region: KVRegion
    boundary: Boundary
    weights: list[list[bytes]]

    @property
    def geometry(self) -> SlabGeometry:
        return self.slab.geometry

    @property
    def table(self) -> list[list[int]]:
        """A copy of the slot table."""
        return [list(row) for row in self.slab.slot_table]

    def expert(self, layer: int, expert: int, slot: int | None = None) -> bytes:
        """The expert's bytes at its own address, if there are any, or at ``slot``."""
        own = self.slab.record(layer, expert)
        at = own if self.slab.readable(layer, expert) else self.slab.slot_table[layer][expert]
        at = at if slot is None else slot
        parts = enumerate(self.geometry.part_bytes)
        return b"".join(self.driver.read(self.slab.address(layer, part, at), size) for part, size in parts)

    def kv_pages(self) -> list[bytes]:
        """Bytes of each backed KV page."""
        geometry, base = self.region.geometry, self.region.address(0)
        offsets = [geometry.page_offset(page) for page in range(self.region.pages)]
        return [self.driver.read(base + offset, geometry.page_bytes) for offset in offsets]

    def dirty_kv(self, seed: int = 7) -> None:
        """Fill every backed KV page with random bytes, as serving would."""
        source, geometry, base = random.Random(seed), self.region.geometry, self.region.address(0)
        for page in range(self.region.pages):
            self.driver.write(base + geometry.page_offset(page), source.randbytes(geometry.page_bytes))

    def snapshot(self) -> Snapshot:
        slab, layers = self.slab, range(self.geometry.layers)
        kinds = [Owner(kind) for kind in (OwnerKind.FREE, OwnerKind.KV, OwnerKind.RESERVE)]
        groups = [
            Owner(OwnerKind.EXPERT, la, group) for la in layers for group in range(self.geometry.groups)
        ]
        homes = [Owner(OwnerKind.HOME, la, home) for la in layers for home in range(self.geometry.home_slots)]
        homes += [Owner(OwnerKind.STAGING, place=group) for group in range(self.geometry.staging_groups)]
        return Snapshot(
            owners={owner: self.ledger.pages(owner) for owner in (*kinds, *groups, *homes)},
            usage=self.needed(),
            experts=[self.expert(la, ex) for la in layers for ex in range(self.geometry.experts)],
            slot_table=self.table,
            out=[slab.out(layer) for layer in layers],
            homes=[[slab.home_of(la, group) for group in range(self.geometry.groups)] for la in layers],
            claimed=self.region.claimed,
            pages=self.region.pages,
        )

    def own_addresses(self, out: bool) -> list[int]:
        """Of every page at the own addresses of groups that have no pages, or of all the others."""
        slab, geometry, found = self.slab, self.geometry, []
        for layer in range(geometry.layers):
            for group in range(geometry.groups):
                for part in range(geometry.parts if out is not bool(slab.pages(layer, group)) else 0):
                    first = slab.address(layer, part, group * geometry.group)
                    found += range(first, first + geometry.part_group_bytes(part), geometry.page_bytes)
        return found

    def kv_addresses(self) -> list[int]:
        """Of every page that the KV cache could have."""
        geometry, base = self.region.geometry, self.region.address(0)
        return [base + geometry.page_offset(page) for page in range(geometry.max_pages)]

    def mapped_at(self, address: int) -> int | None:
        """The page that the driver has mapped there."""
        found = self.driver._space.mappings(address, 1)
        return found[0].handle if found else None

    def strays(self) -> dict[int, int]:
        """Pages at addresses that nobody may use now: beyond the tail, and of groups that are out."""
        nobodys = self.kv_addresses()[self.region.pages :]
        if not self.slab._records.mirror:
            nobodys += self.own_addresses(out=True)
        found = {at: self.mapped_at(at) for at in nobodys}
        return {at: page for at, page in found.items() if page is not None}

    def lay_strays(self, strays: Mapping[int, int]) -> None:
        """Map just these pages at addresses that nobody may use."""
        self.boundary.clear()
        tail = {*self.kv_addresses()}
        for at, page in strays.items():
            (self.region._mapped if at in tail else self.slab._records._own).lay([(at, [page])])

    def needed(self) -> DriverUsage:
        """What the driver holds, less the mappings that nobody needs."""
        usage = self.driver.usage()
        return replace(usage, mappings=usage.mappings - len(self.strays()))

    def check_mappings(self) -> None:
        """What is recorded of own addresses and of the KV cache's is what the driver has mapped there."""
        space, records, region = self.driver._space, self.slab._records, self.region
        places = {region._mapped: self.kv_addresses(), records._own: []}
        if not records.mirror:
            places[records._own] = self.own_addresses(True) + self.own_addresses(False)
        for recorded, addresses in places.items():
            found = {at: self.mapped_at(at) for at in addresses}
            assert recorded._page_at == {at: page for at, page in found.items() if page is not None}
            mappings = [space.mappings(at, 1)[0] for at in recorded._page_at]
            assert recorded._shut == {each.address for each in mappings if not space.accessible(each)}
        kinds = {self.ledger.owner(page).kind for page in region._pages}
        assert kinds <= {OwnerKind.KV, OwnerKind.RESERVE}, "an expert's page is in the KV cache"

    def check(self) -> None:
        """Every invariant, and every expert's bytes where the slot table says and at its own address."""
        self.boundary.check_integrity()
        self.check_mappings()
        self.slab.verify_all()
        for layer, row in enumerate(self.weights):
            for expert, data in enumerate(row):
                for slot in (None, self.slab.slot_table[layer][expert]):
                    assert self.expert(layer, expert, slot) == data

    def moved(self, outcome: Outcome) -> Outcome:
        """``outcome``, which must be that of a published move."""
        assert outcome.ok, outcome.reason
        self.check()
        return outcome

    def close(self) -> None:
        self.boundary.close()


def build_rig(
    driver: MemoryDriver,
    shape: Shape,
    agreement: Agreement | None = None,
    order: Sequence[Sequence[int]] | None = None,
    homes: int = EVERYTHING,
    seed: int = 0,
) -> Rig:
    """A loaded rank: random experts, homes filled up to ``homes`` bytes, half of the KV blocks claimed."""
    geometry = shape.slab(driver.granularity)
    ledger = PageLedger(geometry.page_bytes)
    slab = ExpertSlab(driver, ledger, geometry, order, mirror=shape.mirror)
    region = KVRegion(driver, ledger, shape.kv(geometry), shape.pages)
    ledger.seal()
    source = random.Random(seed)
    weights = []
    for layer in range(geometry.layers):
        weights.append([source.randbytes(geometry.expert_bytes) for _ in range(geometry.experts)])
        for expert, data in enumerate(weights[layer]):
            first = 0
            for part, size in enumerate(geometry.part_bytes):
                address = slab.address(layer, part, slab.record(layer, expert))
                driver.write(address, data[first : first + size])
                first += size
    slab.seal()
    slab.refresh_homes(homes)
    region.claim(region.blocks // 2)
    boundary = Boundary(slab, region, agreement or SoleRank(), driver, shape.strict)
    rig = Rig(driver, ledger, slab, region, boundary, weights)
    return rig
