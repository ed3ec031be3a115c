"""Swaps groups that have become warm for groups that have become cold, beside serving and at a bounded rate.

The worker offers what its counters say (``Report.swaps``); what is taken of it, and when, is decided here,
since only the scheduler numbers moves. A refused swap costs nothing: the next look offers again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vamp_integration.arbiter import Arbiter
from vamp_runtime.policy.reselect import Allowance, Candidate, choose_swaps


class Reselector:
    """For the scheduler's thread only.

    Args:
        mib_per_s: most that is swapped, in MiB a second. A swap takes as long as any move may
            (``Levels.max_move_s``); at least one pair of groups is swapped.
    """

    def __init__(self, arbiter: Arbiter, mib_per_s: float) -> None:
        self.arbiter = arbiter
        self._allowance = Allowance(mib_per_s * 2**20, at=time.monotonic())
        self._candidates: list[Candidate] = []
        self._epoch = 0

    def offer(self, candidates: Sequence[Candidate]) -> None:
        """Replace what was offered before."""
        self._candidates, self._epoch = list(candidates), self.arbiter.controller.epoch

    def begin_step(self) -> None:
        """Ask for swaps where nothing else is on its way."""
        controller = self.arbiter.controller
        if not self._candidates or controller.moving or self.arbiter.pool.cordon_limit is not None:
            return
        if controller.epoch != self._epoch or controller.capacity is None:
            self._candidates = []  # another move has changed what is out
            return
        group_bytes = controller.capacity.group_bytes
        self._allowance = self._allowance.later(time.monotonic(), group_bytes)
        # How long a swap takes is known from the last one; before that one goes alone.
        levels = self.arbiter.levels
        most = max(1, int(levels.max_move_s / levels.swap_s))
        swaps = choose_swaps(self._candidates, self._allowance, group_bytes, most)
        if controller.request_swap(swaps):
            self._allowance = self._allowance.less(len(swaps) * group_bytes)
            self._candidates = [c for c in self._candidates if c.swap not in swaps]
            self._epoch = controller.epoch
