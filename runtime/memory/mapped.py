"""Pages put behind addresses, and taken away again, in a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from vamp_runtime.memory.driver import MemoryDriver
from vamp_runtime.memory.transaction import Transaction

#: An address, and the pages that lie behind it one after the other.
Place = tuple[int, Sequence[int]]


def map_pages(tx: Transaction, driver: MemoryDriver, page_bytes: int, places: Iterable[Place]) -> None:
    """Map pages and open them."""
    for address, pages in places:
        nbytes = len(pages) * page_bytes
        tx.do(partial(driver.map, address, *pages), partial(driver.unmap, address, nbytes))
        driver.set_access(address, nbytes)


def unmap_pages(tx: Transaction, driver: MemoryDriver, page_bytes: int, places: Iterable[Place]) -> None:
    """Unmap pages; the undo maps and opens them again."""
    for address, pages in places:
        nbytes = len(pages) * page_bytes
        tx.do(partial(driver.unmap, address, nbytes), partial(_map_again, driver, address, pages, nbytes))


def _map_again(driver: MemoryDriver, address: int, pages: Sequence[int], nbytes: int) -> None:
    driver.map(address, *pages)
    driver.set_access(address, nbytes)
