"""Expert weights of one rank: one address per expert for ever, and where each is read now."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice

from vamp_kernels.ranges import ranged
from vamp_runtime.errors import IntegrityError
from vamp_runtime.memory.driver import MemoryDriver
from vamp_runtime.memory.geometry import SlabGeometry, check_order
from vamp_runtime.memory.homes import HomeCopies, HomeSlots
from vamp_runtime.memory.ledger import Owner, OwnerKind, PageLedger
from vamp_runtime.memory.records import ExpertRecords, staging_owner
from vamp_runtime.memory.transaction import Transaction


class ExpertSlab:
    """Records, home slots and slot table of all layers. For one thread at a time.

    A group is resident, or redirected (its experts are read through the home alias), or redirected and out
    (its HBM pages are gone; behind its own addresses lies its home too, or what nobody may read).

    Args:
        order: per layer, ``order[layer][expert]`` is the record that the expert takes; default its index.
        lazily: reserve addresses only, and let ``back`` put pages behind them.
        mirror: keep own addresses readable while a group is out, for kernels that know no slot table.

    Raises:
        ConfigError: a tier has no room (nothing is left behind), or ``order`` is no permutation.

    Attributes:
        slot_table: ``[layers][experts]``, int32, the slot at which each expert is to be read now: its own
            record or its home alias. Changed in place.
    """

    def __init__(
        self,
        driver: MemoryDriver,
        ledger: PageLedger,
        geometry: SlabGeometry,
        order: Sequence[Sequence[int]] | None = None,
        lazily: bool = False,
        mirror: bool = True,
    ) -> None:
        layers, experts = range(geometry.layers), range(geometry.experts)
        self.geometry = geometry
        self._order = [list(row) for row in order] if order is not None else [list(experts) for _ in layers]
        check_order(self._order, geometry)
        self._experts = [sorted(experts, key=row.__getitem__) for row in self._order]
        self.slot_table = [array("i", row) for row in self._order]
        self._coldness = [list(reversed(range(geometry.movable_groups))) for _ in layers]
        self._homes = [HomeSlots(geometry.home_slots, geometry.peer_homes) for _ in layers]
        self._out: list[list[int]] = [[] for _ in layers]
        self._redirected: list[set[int]] = [set() for _ in layers]
        self._lately_read: list[set[int]] = [set() for _ in layers]
        self._checksums: list[list[bytes]] = []
        self.ledger = ledger
        self._records = ExpertRecords(driver, ledger, geometry, lazily, mirror)
        self._driver = driver

    @property
    def level(self) -> int:
        """Groups of every layer that are out of HBM."""
        return len(self._out[0])

    def back(self) -> None:
        """Put pages behind the next layer of a slab made ``lazily``; no other call may come before the last.

        So a model's experts can move in layer by layer, each giving its own memory back before the next.

        Raises:
            ConfigError: a tier has no room; the layers before keep their pages.
        """
        self._records.back()

    def address(self, layer: int, part: int, slot: int = 0) -> int:
        return self._records.address(layer, part, slot)

    def record(self, layer: int, expert: int) -> int:
        """The expert's own slot."""
        return self._order[layer][expert]

    def readable(self, layer: int, expert: int) -> bool:
        """Whether the expert's bytes lie behind its own address."""
        group = self.record(layer, expert) // self.geometry.group
        return self._records.mirror or bool(self.pages(layer, group))

    def pages(self, layer: int, group: int) -> tuple[int, ...]:
        """The group's HBM pages, in address order; none while it is out."""
        return self._records.pages(layer, group)

    def experts_of(self, layer: int, group: int) -> list[int]:
        """Experts whose records are in ``group``, by record."""
        size = self.geometry.group
        return self._experts[layer][group * size : (group + 1) * size]

    def out(self, layer: int) -> tuple[int, ...]:
        """Groups out of HBM, in the order they left."""
        return tuple(self._out[layer])

    def redirected(self, layer: int) -> frozenset[int]:
        """Groups that the slot table reads through their home aliases."""
        return frozenset(self._redirected[layer])

    def hosted(self, layer: int) -> frozenset[int]:
        """Of these, the groups whose homes lie in host memory, not in a peer's."""
        homes = self._homes[layer]
        return frozenset(group for group in self._redirected[layer] if not homes.in_peer(group))

    def without_pages(self, layer: int) -> frozenset[int]:
        """Groups that own no HBM page."""
        return frozenset(g for g in range(self.geometry.groups) if not self.pages(layer, g))

    def set_coldness(self, layer: int, groups: Sequence[int]) -> None:
        """Set the order in which groups should leave, coldest first.

        Every movable group must be named once; a short last group may be and is passed over.
        """
        movable = [group for group in groups if group < self.geometry.movable_groups]
        if len(movable) != self.geometry.movable_groups or min(movable, default=0) < 0 or _twice(movable):
            raise ValueError(f"layer {layer}: coldness must name every movable group once: {list(groups)}")
        self._coldness[layer] = movable

    def coldness(self, layer: int) -> list[int]:
        """The order set last; by falling index before."""
        return list(self._coldness[layer])

    def coldest(self, layer: int, n: int) -> list[int]:
        """The next ``n`` movable groups that are in HBM and not on their way out, coldest first."""
        return list(islice(self._resident(layer), n))

    def ready(self, layer: int, n: int) -> list[int]:
        """The next ``n`` groups that may leave: like ``coldest``, but only those with a valid home."""
        homes = self._homes[layer]
        return list(islice((g for g in self._resident(layer) if homes.slot_of(g) is not None), n))

    def home_of(self, layer: int, group: int) -> int | None:
        """Home slot with a valid copy of the group."""
        return self._homes[layer].slot_of(group)

    @ranged("home refresh")
    def refresh_homes(self, budget_bytes: int) -> int:
        """Copy the coldest groups that lack a home into home slots, at most ``budget_bytes``; bytes copied.

        The coldest of all layers go first, so that whole levels become ready; homes that should change places
        between peer and host go last. A home counts as valid once all copies are done; a slot whose copy was
        refused stays empty. Homes of redirected groups stay, and so do those of groups that were redirected
        at the last refresh or since: steps on their way may still read them. So every step that was launched
        before one refresh must have ended at the next.

        Raises:
            DriverError: a copy was refused.
        """
        geometry, jobs = self.geometry, self._home_jobs(max(budget_bytes, 0) // self.geometry.group_bytes)
        self._lately_read = [set(groups) for groups in self._redirected]
        for job, layer in jobs:
            self._homes[layer].begin(job)
            for group, slot in job.copies:
                self._records.copy(layer, [(self._records.home_place(slot), group)])
        self._driver.synchronize()
        for job, layer in jobs:
            for group, slot in job.copies:
                self._homes[layer].fill(slot, group)
        return sum(len(job.copies) for job, _ in jobs) * geometry.group_bytes

    def redirect(self, layer: int, group: int) -> None:
        """Read the group's experts through its home alias."""
        self._point(layer, group, self._records.home_alias(self._valid_home(layer, group)))
        self._redirected[layer].add(group)
        self._lately_read[layer].add(group)

    def point_back(self, layer: int, group: int) -> None:
        """Read the group's experts at their own records."""
        self._point(layer, group, group * self.geometry.group)
        self._redirected[layer].remove(group)

    def take_out(self, tx: Transaction, layer: int, groups: Sequence[int]) -> None:
        """Take the pages of redirected groups; they are FREE now."""
        assert self._redirected[layer].issuperset(groups) and not {*self._out[layer]} & {*groups}
        self._records.take_out(tx, layer, self._valid_homes(layer, groups))

    def clear(self) -> None:
        """Without ``mirror``, unmap what lies behind the own addresses of groups that are out.

        Raises:
            DriverError: a call was refused; the rest still lies there.
        """
        self._records.clear()

    def lay(self, layer: int, pages: Mapping[int, Sequence[int]]) -> None:
        """Put ``pages`` of others behind the addresses of groups that are out, where nobody reads."""
        assert {*self._out[layer]}.issuperset(pages)
        self._records.lay(layer, pages)

    def bring_back(self, tx: Transaction, layer: int, pages: Mapping[int, Sequence[int]]) -> None:
        """Give groups FREE ``pages``, after ``lay``; their bytes may still be on their way."""
        assert {*self._out[layer]}.issuperset(pages)
        self._records.bring_back(tx, layer, self._valid_homes(layer, pages), pages)

    def mark_out(self, layer: int, groups: Sequence[int]) -> None:
        """Count redirected groups as out, in this order."""
        assert self._redirected[layer].issuperset(groups)
        self._out[layer] += groups

    def mark_resident(self, layer: int, groups: Sequence[int]) -> None:
        """Count groups as back in HBM and read them there."""
        for group in groups:
            self._out[layer].remove(group)
            self.point_back(layer, group)

    def mark_swapped(self, layer: int, leaving: int, returning: int) -> None:
        """Count ``leaving`` as out in the place of ``returning``, which counts as back in HBM."""
        assert leaving in self._redirected[layer] and leaving not in self._out[layer]
        self._out[layer][self._out[layer].index(returning)] = leaving
        self.point_back(layer, returning)

    def seal(self) -> None:
        """Record a checksum of every expert, read at its own address. Weights must not change afterwards."""
        self._checksums = [
            [self._records.checksum(layer, record) for record in row] for layer, row in enumerate(self._order)
        ]

    def verify(self, layer: int, expert: int) -> None:
        """Hold the expert's bytes, where the slot table says and at its own address, against ``seal``.

        Without ``mirror`` nobody's bytes need lie at the own addresses of groups that are out.

        Raises:
            IntegrityError: naming layer, expert and slot.
        """
        assert self._checksums, "seal() comes first"
        own = {self.record(layer, expert)} if self.readable(layer, expert) else set()
        for slot in sorted({self.slot_table[layer][expert], *own}):
            if self._records.checksum(layer, slot) != self._checksums[layer][expert]:
                raise IntegrityError(f"layer {layer}, expert {expert}: the bytes at slot {slot} have changed")

    def verify_all(self) -> None:
        for layer in range(self.geometry.layers):
            for expert in range(self.geometry.experts):
                self.verify(layer, expert)

    def check_integrity(self) -> None:
        """Own addresses are backed, by HBM or by a valid home, and the slot table names nothing else.

        Without ``mirror`` anything or nothing lies there where a group is out.

        Holds between any two steps of a move.

        Raises:
            IntegrityError: naming the layer and the group.
        """
        for group in range(self.geometry.staging_groups):
            if len(self.ledger.pages(staging_owner(group))) != self.geometry.pages_per_group:
                raise IntegrityError(f"staging group {group} has lost pages")
        for layer, homes in enumerate(self._homes):
            homes.check_integrity()
            for home in range(self.geometry.home_slots):
                if (
                    len(self.ledger.pages(Owner(OwnerKind.HOME, layer, home)))
                    != self.geometry.pages_per_group
                ):
                    raise IntegrityError(f"layer {layer}: home slot {home} has lost pages")
            for group in range(self.geometry.groups):
                self._check_group(layer, group)

    def close(self) -> None:
        """Give back every page and address, also with groups out. ``KVRegion.uncover`` comes first."""
        self._records.close()

    def _home_jobs(self, most: int) -> list[tuple[HomeCopies, int]]:
        """The next copies to homes with their layers, ``most`` copies at most."""
        jobs: list[tuple[HomeCopies, int]] = []
        for layer, homes in enumerate(self._homes):
            pinned = self._lately_read[layer]
            others = (group for group in self._resident(layer) if group not in pinned)
            wanted = list(islice(others, self.geometry.home_slots - len(pinned)))
            jobs += [(job, layer) for job in homes.plan(wanted, pinned, most)]
        jobs.sort(key=lambda each: (each[0].exchange, each[0].rank, each[1]))
        ends = accumulate(len(job.copies) for job, _ in jobs)
        return [each for each, end in zip(jobs, ends, strict=True) if end <= most]

    def _resident(self, layer: int) -> Iterator[int]:
        """Groups that may leave, coldest first.

        Without ``mirror`` the first one stays: its address is that of the tensor over all records, and Triton
        asks the driver at every launch, also beside a move, whether something lies there.
        """
        stay = self._redirected[layer] if self._records.mirror else {*self._redirected[layer], 0}
        return (group for group in self._coldness[layer] if group not in stay)

    def _valid_home(self, layer: int, group: int) -> int:
        home = self.home_of(layer, group)
        assert home is not None, f"layer {layer}: group {group} has no valid home"
        return home

    def _valid_homes(self, layer: int, groups: Iterable[int]) -> dict[int, int]:
        return {group: self._valid_home(layer, group) for group in groups}

    def _point(self, layer: int, group: int, first_slot: int) -> None:
        for index, expert in enumerate(self.experts_of(layer, group)):
            self.slot_table[layer][expert] = first_slot + index

    def _check_group(self, layer: int, group: int) -> None:
        pages = len(self.pages(layer, group))
        home, redirected = self.home_of(layer, group), group in self._redirected[layer]
        name = f"layer {layer}: group {group}"
        if pages not in (0, self.geometry.pages_per_group):
            raise IntegrityError(f"{name} has {pages} of {self.geometry.pages_per_group} pages")
        if pages and not self._records.lies_at_home(layer, group):
            raise IntegrityError(f"{name} has pages that do not lie behind its own addresses")
        if (redirected or not pages) and home is None:
            raise IntegrityError(f"{name} is out of HBM or redirected without a valid home")
        if group in self._out[layer] and not redirected:
            raise IntegrityError(f"{name} is out of HBM but not redirected")
        first = (
            self._records.home_alias(home) if redirected and home is not None else group * self.geometry.group
        )
        for index, expert in enumerate(self.experts_of(layer, group)):
            if self.slot_table[layer][expert] != first + index:
                raise IntegrityError(
                    f"{name}: expert {expert} is read at slot {self.slot_table[layer][expert]}"
                )


def _twice(groups: Sequence[int]) -> bool:
    """Whether one of them is named more than once."""
    return len({*groups}) < len(groups)
