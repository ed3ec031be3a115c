"""When cached prefixes come back, and what capacity would have kept them: for ``policy/measured.py``."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Upper edges of the age bins, in seconds: half an octave each, up to three hours; beyond is the last bin.
EDGES = tuple(0.25 * 2 ** (step / 2) for step in range(32))
# Half of a bin's width, as a share of its edge.
LEAST_LEFT = (1 - math.sqrt(0.5)) / 2


class ReuseTimes:
    """After how long a prefix at rest is used again, from both hits and misses of prefixes once there.

    Ends (prefixes given up unused) count too, so that a chance is one. Until there are events, a prior:
    of ``prior_events``, the share ``prior`` comes back, in a time that grows with age from ``tau_s`` on, so
    that the least recently used counts least.

    Args:
        prior: chance of reuse before anything is known, 0 to 1.
        prior_events: events that the prior weighs as much as; above 0.
        tau_s: seconds in which the prior expects reuse.
        half_life: events after which one counts half.
    """

    def __init__(self, *, prior: float, prior_events: float, tau_s: float, half_life: float) -> None:
        assert 0 <= prior <= 1 and prior_events > 0 and tau_s > 0 and half_life > 0
        self._prior, self._prior_events, self._tau_s = prior, prior_events, tau_s
        self._decay = 0.5 ** (1 / half_life)
        self._hits = [0.0] * len(EDGES)
        self._ends = [0.0] * len(EDGES)
        self._sums: list[tuple[float, float, float]] | None = None

    def reused(self, age_s: float) -> None:
        """A prefix was asked for ``age_s`` seconds after its last use, whether it was still there or not."""
        self._count(self._hits, age_s)

    def ended(self, age_s: float) -> None:
        """A prefix was given up, unused for ``age_s`` seconds."""
        self._count(self._ends, age_s)

    def chance(self, age_s: float) -> float:
        """Chance that a prefix unused for ``age_s`` is used again, 0 to 1."""
        hits, ends, _ = self._beyond(age_s)
        prior_hits = self._prior_events * self._prior / (1 + age_s / self._tau_s)
        return (hits + prior_hits) / (hits + ends + self._prior_events)

    def density(self, age_s: float) -> float:
        """Uses to come per second of keeping a prefix unused for ``age_s``; the rank of victims.

        Where prefixes take turns it rises with age until they are due, so that the one used last is given up
        first; it falls where they are overdue (least hit density, Beckmann et al., NSDI 2018).
        """
        hits, _, seconds = self._beyond(age_s)
        prior_hits = self._prior_events * self._prior
        return (hits + prior_hits) / (seconds + self._prior_events * (self._tau_s + age_s))

    def _beyond(self, age_s: float) -> tuple[float, float, float]:
        """Hits and ends at ``age_s`` or later, and the seconds from there to all of them."""
        if self._sums is None:
            self._sums = self._sums_from()
        first = _bin(age_s)
        hits, ends, _ = self._sums[first]
        later_hits, later_ends, later_edges = self._sums[first + 1]
        # The bin of age_s itself holds events up to its edge: half of its width is left at least.
        left = max(EDGES[first] - age_s, LEAST_LEFT * EDGES[first])
        own = (hits - later_hits + ends - later_ends) * left
        return hits, ends, own + max(0.0, later_edges - (later_hits + later_ends) * age_s)

    def _sums_from(self) -> list[tuple[float, float, float]]:
        """From each bin on: hits, ends, and the edges of both summed. Every victim's rank asks for them."""
        sums = [(0.0, 0.0, 0.0)]
        for hit, end, edge in zip(self._hits[::-1], self._ends[::-1], EDGES[::-1], strict=True):
            hits, ends, edges = sums[-1]
            sums.append((hits + hit, ends + end, edges + (hit + end) * edge))
        return sums[::-1]

    def _count(self, bins: list[float], age_s: float) -> None:
        for counts in (self._hits, self._ends):
            counts[:] = [self._decay * count for count in counts]
        bins[_bin(age_s)] += 1
        self._sums = None


def _bin(age_s: float) -> int:
    return min(bisect_left(EDGES, age_s), len(EDGES) - 1)


class _Sample(NamedTuple):
    time_s: float
    need: int
    tokens: int


# Lookups of prefixes that had been there after which what they hit counts half: capacity changes meanwhile.
HIT_HALF_LIFE = 16.0
# Steps of a curve, about: more would tell nothing more, and take longer to look at.
MOST_POINTS = 256


class _Point(NamedTuple):
    blocks: int
    tokens: float


@dataclass(frozen=True)
class HitCurve:
    """Tokens a second that are hit at a capacity of so many blocks.

    Attributes:
        points: steps of the curve under LRU, rising in both; the first is (0, 0).
        hull: its upper concave hull, which is what keeping some prefixes whole reaches in between.
        lookups: requests that it rests on.
        hit_share: share of these tokens that was hit of late, with the capacity that was there.
        lookups_per_s: of all requests.
    """

    points: tuple[_Point, ...]
    hull: tuple[_Point, ...]
    lookups: int
    hit_share: float = 0.0
    lookups_per_s: float = 0.0
    _beyond: dict[int, tuple[_Point, ...]] = field(default_factory=dict, compare=False)

    @property
    def reusable(self) -> float:
        """With room for everything."""
        return self.points[-1].tokens

    def lru(self, blocks: int) -> float:
        """Under LRU: all or nothing where prefixes take turns."""
        return self.points[bisect_right(self.points, blocks, key=_blocks) - 1].tokens

    def held(self, blocks: int) -> float:
        """With whole prefixes kept: on the straight line to where LRU would hit."""
        return _between(self.hull, blocks)

    def now(self, capacity: int) -> float:
        """With the ``capacity`` blocks there are: as counted of late, at least what LRU would hit.

        Counts lag behind a capacity that has just grown, and prefixes share room worse than the hull says.
        """
        return max(self.lru(capacity), self.hit_share * self.reusable)

    def expected(self, capacity: int, blocks: int) -> float:
        """With ``blocks`` where there are ``capacity`` now: from what is hit now towards what LRU would hit.

        With fewer blocks, as much less than now as the hull falls.
        """
        now = self.now(capacity)
        if blocks <= capacity:
            held = self.held(capacity)
            return now * self.held(blocks) / held if held else 0.0
        if capacity not in self._beyond:
            beyond = [point for point in self.points if point.blocks > capacity and point.tokens > now]
            self._beyond[capacity] = tuple(_hull([_Point(capacity, now), *beyond]))
        return _between(self._beyond[capacity], blocks)


def _between(hull: Sequence[_Point], blocks: int) -> float:
    after = bisect_right(hull, blocks, key=_blocks)
    if after == len(hull):
        return hull[-1].tokens
    low, high = hull[after - 1], hull[after]
    return low.tokens + (high.tokens - low.tokens) * (blocks - low.blocks) / (high.blocks - low.blocks)


def _blocks(point: _Point) -> int:
    return point.blocks


class ReuseDistances:
    """How much capacity each recent lookup would have needed to hit.

    Args:
        window_s: seconds after which a lookup is forgotten.
    """

    def __init__(self, window_s: float) -> None:
        assert window_s > 0
        self._window_s = window_s
        self._samples: deque[_Sample] = deque()
        self._hit = self._could = 0.0

    def record(self, now_s: float, need: int, tokens: int, hit: int = 0) -> None:
        """A lookup: ``tokens`` could be hit with ``need`` blocks; 0 tokens are a miss no capacity cures.

        Args:
            hit: tokens that it did hit.
        """
        assert need >= 0 and tokens >= 0
        self._samples.append(_Sample(now_s, need, tokens))
        self._forget(now_s)
        if tokens:
            decay = 0.5 ** (1 / HIT_HALF_LIFE)
            self._hit = decay * self._hit + min(hit, tokens)
            self._could = decay * self._could + tokens

    def curve(self, now_s: float) -> HitCurve:
        """The curve of the window; flat where nothing could be hit."""
        self._forget(now_s)
        # The first lookup only marks the time from which the others are counted.
        span_s = max(now_s - self._samples[0].time_s, 1.0) if self._samples else 1.0
        points, total = [_Point(0, 0.0)], 0.0
        for sample in sorted(self._samples, key=lambda sample: sample.need):
            if sample.tokens:
                total += sample.tokens / span_s
                point = _Point(max(sample.need, 1), total)
                if point.blocks == points[-1].blocks:
                    points.pop()
                points.append(point)
        share = self._hit / self._could if self._could else 0.0
        points = points[:: -max(1, len(points) // MOST_POINTS)][::-1]  # the last one stays
        points = points if points[0].blocks == 0 else [_Point(0, 0.0), *points]
        count = len(self._samples)
        return HitCurve(tuple(points), tuple(_hull(points)), count, share, count / span_s)

    def _forget(self, now_s: float) -> None:
        while self._samples and now_s - self._samples[0].time_s > self._window_s:
            self._samples.popleft()


def _hull(points: list[_Point]) -> list[_Point]:
    """Upper concave hull of ``points`` rising in both coordinates."""
    hull: list[_Point] = []
    for point in points:
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(low: _Point, high: _Point) -> float:
    return (high.tokens - low.tokens) / (high.blocks - low.blocks)
