"""Pages and addresses of expert records: the driver calls by which a group leaves HBM and comes back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.driver import MemoryDriver, Tier
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.ledger import Owner, OwnerKind, PageLedger
from vamp_runtime.memory.mapped import PageMap, map_pages, unmap_pages
from vamp_runtime.memory.no_room import no_room
from vamp_runtime.memory.runs import runs
from vamp_runtime.memory.transaction import Transaction

FREE = Owner(OwnerKind.FREE)


def staging_owner(group: int) -> Owner:
    """Owner of the pages of the ``group``-th group of staging records."""
    return Owner(OwnerKind.STAGING, place=group)


class ExpertRecords:
    """One reservation per layer and part, HBM pages behind every own record, pages of a peer or of the host
    behind home aliases.

    The ledger knows the pages of a group by ``Owner(EXPERT, layer, group)`` and those of a home by
    ``Owner(HOME, layer, slot)``; both lie part by part in address order. Staging pages, ``Owner(STAGING,
    index=group of staging records)``, lie behind the staging records of every layer at once.

    A *place* is an address of a layer counted in groups: own group ``g`` is at place ``g``. What lies at
    neighbouring places is opened, unmapped and copied by one driver call for each part.

    Args:
        lazily: reserve addresses only; ``back`` then puts pages behind one layer after the other.
        mirror: put the home of any group that is out behind the group's own addresses too. Otherwise nobody
            reads there, and the pages that it had stay mapped until others are to lie there.

    Raises:
        ConfigError: a tier has no room; nothing is left behind.
    """

    def __init__(
        self,
        driver: MemoryDriver,
        ledger: PageLedger,
        geometry: SlabGeometry,
        lazily: bool = False,
        mirror: bool = True,
    ) -> None:
        assert ledger.page_bytes == geometry.page_bytes
        self.driver = driver
        self.ledger = ledger
        self.geometry = geometry
        self.mirror = mirror
        #: Without ``mirror``, what lies behind own addresses.
        self._own = PageMap(driver, geometry.page_bytes)
        self._base: list[list[int]] = []
        self._backed = 0
        if geometry.host_homes and Tier.HOST not in driver.tiers:
            raise ConfigError("max_offload_ratio: this machine cannot map host memory; 0 would work")
        if geometry.peer_homes and Tier.PEER not in driver.tiers:
            raise ConfigError("peer_hbm_gib: this driver has no peer; 0 would work")
        with Transaction() as tx:
            self._reserve(tx)
            for layer in range(0 if lazily else geometry.layers):
                self._back(tx, layer)
            tx.commit()
        self._backed = 0 if lazily else geometry.layers

    def back(self) -> None:
        """Create and map the pages of the next layer.

        Raises:
            ConfigError: a tier has no room; the layers before keep their pages.
        """
        assert self._backed < self.geometry.layers
        with Transaction() as tx:
            self._back(tx, self._backed)
            tx.commit()
        self._backed += 1

    def address(self, layer: int, part: int, slot: int) -> int:
        return self._base[layer][part] + slot * self.geometry.part_bytes[part]

    def home_alias(self, home: int) -> int:
        """First slot of the permanent alias of home slot ``home``."""
        return self.geometry.home_slot_base + home * self.geometry.group

    def home_place(self, home: int) -> int:
        """Place of the permanent alias of home slot ``home``."""
        return self.home_alias(home) // self.geometry.group

    def pages(self, layer: int, group: int) -> tuple[int, ...]:
        """The group's HBM pages, part by part in address order; none while it is out."""
        return self.ledger.pages(Owner(OwnerKind.EXPERT, layer, group))

    def copy(self, layer: int, places: Iterable[tuple[int, int]]) -> None:
        """Queue copies of whole groups, each of ``(target place, source place)``."""
        for run in runs(places):
            for part in range(self.geometry.parts):
                target, source = (self.address(layer, part, at * self.geometry.group) for at in run[0])
                self.driver.copy(target, source, len(run) * self.geometry.part_group_bytes(part))

    def checksum(self, layer: int, slot: int) -> bytes:
        """Hash of the record at ``slot`` over all parts."""
        digest = hashlib.blake2b(digest_size=16)
        for part, nbytes in enumerate(self.geometry.part_bytes):
            digest.update(self.driver.read(self.address(layer, part, slot), nbytes))
        return digest.digest()

    def take_out(self, tx: Transaction, layer: int, homes: Mapping[int, int]) -> None:
        """Take the HBM pages of groups, which nobody may read at their own addresses any more; they become
        FREE.

        With ``mirror`` the groups' homes take their place. Otherwise they stay mapped there: no driver is
        called, and a group that gets the same pages back need not map them. The undo copies the experts back
        from the home aliases, since whoever got the pages may have overwritten them; those copies may still
        run after it.

        Args:
            homes: home slot of each group.
        """
        pages = {group: self.pages(layer, group) for group in homes}
        tx.on_undo(partial(self._copy_from_homes, layer, homes))
        if self.mirror:
            self._unmap(tx, layer, pages)
            self._map(tx, layer, self._home_pages(layer, homes))
        for group, share in pages.items():
            self._hand_over(tx, share, Owner(OwnerKind.EXPERT, layer, group), FREE)

    def lay(self, layer: int, pages: Mapping[int, Sequence[int]]) -> None:
        """Put pages behind the own addresses of groups that are out, ahead of ``bring_back``.

        They may belong to others, and be read where else they lie. There is no undo, since nobody reads
        there. With ``mirror`` the groups' homes are read at these addresses, and nothing is done.

        Args:
            pages: of each group, part by part in address order.

        Raises:
            DriverError: a call was refused; what lies there is known all the same.
        """
        if not self.mirror:
            self._own.lay(self._stretches(layer, pages))

    def clear(self) -> None:
        """Without ``mirror``, unmap what lies behind the own addresses of groups that are out.

        Raises:
            DriverError: a call was refused; the rest still lies there.
        """
        for layer in range(self._backed):
            self._clear(layer, [g for g in range(self.geometry.groups) if not self.pages(layer, g)])

    def lies_at_home(self, layer: int, group: int) -> bool:
        """Whether a group's pages lie behind its own addresses."""
        places = self._stretches(layer, {group: self.pages(layer, group)})
        return self.mirror or all(place in self._own for place in places)

    def bring_back(
        self, tx: Transaction, layer: int, homes: Mapping[int, int], pages: Mapping[int, Sequence[int]]
    ) -> None:
        """Give groups the FREE pages that ``lay`` was called with, and queue copies from their home aliases.

        Nobody may read the pages any more, wherever else they lie.
        """
        if self.mirror:
            self._unmap(tx, layer, self._home_pages(layer, homes))
            self._map(tx, layer, pages)
        for group, share in pages.items():
            self._hand_over(tx, share, FREE, Owner(OwnerKind.EXPERT, layer, group))
        tx.on_undo(self.driver.synchronize)
        self._copy_from_homes(layer, homes)

    def close(self) -> None:
        """Unmap and release everything, whatever lies behind the own addresses now.

        Nobody else's addresses may lead to its pages any more.
        """
        geometry = self.geometry
        for layer, part in self._layer_parts():
            size, backed = geometry.part_bytes[part], layer < self._backed
            if backed and self.mirror:
                self.driver.unmap(self.address(layer, part, 0), geometry.own_slots * size)
            self._own.clear(self._addresses(layer, part, range(geometry.groups)))
            if backed and geometry.home_slots:
                homes = geometry.home_slots * geometry.group * size
                self.driver.unmap(self.address(layer, part, geometry.home_slot_base), homes)
            if geometry.staging_records and self._backed == geometry.layers:
                staged = geometry.staging_records * size
                self.driver.unmap(self.address(layer, part, geometry.own_slots), staged)
            self.driver.free(self.address(layer, part, 0), geometry.reservation_bytes(part))
        owners = [staging_owner(group) for group in range(geometry.staging_groups)]
        for layer in range(geometry.layers):
            owners += [Owner(OwnerKind.EXPERT, layer, group) for group in range(geometry.groups)]
            owners += [Owner(OwnerKind.HOME, layer, home) for home in range(geometry.home_slots)]
        for handle in [handle for owner in owners for handle in self.ledger.pages(owner)]:
            self.ledger.remove(handle)
            self.driver.release(handle)
        self._base = []
        self._backed = 0

    def _reserve(self, tx: Transaction) -> None:
        for _ in range(self.geometry.layers):
            self._base.append([])
            for part in range(self.geometry.parts):
                nbytes = self.geometry.reservation_bytes(part)
                address = self.driver.reserve(nbytes)
                tx.on_undo(partial(self.driver.free, address, nbytes))
                self._base[-1].append(address)

    def _back(self, tx: Transaction, layer: int) -> None:
        geometry, own, homes = self.geometry, {}, {}
        for group in range(geometry.groups):
            own[group] = self._create(tx, Tier.HBM, Owner(OwnerKind.EXPERT, layer, group))
        if self.mirror:
            self._map(tx, layer, own)
        else:
            tx.on_undo(partial(self._clear, layer, own))
            self.lay(layer, own)
        for home in range(geometry.home_slots):
            tier = Tier.PEER if home < geometry.peer_homes else Tier.HOST
            homes[self.home_place(home)] = self._create(tx, tier, Owner(OwnerKind.HOME, layer, home))
        self._map(tx, layer, homes)
        if layer == geometry.layers - 1:
            self._back_staging(tx)

    def _back_staging(self, tx: Transaction) -> None:
        """With the last layer, when loading has given back the most memory."""
        geometry = self.geometry
        pages = {
            geometry.groups + group: self._create(tx, Tier.HBM, staging_owner(group))
            for group in range(geometry.staging_groups)
        }
        for layer in range(geometry.layers):
            self._map(tx, layer, pages)

    def _create(self, tx: Transaction, tier: Tier, owner: Owner) -> tuple[int, ...]:
        for _ in range(self.geometry.pages_per_group):
            handle = self.driver.create(self.geometry.page_bytes, tier)
            if handle is None:
                raise ConfigError(no_room(self.geometry, self.ledger, tier, owner))
            tx.on_undo(partial(self.driver.release, handle))
            self.ledger.add(handle, tier, owner)
            tx.on_undo(partial(self.ledger.remove, handle))
        return self.ledger.pages(owner)

    def _clear(self, layer: int, groups: Iterable[int]) -> None:
        groups = list(groups)
        for part in range(self.geometry.parts):
            self._own.clear(self._addresses(layer, part, groups))

    def _addresses(self, layer: int, part: int, groups: Iterable[int]) -> Iterator[int]:
        """Of every page of groups."""
        for group in groups:
            first = self.address(layer, part, group * self.geometry.group)
            yield from range(first, first + self.geometry.part_group_bytes(part), self.geometry.page_bytes)

    def _layer_parts(self) -> Iterator[tuple[int, int]]:
        for layer in range(self.geometry.layers):
            for part in range(self.geometry.parts):
                yield layer, part

    def _home_pages(self, layer: int, homes: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """Pages of each group's home."""
        owners = {group: Owner(OwnerKind.HOME, layer, home) for group, home in homes.items()}
        return {group: self.ledger.pages(owner) for group, owner in owners.items()}

    def _copy_from_homes(self, layer: int, homes: Mapping[int, int]) -> None:
        self.copy(layer, [(group, self.home_place(home)) for group, home in homes.items()])

    def _stretches(self, layer: int, pages: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
        """Address and pages of every run of neighbouring places, in every part."""
        for run in runs((place,) for place in pages):
            first = 0
            for part in range(self.geometry.parts):
                last = first + self.geometry.part_group_bytes(part) // self.geometry.page_bytes
                share = [page for (place,) in run for page in pages[place][first:last]]
                yield self.address(layer, part, run[0][0] * self.geometry.group), share
                first = last

    def _map(self, tx: Transaction, layer: int, pages: Mapping[int, Sequence[int]]) -> None:
        map_pages(tx, self.driver, self.geometry.page_bytes, self._stretches(layer, pages))

    def _unmap(self, tx: Transaction, layer: int, pages: Mapping[int, Sequence[int]]) -> None:
        unmap_pages(tx, self.driver, self.geometry.page_bytes, self._stretches(layer, pages))

    def _hand_over(self, tx: Transaction, pages: Sequence[int], old: Owner, new: Owner) -> None:
        """Move pages in the ledger in their order, there and back: the order is where each page lies."""
        move = self.ledger.move
        tx.do(partial(move, pages, old, new), partial(move, pages, new, old))
