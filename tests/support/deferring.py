"""A memory driver that puts copies off as long as it may, as a GPU does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vamp_runtime.memory.driver import MemoryDriver


class DeferringDriver:
    """Queues ``copy`` and ``zero`` until ``synchronize`` or a look at the bytes, and minds what is unmapped.

    The contract lets copies run behind the caller, while ``unmap`` waits for nothing: taking away a page that
    a queued copy still needs is an ``AssertionError`` here.
    """

    def __init__(self, inner: MemoryDriver) -> None:
        self._inner = inner
        self._queue: list[tuple[Callable[[], None], list[range]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        ranges = [range(target, target + nbytes), range(source, source + nbytes)]
        self._queue.append((lambda: self._inner.copy(target, source, nbytes), ranges))

    def zero(self, address: int, nbytes: int) -> None:
        self._queue.append((lambda: self._inner.zero(address, nbytes), [range(address, address + nbytes)]))

    def unmap(self, address: int, nbytes: int) -> None:
        for _, ranges in self._queue:
            for used in ranges:
                apart = used.stop <= address or address + nbytes <= used.start
                assert apart, f"unmap of {nbytes} bytes at {address:#x} under a copy that is still to run"
        self._inner.unmap(address, nbytes)

    def synchronize(self) -> None:
        self._inner.synchronize()
        for work, _ in self._queue:
            work()
        self._queue.clear()

    def read(self, address: int, nbytes: int) -> bytes:
        self.synchronize()
        return self._inner.read(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        self.synchronize()
        self._inner.write(address, data)
