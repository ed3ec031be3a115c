"""Pages and addresses of expert records: the driver calls by which a group leaves HBM and comes back."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import partial

from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.driver import MemoryDriver, Tier
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.ledger import Owner, OwnerKind, PageLedger
from vamp_runtime.memory.transaction import Transaction

FREE = Owner(OwnerKind.FREE)


def staging_owner(group: int) -> Owner:
    """Owner of the pages of the ``group``-th group of staging records."""
    return Owner(OwnerKind.STAGING, index=group)


class ExpertRecords:
    """One reservation per layer and part, HBM pages behind every own record, pages of a peer or of the host
    behind home aliases.

    The ledger knows the pages of a group by ``Owner(EXPERT, layer, group)`` and those of a home by
    ``Owner(HOME, layer, slot)``; both lie part by part in address order. Staging pages, ``Owner(STAGING,
    index=group of staging records)``, lie behind the staging records of every layer at once.

    Args:
        lazily: reserve addresses only; ``back`` then puts pages behind one layer after the other.
        mirror: put the home of a group that is out behind the group's own addresses too. Otherwise nothing
            lies there, which spares a move most of its driver calls.

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

    def copy_group(self, layer: int, source: int, target: int) -> None:
        """Queue copies of a group's worth of records from slot ``source`` on to slot ``target`` on."""
        for part in range(self.geometry.parts):
            target_address, source_address = (self.address(layer, part, slot) for slot in (target, source))
            self.driver.copy(target_address, source_address, self.geometry.part_group_bytes(part))

    def checksum(self, layer: int, slot: int) -> bytes:
        """Hash of the record at ``slot`` over all parts."""
        digest = hashlib.blake2b(digest_size=16)
        for part, nbytes in enumerate(self.geometry.part_bytes):
            digest.update(self.driver.read(self.address(layer, part, slot), nbytes))
        return digest.digest()

    def take_out(self, tx: Transaction, layer: int, group: int, home: int) -> tuple[int, ...]:
        """Take the group's HBM pages, which become FREE, mapped nowhere; its home may take their place.

        The undo maps the HBM pages again and copies the experts back from the home alias, since whoever got
        the pages may have overwritten them. Those copies may still run after the undo.
        """
        owner, own = Owner(OwnerKind.EXPERT, layer, group), group * self.geometry.group
        pages = self.ledger.pages(owner)
        tx.on_undo(partial(self.copy_group, layer, source=self.home_alias(home), target=own))
        self._unmap(tx, layer, own, pages)
        if self.mirror:
            self._map(tx, layer, own, self.ledger.pages(Owner(OwnerKind.HOME, layer, home)))
        self._hand_over(tx, pages, owner, FREE)
        return pages

    def bring_back(self, tx: Transaction, layer: int, group: int, home: int, pages: Sequence[int]) -> None:
        """Put unmapped FREE pages behind the group's own addresses and queue copies from its home alias."""
        owner, own = Owner(OwnerKind.EXPERT, layer, group), group * self.geometry.group
        if self.mirror:
            self._unmap(tx, layer, own, self.ledger.pages(Owner(OwnerKind.HOME, layer, home)))
        self._map(tx, layer, own, pages)
        self._hand_over(tx, pages, FREE, owner)
        tx.on_undo(self.driver.synchronize)
        self.copy_group(layer, source=self.home_alias(home), target=own)

    def close(self) -> None:
        """Unmap and release everything, whatever lies behind the own addresses now."""
        geometry = self.geometry
        for layer, part in self._layer_parts():
            size, backed = geometry.part_bytes[part], layer < self._backed
            for first, end in self._own_runs(layer) if backed else ():
                self.driver.unmap(self.address(layer, part, first), (end - first) * size)
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
        for group in range(self.geometry.groups):
            pages = self._create(tx, Tier.HBM, Owner(OwnerKind.EXPERT, layer, group))
            self._map(tx, layer, group * self.geometry.group, pages)
        for home in range(self.geometry.home_slots):
            tier = Tier.PEER if home < self.geometry.peer_homes else Tier.HOST
            pages = self._create(tx, tier, Owner(OwnerKind.HOME, layer, home))
            self._map(tx, layer, self.home_alias(home), pages)
        if layer == self.geometry.layers - 1:
            self._back_staging(tx)

    def _back_staging(self, tx: Transaction) -> None:
        """With the last layer, when loading has given back the most memory."""
        for group in range(self.geometry.staging_groups):
            pages = self._create(tx, Tier.HBM, staging_owner(group))
            for layer in range(self.geometry.layers):
                self._map(tx, layer, self.geometry.own_slots + group * self.geometry.group, pages)

    def _create(self, tx: Transaction, tier: Tier, owner: Owner) -> tuple[int, ...]:
        for _ in range(self.geometry.pages_per_group):
            handle = self.driver.create(self.geometry.page_bytes, tier)
            if handle is None:
                raise ConfigError(self._no_room(tier, owner))
            tx.on_undo(partial(self.driver.release, handle))
            self.ledger.add(handle, tier, owner)
            tx.on_undo(partial(self.ledger.remove, handle))
        return self.ledger.pages(owner)

    def _no_room(self, tier: Tier, owner: Owner) -> str:
        geometry = self.geometry
        if owner.kind is OwnerKind.STAGING:
            wanted = geometry.staging_groups * geometry.group_bytes
            fits = (self.ledger.count(OwnerKind.STAGING) * geometry.page_bytes) >> 20
            return f"staging_mib: staging needs {wanted} bytes of HBM and has no room; {fits} would work"
        if tier is Tier.HBM:
            wanted = geometry.groups * geometry.pages_per_level * geometry.page_bytes
            there = self.ledger.count(OwnerKind.EXPERT) * geometry.page_bytes
            times = math.ceil(wanted / max(there, 1))
            return (
                f"hbm: experts need {wanted} bytes and {there} could be had;"
                f" {times} times the tensor parallel size would work"
            )
        there = self.ledger.count(OwnerKind.HOME, tier) * geometry.page_bytes
        if tier is Tier.PEER:
            # Whole homes of every layer, so that planning with it gives as many.
            level_bytes = geometry.pages_per_level * geometry.page_bytes
            fitting = math.ceil(there // level_bytes * level_bytes / 2**30 * 10_000) / 10_000
            return (
                f"peer_hbm_gib: homes need {geometry.peer_home_bytes} bytes of the peer's HBM and {there}"
                f" could be had; {fitting:g} would work"
            )
        wanted = geometry.host_home_bytes
        level = geometry.peer_homes + there // (geometry.pages_per_level * geometry.page_bytes)
        # Rounded up at the fourth digit, so that planning with it gives this level again.
        ratio = math.ceil(level * geometry.group / geometry.experts * 10_000) / 10_000
        asked = geometry.home_slots * geometry.group / geometry.experts
        return (
            f"max_offload_ratio={asked:g}: homes need {wanted} bytes of host memory and {there} could be had;"
            f" {ratio:g} would work"
        )

    def _own_runs(self, layer: int) -> Iterator[tuple[int, int]]:
        """Stretches of own slots with pages behind them, ``(first, end)``."""
        geometry, first = self.geometry, 0
        for group in range(geometry.groups):
            if not self.mirror and not self.ledger.pages(Owner(OwnerKind.EXPERT, layer, group)):
                if first < group * geometry.group:
                    yield first, group * geometry.group
                first = (group + 1) * geometry.group
        if first < geometry.own_slots:
            yield first, geometry.own_slots

    def _layer_parts(self) -> Iterator[tuple[int, int]]:
        for layer in range(self.geometry.layers):
            for part in range(self.geometry.parts):
                yield layer, part

    def _part_pages(self, pages: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Each part with its share of a group's pages."""
        first = 0
        for part in range(self.geometry.parts):
            last = first + self.geometry.part_group_bytes(part) // self.geometry.page_bytes
            yield part, pages[first:last]
            first = last

    def _map(self, tx: Transaction, layer: int, slot: int, pages: Sequence[int]) -> None:
        page_bytes = self.geometry.page_bytes
        for part, share in self._part_pages(pages):
            start = self.address(layer, part, slot)
            for address, page in zip(
                range(start, start + len(share) * page_bytes, page_bytes), share, strict=True
            ):
                tx.do(
                    partial(self.driver.map, address, page), partial(self.driver.unmap, address, page_bytes)
                )
            self.driver.set_access(start, len(share) * page_bytes)

    def _unmap(self, tx: Transaction, layer: int, slot: int, pages: Sequence[int]) -> None:
        for part, share in self._part_pages(pages):
            start, nbytes = self.address(layer, part, slot), len(share) * self.geometry.page_bytes
            tx.do(partial(self.driver.unmap, start, nbytes), partial(self._map_again, start, share))

    def _map_again(self, start: int, pages: Sequence[int]) -> None:
        page_bytes = self.geometry.page_bytes
        for index, page in enumerate(pages):
            self.driver.map(start + index * page_bytes, page)
        self.driver.set_access(start, len(pages) * page_bytes)

    def _hand_over(self, tx: Transaction, pages: Sequence[int], old: Owner, new: Owner) -> None:
        """Move pages in the ledger in their order, there and back: the order is where each page lies."""
        tx.do(partial(self._move, pages, old, new), partial(self._move, pages, new, old))

    def _move(self, pages: Sequence[int], old: Owner, new: Owner) -> None:
        for page in pages:
            self.ledger.move(page, old, new)
