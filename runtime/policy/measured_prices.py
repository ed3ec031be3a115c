"""Prices of the actions at one allocation, from measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vamp_runtime.policy.measurements import Measurements


@dataclass(frozen=True)
class MeasuredPrices:
    """``decide.Prices`` at one allocation.

    Attributes:
        capacity: blocks of the pool now.
        level: groups of every layer that are out or on their way out.
        needed: blocks missing.
        partial_tokens: tokens in the last block of the request that would be preempted.
        waiting: requests in the queue, of late.
        victims: blocks that would be evicted, in that order.
        on_host: whether host memory holds the content of a block too; None where it holds none of them.
    """

    measurements: Measurements
    now_s: float
    capacity: int
    level: int
    needed: int
    partial_tokens: int
    waiting: int
    victims: Sequence[int]
    on_host: Callable[[int], bool] | None = None

    def evict(self, blocks: int) -> float:
        victims = set(self.victims[:blocks])
        return self.measurements.eviction_price(self.now_s, victims, self.capacity, self.level)

    def spill(self, blocks: int) -> float:
        victims = set(self.victims[:blocks])
        return self.measurements.eviction_price(self.now_s, victims, self.capacity, self.level, self.on_host)

    def offload(self, levels: int) -> float:
        return self.measurements.offload_price(self.now_s, self.capacity, self.level, self.level + levels)

    def combined(self, levels: int, blocks: int) -> float:
        return self.offload(levels) + self.evict(blocks)

    def queue(self) -> float | None:
        return self.measurements.queue_price(self.now_s, self.needed, self.waiting)

    def preempt(self) -> float:
        return self.measurements.preempt_price(self.needed, self.partial_tokens)
