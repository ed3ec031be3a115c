"""A memory driver that refuses one chosen call, or all from then on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from vamp_runtime.errors import DriverError
from vamp_runtime.memory.driver import MemoryDriver

CALLS = frozenset(
    {"reserve", "free", "create", "release", "map", "set_access", "unmap", "copy", "zero", "synchronize"}
)


class FaultyDriver:
    """Passes every call to ``inner``, except that the ``fail_at``-th counted one raises and does nothing.

    Args:
        fail_at: 1 for the first counted call; 0 for never, to find out how many there are.
        calls: names of the calls that count. Default: all that a real driver can refuse.
        mode: ``"once"``; ``"from_then_on"`` so that undoing fails too; or ``"every"`` so many calls, which an
            undo must not reach.

    Attributes:
        counter: counted calls so far, the refused ones included.
        log: their names, in order.
    """

    def __init__(
        self, inner: MemoryDriver, fail_at: int = 0, calls: Collection[str] | None = None, mode: str = "once"
    ) -> None:
        assert mode in ("once", "from_then_on", "every")
        assert calls is None or set(calls) <= CALLS
        self.inner = inner
        self.counted = CALLS if calls is None else frozenset(calls)
        self.mode = mode
        self.arm(fail_at)

    def arm(self, fail_at: int) -> None:
        """Count from zero again and refuse the ``fail_at``-th call from here."""
        self.fail_at = fail_at
        self.counter = 0
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self._counting(name, found) if name in self.counted else found

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.counter += 1
            self.log.append(name)
            late = self.mode == "from_then_on" and self.counter > self.fail_at
            again = self.mode == "every" and self.fail_at and self.counter % self.fail_at == 0
            if self.fail_at and (self.counter == self.fail_at or late or again):
                raise DriverError(name, f"refused on purpose, call {self.counter}")
            return call(*args)

        return counted
