"""The hit rate of the prefix cache over a sliding window, and what it would be with more capacity."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Query:
    """Tokens of one request's prefix lookup."""

    time_s: float
    queried: int
    hit: int
    ghost: int


class HitRate:
    """r_hit of the cost model, over the last ``window_tokens`` or ``window_s``, whichever is less.

    Two readings:

    - ``observed`` is the paper's: tokens hit over tokens queried.
    - ``reusable`` also counts *ghost hits*: missed tokens whose block was evicted recently. Where sessions
      take turns and do not fit, every block is evicted just before it is needed; observed hits fall to zero,
      eviction looks free, and a policy that trusts them never expands in exactly the regime that capacity
      would cure.

    Both start from a prior, because at r_hit = 0 eviction is free and nothing would ever expand: until the
    window holds ``prior_tokens``, the tokens that are missing count as hit at the rate ``prior``; after that
    the prior is gone.

    Record a request once, when it is admitted, and not each time it is looked up while it waits.

    Args:
        window_tokens: queried tokens that the window holds; whole requests, the fewest that reach it.
        window_s: seconds after which a request is forgotten.
        prior: hit rate to start from, 0 to 1.
        prior_tokens: tokens the prior stands for; 0 leaves it only for an empty window.
        ghost_blocks: evicted blocks to remember. Give it the blocks that full expansion would add: what was
            evicted before those could not have been kept by it either.
    """

    def __init__(
        self, *, window_tokens: int, window_s: float, prior: float, prior_tokens: int, ghost_blocks: int
    ) -> None:
        assert window_tokens > 0 and window_s > 0, "the window holds something"
        assert 0 <= prior <= 1 and prior_tokens >= 0 and ghost_blocks >= 0
        self._window_tokens = window_tokens
        self._window_s = window_s
        self._prior = prior
        self._prior_tokens = prior_tokens
        self._ghost_blocks = ghost_blocks
        self._ghosts: dict[Hashable, None] = {}  # in order of eviction, oldest first
        self._queries: deque[_Query] = deque()
        self._queried = 0
        self._hit = 0
        self._ghost = 0
        self._now_s = -math.inf

    def evicted(self, block_hash: Hashable) -> None:
        """Remember a block that has just lost its cached content."""
        self._ghosts.pop(block_hash, None)
        self._ghosts[block_hash] = None
        if len(self._ghosts) > self._ghost_blocks:
            del self._ghosts[next(iter(self._ghosts))]

    def record(
        self, now_s: float, queried: int, hit: int, missed: Iterable[Hashable] = (), tokens_per_block: int = 0
    ) -> int:
        """Count one request; its missed tokens that had been evicted lately.

        Args:
            now_s: seconds on a clock that never runs back.
            queried: tokens of the prompt that were looked up.
            hit: tokens of these that were found.
            missed: hashes of its full blocks that were not found, in order. Hashes are chained: one that is
                remembered as evicted proves that the whole prefix before it was there once, also where a
                hybrid model keeps something for some blocks only. Those found are forgotten, since the
                request computes them anew.
            tokens_per_block: tokens that each of ``missed`` stands for.
        """
        assert 0 <= hit <= queried
        reach = 0
        for block, block_hash in enumerate(missed, 1):
            if block_hash in self._ghosts:
                del self._ghosts[block_hash]
                reach = block
        ghost = min(reach * tokens_per_block, queried - hit)
        self._queries.append(_Query(now_s, queried, hit, ghost))
        self._queried += queried
        self._hit += hit
        self._ghost += ghost
        self._slide(now_s)
        return ghost

    def observed(self, now_s: float) -> float:
        """Tokens hit over tokens queried, 0 to 1."""
        self._slide(now_s)
        return self._rate(self._hit)

    def reusable(self, now_s: float) -> float:
        """Tokens hit now or found among the recently evicted, over tokens queried, 0 to 1."""
        self._slide(now_s)
        return self._rate(self._hit + self._ghost)

    def _rate(self, hits: int) -> float:
        missing = max(0, self._prior_tokens - self._queried)
        total = self._queried + missing
        return (hits + self._prior * missing) / total if total else self._prior

    def _slide(self, now_s: float) -> None:
        assert now_s >= self._now_s, "the clock runs back"
        self._now_s = now_s
        while self._queries:
            oldest = self._queries[0]
            recent = now_s - oldest.time_s <= self._window_s
            if recent and self._queried - oldest.queried < self._window_tokens:
                return
            self._queries.popleft()
            self._queried -= oldest.queried
            self._hit -= oldest.hit
            self._ghost -= oldest.ghost
