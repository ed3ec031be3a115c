"""Which expert groups should be out: a group that is used more than one in HBM takes its place.

Levels take the coldest groups of the moment, and traffic changes: what was cold on one domain serves others
above average. Use is counted in tokens routed to a group, and what lies back counts less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from vamp_runtime.memory.move import Swap

# A group returns only if it was used this much more than the one that leaves, so that two groups about
# equally warm do not take turns,
MARGIN = 0.25
# and by so many standard deviations of counts that are random.
DEVIATIONS = 3.0
# Of what was counted, the share that still counts at the next look.
DECAY = 0.8
# Budget that may be saved up, so that moves are few and not small: each waits for the steps under way.
BURST_S = 1.0


@dataclass(frozen=True)
class Candidate:
    """A swap, and by how many tokens more the returning group was used."""

    swap: Swap
    gain: float


class DecayedUse:
    """Use of the groups of every layer.

    Args:
        group_of: ``[layers][experts]``, the group of each expert.
        groups: groups of a layer.
    """

    def __init__(self, group_of: Sequence[Sequence[int]], groups: int) -> None:
        self._group_of = group_of
        self._before = [[0] * len(row) for row in group_of]
        self.use = [[0.0] * groups for _ in group_of]

    def update(self, hits: Sequence[Sequence[int]]) -> list[list[float]]:
        """Take over counts ``[layers][experts]`` since start; use ``[layers][groups]`` now.

        Counts below the last ones are those of counters that began anew.
        """
        for layer, row in enumerate(hits):
            use = [DECAY * value for value in self.use[layer]]
            for group, now, then in zip(self._group_of[layer], row, self._before[layer], strict=True):
                use[group] += now - then if now >= then else now
            self.use[layer], self._before[layer] = use, list(row)
        return self.use


def coldest_first(use: Sequence[float], movable: int) -> list[int]:
    """The first ``movable`` groups, least used first; ties go to the highest index, as before any count."""
    return sorted(range(movable - 1, -1, -1), key=use.__getitem__)


def steady_order(
    before: Sequence[int], resident: Collection[int], coldest: Sequence[int], front: int
) -> list[int]:
    """``coldest``, but the ``front`` groups that would have left next stay so, each in its place.

    As long as they are among the coldest ``2 * front`` of those in HBM: counts of cold groups are mostly
    chance, and whoever is about to leave has pages mapped ahead and a home that another would have to get.

    Args:
        before: the order until now.
        resident: groups that are in HBM and may leave; only they change places.
        coldest: every group that may leave, least used first.
    """
    present = [group for group in coldest if group in resident]
    near = set(present[: 2 * front])
    first = list(islice((group for group in before if group in resident), front))
    staying = near.intersection(first)
    others = (group for group in present if group not in staying)
    held = [group if group in staying else next(others) for group in first]
    placed = chain(held, others)
    return [next(placed) if group in resident else group for group in coldest]


def best_swap(
    layer: int, use: Sequence[float], out: Collection[int], ready: Collection[int]
) -> Candidate | None:
    """The most used group of ``out`` for the least used of ``ready``, or None where that is not worth it."""
    if not out or not ready:
        return None
    warm = max(out, key=lambda group: (use[group], -group))
    cold = min(ready, key=lambda group: (use[group], -group))
    gain = use[warm] - use[cold]
    if gain <= max(MARGIN * use[cold], DEVIATIONS * math.sqrt(use[warm] + use[cold])):
        return None
    return Candidate(Swap(layer, leaving=cold, returning=warm), gain)


@dataclass(frozen=True)
class Allowance:
    """Bytes that may be swapped: saved up at a rate, at most ``BURST_S`` of it, but always a group."""

    bytes_per_s: float
    saved: float = 0.0
    at: float = 0.0

    def later(self, now: float, group_bytes: int) -> Allowance:
        """What is saved at ``now``, in seconds of a monotonic clock."""
        most = max(self.bytes_per_s * BURST_S, group_bytes)
        saved = self.saved + self.bytes_per_s * max(0.0, now - self.at)
        return Allowance(self.bytes_per_s, min(saved, most), now)

    def less(self, nbytes: int) -> Allowance:
        return Allowance(self.bytes_per_s, self.saved - nbytes, self.at)


def choose_swaps(
    candidates: Sequence[Candidate], allowance: Allowance, group_bytes: int, most: int
) -> list[Swap]:
    """The swaps of the next move: the largest gains first, ``most`` of them at most.

    None while more of them are wanted than ``allowance`` holds and it can still grow.
    """
    wanted = min(len(candidates), most)
    count = min(wanted, int(allowance.saved // group_bytes))
    can_grow = allowance.saved < max(allowance.bytes_per_s * BURST_S, group_bytes)
    if count < wanted and can_grow:
        return []
    ranked = sorted(candidates, key=lambda candidate: (-candidate.gain, candidate.swap.layer))
    return [candidate.swap for candidate in ranked[:count]]
