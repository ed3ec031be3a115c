"""Pages put behind addresses: in a transaction that takes them away again, or left for the next move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count, islice

from vamp_runtime.memory.driver import MemoryDriver
from vamp_runtime.memory.runs import runs
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


class PageMap:
    """Which page the driver has mapped at each of some addresses, whoever owns it and whether needed or not.

    A page may lie behind several addresses. So one that has gone elsewhere stays where it was until another
    is to lie there, and moves of the same pages to and fro cost no driver call. What is recorded is what the
    driver has mapped, also after it has refused a call.
    """

    def __init__(self, driver: MemoryDriver, page_bytes: int) -> None:
        self._driver = driver
        self._page_bytes = page_bytes
        self._page_at: dict[int, int] = {}
        #: Addresses with a mapping that could not be opened: to be mapped anew.
        self._shut: set[int] = set()

    def __contains__(self, place: Place) -> bool:
        """Whether just these pages lie there, open."""
        return not any(True for _ in self._missing(place))

    def lay(self, places: Iterable[Place]) -> int:
        """Let pages lie behind addresses that nobody reads; how many did not yet.

        Each place lies in one reservation. What lies there in a page's stead is unmapped.

        Raises:
            DriverError: a call was refused; those before it have been done.
        """
        return sum(self._put(dict(self._missing(place))) for place in places)

    def lay_slices(self, places: Iterable[Place], most: int) -> Iterator[int]:
        """The same where all places lie in one reservation, at most ``most`` pages at each turn; how many.

        Each turn goes on from where the last one ended: meanwhile nothing may be unmapped.
        """
        missing = chain.from_iterable(map(self._missing, places))
        while pages := dict(islice(missing, most)):
            yield self._put(pages)

    def clear(self, addresses: Iterable[int]) -> None:
        """Unmap whatever lies at these addresses of one reservation.

        Raises:
            DriverError: a call was refused; those before it have been done.
        """
        for run in self._runs(at for at in addresses if at in self._page_at):
            self._driver.unmap(run[0], len(run) * self._page_bytes)
            self._shut.difference_update(run)
            for at in run:
                del self._page_at[at]

    def at(self, address: int) -> int | None:
        """The page at an address."""
        return self._page_at.get(address)

    def _missing(self, place: Place) -> Iterator[tuple[int, int]]:
        """Addresses of a place, and the pages that do not lie there, open."""
        address, pages = place
        for at, page in zip(count(address, self._page_bytes), pages, strict=False):
            if self._page_at.get(at) != page or at in self._shut:
                yield at, page

    def _put(self, pages: Mapping[int, int]) -> int:
        self.clear(pages)
        for run in self._runs(pages):
            self._map(run, [pages[at] for at in run])
        return len(pages)

    def _map(self, run: Sequence[int], pages: Sequence[int]) -> None:
        self._driver.map(run[0], *pages)
        self._page_at.update(zip(run, pages, strict=True))
        self._shut.update(run)
        self._driver.set_access(run[0], len(run) * self._page_bytes)
        self._shut.difference_update(run)

    def _runs(self, addresses: Iterable[int]) -> list[list[int]]:
        return [[at for (at,) in run] for run in runs(((at,) for at in addresses), self._page_bytes)]
