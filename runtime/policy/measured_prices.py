"""Prices of the actions at one allocation, from measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vamp_runtime.policy.measurements import Measurements
from vamp_runtime.policy.situation import Situation


@dataclass(frozen=True)
class MeasuredPrices:
    """``decide.Prices`` at one allocation.

    Attributes:
        capacity: blocks of the pool now.
        victims: blocks that would be evicted, in that order.
        on_host: whether host memory holds the content of a block too; None where it holds none of them.
    """

    measurements: Measurements
    now_s: float
    capacity: int
    s: Situation
    victims: Sequence[int]
    on_host: Callable[[int], bool] | None = None
    _known: dict[tuple[int, bool], float] = field(default_factory=dict)

    def evict(self, blocks: int) -> float:
        return self._evict(blocks)

    def spill(self, blocks: int) -> float:
        return self._evict(blocks, copies=True)

    def offload(self, levels: int) -> float:
        return self.measurements.offload_price(self.now_s, self.capacity, self.s.level, self.s.level + levels)

    def combined(self, levels: int, blocks: int) -> float:
        return self.offload(levels) + self.evict(blocks)

    def queue(self) -> float | None:
        return self.measurements.queue_price(self.now_s, self.s.needed_blocks, self.s.waiting)

    def preempt(self) -> float:
        return self.measurements.preempt_price(self.s.needed_blocks, self.s.partial_tokens)

    def _evict(self, blocks: int, copies: bool = False) -> float:
        """Several actions evict the same blocks."""
        key = blocks, copies and self.on_host is not None
        if key not in self._known:
            victims, on_host = set(self.victims[:blocks]), self.on_host if copies else None
            self._known[key] = self.measurements.eviction_price(
                self.now_s, victims, self.capacity, self.s.level, on_host
            )
        return self._known[key]
