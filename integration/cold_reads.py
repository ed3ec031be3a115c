"""How many experts a step would read from host memory at every level, from the hit counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LevelCounts:
    """What ``steps`` steps would have read.

    Attributes:
        reads: by level from 0 up, experts of the coldest groups read in a step, mean over the layers.
        steps: that were counted.
    """

    reads: tuple[float, ...]
    steps: int


class ColdReads:
    """Counts between two looks, as ``host_reads.HostReads`` takes them: hits fall evenly on the steps.

    Args:
        group_of: ``[layers][experts]``, the group of each expert.
        groups: groups of a layer.
        max_level: groups that may be out.
    """

    def __init__(self, group_of: Sequence[Sequence[int]], groups: int, max_level: int) -> None:
        self._group_of = np.asarray(group_of)
        self._groups, self._max_level = groups, max_level
        self._before = np.zeros(self._group_of.shape)

    def look(
        self, hits: Sequence[Sequence[int]], steps: int, coldest: Sequence[Sequence[int]]
    ) -> LevelCounts:
        """What the steps since the last look would have read.

        Args:
            hits: ``[layers][experts]`` since start; one that has fallen was set to 0 meanwhile.
            steps: that the hits since the last look were counted in, 1 or more.
            coldest: per layer, groups in the order in which they leave; at least ``max_level`` of them.
        """
        now = np.asarray(hits, dtype=np.float64)
        grown = np.where(now >= self._before, now - self._before, now)
        share = np.minimum(grown, 1) if steps == 1 else -np.expm1(-grown / steps)
        by_group = np.zeros((len(now), self._groups))
        np.add.at(by_group, (np.arange(len(now))[:, None], self._group_of), share)
        first = np.asarray([row[: self._max_level] for row in coldest], dtype=np.intp)
        reads = np.take_along_axis(by_group, first, axis=1).cumsum(axis=1).mean(axis=0)
        self._before = now
        return LevelCounts((0.0, *map(float, reads)), steps)
