"""The KV cache's address range, of which only the head is its own, and its tail that grows and shrinks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from vamp_runtime.errors import ConfigError, IntegrityError
from vamp_runtime.memory.driver import MemoryDriver, Tier
from vamp_runtime.memory.geometry import KVGeometry
from vamp_runtime.memory.ledger import Owner, OwnerKind, PageLedger
from vamp_runtime.memory.mapped import PageMap, Place
from vamp_runtime.memory.transaction import Transaction

FREE = Owner(OwnerKind.FREE)
KV = Owner(OwnerKind.KV)
RESERVE = Owner(OwnerKind.RESERVE)


class KVRegion:
    """Pages of the KV cache. Pages that hold bytes of a claimed block are KV in the ledger, others RESERVE.

    Addresses beyond the tails are *covered* where a page lies there that is somebody else's: one that has
    left, or may come. No block table names a block there, and a page that comes to where it lies takes no
    driver call.

    Args:
        pages: pages backed and zeroed at first, all RESERVE until blocks are claimed.

    Raises:
        ConfigError: HBM has no room for ``pages``; nothing is left behind.

    Attributes:
        claimed: blocks whose ids are in the scheduler's pool.
        nbytes: bytes of addresses reserved.
    """

    def __init__(self, driver: MemoryDriver, ledger: PageLedger, geometry: KVGeometry, pages: int) -> None:
        assert ledger.page_bytes == geometry.page_bytes
        assert 0 <= pages <= geometry.max_pages
        self.geometry = geometry
        self.nbytes = geometry.nbytes
        self.claimed = 0
        self._driver = driver
        self._ledger = ledger
        self._pages: list[int] = []
        self._mapped = PageMap(driver, geometry.page_bytes)
        with Transaction() as tx:
            self._base = driver.reserve(self.nbytes)
            tx.on_undo(partial(driver.free, self._base, self.nbytes))
            handles = self._create(tx, pages)
            tx.on_undo(self.uncover)
            self.push(tx, handles)
            driver.synchronize()
            tx.commit()

    @property
    def pages(self) -> int:
        """Pages backed now."""
        return len(self._pages)

    @property
    def blocks(self) -> int:
        """Blocks backed whole now."""
        return self.geometry.blocks_for_pages(self.pages)

    def address(self, block: int, position: int = 0) -> int:
        geometry = self.geometry
        return self._base + position * geometry.position_stride + block * geometry.block_stride

    def claim(self, blocks: int) -> None:
        """Record that the scheduler's pool now holds the ids below ``blocks``."""
        assert 0 <= blocks <= self.blocks, f"{blocks} blocks claimed of {self.blocks}"
        before, after = (self.geometry.pages_for_blocks(n) for n in (self.claimed, blocks))
        self._ledger.move(self._pages[before:after], RESERVE, KV)
        self._ledger.move(self._pages[after:before], KV, RESERVE)
        self.claimed = blocks

    def push(self, tx: Transaction, handles: Sequence[int]) -> None:
        """Put FREE pages behind the tails, as RESERVE, and queue their zeroing."""
        self.cover(handles)
        self.extend(tx, handles)

    def cover(self, handles: Sequence[int]) -> int:
        """Let pages lie behind the addresses that follow the tails; how many did not yet.

        They may belong to others, and be read where else they lie: nothing is written. There is no undo,
        since what covers the tails harms nobody.

        Raises:
            DriverError: a call was refused; what covers the tails is known all the same.
        """
        return self._mapped.lay(self._shares(handles))

    def cover_slices(self, handles: Sequence[int], most: int) -> Iterator[int]:
        """The same, at most ``most`` pages at each turn; how many. Meanwhile the tails may not change."""
        return self._mapped.lay_slices(self._shares(handles), most)

    def uncover(self) -> None:
        """Unmap everything beyond the tails.

        Raises:
            DriverError: a call was refused; the rest still covers them.
        """
        self._mapped.clear(map(self._page_address, self._beyond()))

    @property
    def covered(self) -> dict[int, int]:
        """The page that lies at each covered index beyond the tails."""
        found = ((page, self._mapped.at(self._page_address(page))) for page in self._beyond())
        return {page: handle for page, handle in found if handle is not None}

    def extend(self, tx: Transaction, handles: Sequence[int]) -> None:
        """Count FREE pages that cover the tails as RESERVE, and queue their zeroing."""
        shares = self._shares(handles)
        assert all(share in self._mapped for share in shares), "pages count that do not lie there"
        tx.do(partial(self._append, handles), partial(self._drop, len(handles)))
        # Pages that are still being zeroed must not be unmapped.
        tx.on_undo(self._driver.synchronize)
        self._zero(shares)

    def shrink(self, tx: Transaction, n: int) -> list[int]:
        """Count the last ``n`` pages as FREE; they go on covering the tails.

        The undo queues their zeroing, since whoever got them may have overwritten them.
        """
        assert self.pages - n >= self.geometry.pages_for_blocks(self.claimed), (
            "a page holds bytes of a claimed block"
        )
        handles = self.last(n)
        self._drop(n)
        tx.on_undo(partial(self._append_zeroed, handles))
        return handles

    def last(self, n: int) -> list[int]:
        """The last ``n`` pages of the tails."""
        return self._pages[self.pages - n :]

    def check_integrity(self) -> None:
        """Pages are owned as ``claimed`` says and lie in their order, and no other page is owned so.

        Raises:
            IntegrityError: naming the page.
        """
        if self.claimed > self.blocks:
            raise IntegrityError(f"{self.claimed} blocks are claimed, {self.blocks} are backed")
        held = self.geometry.pages_for_blocks(self.claimed)
        for page, handle in enumerate(self._pages):
            wanted = KV if page < held else RESERVE
            if self._ledger.owner(handle) != wanted:
                raise IntegrityError(f"KV page {page} belongs to {self._ledger.owner(handle)}, not {wanted}")
            if (self._page_address(page), [handle]) not in self._mapped:
                raise IntegrityError(f"KV page {page} is {handle}, which does not lie there")
        owned = self._ledger.count(OwnerKind.KV) + self._ledger.count(OwnerKind.RESERVE)
        if owned != self.pages:
            raise IntegrityError(f"{owned} pages are owned by the KV cache, {self.pages} are backed")

    def close(self) -> None:
        """Give back every page and the addresses. Nobody else's addresses may lead to its pages any more."""
        self._mapped.clear(map(self._page_address, range(self.geometry.max_pages)))
        for handle in self._pages:
            self._ledger.remove(handle)
            self._driver.release(handle)
        self._pages = []
        self._driver.free(self._base, self.nbytes)

    def _create(self, tx: Transaction, pages: int) -> list[int]:
        handles: list[int] = []
        for _ in range(pages):
            handle = self._driver.create(self._ledger.page_bytes, Tier.HBM)
            if handle is None:
                blocks = self.geometry.blocks_for_pages(len(handles))
                raise ConfigError(
                    f"hbm: the KV cache needs {pages * self._ledger.page_bytes} bytes and"
                    f" {len(handles) * self._ledger.page_bytes} could be had; {blocks} blocks would work"
                )
            tx.on_undo(partial(self._driver.release, handle))
            self._ledger.add(handle, Tier.HBM, FREE)
            tx.on_undo(partial(self._ledger.remove, handle))
            handles.append(handle)
        return handles

    def _beyond(self) -> range:
        """Indices of the pages that the tails could still take."""
        return range(self.pages, self.geometry.max_pages)

    def _page_address(self, page: int) -> int:
        return self._base + self.geometry.page_offset(page)

    def _shares(self, handles: Sequence[int]) -> list[Place]:
        """Where pages that follow the tails lie: the address, and which of them, for each position."""
        first, positions = self.pages, self.geometry.positions
        assert first + len(handles) <= self.geometry.max_pages
        ranges = self.geometry.page_ranges(first, first + len(handles))
        return [(self._base + offset, handles[at::positions]) for at, (offset, _) in enumerate(ranges)]

    def _zero(self, shares: Sequence[Place]) -> None:
        for address, share in shares:
            self._driver.zero(address, len(share) * self._ledger.page_bytes)

    def _append_zeroed(self, handles: Sequence[int]) -> None:
        self._zero(self._shares(handles))
        self._append(handles)

    def _append(self, handles: Sequence[int]) -> None:
        self._ledger.move(handles, FREE, RESERVE)
        self._pages += handles

    def _drop(self, n: int) -> None:
        last = self.pages - n
        self._ledger.move(self._pages[last:], RESERVE, FREE)
        del self._pages[last:]
