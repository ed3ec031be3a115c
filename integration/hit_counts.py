"""Reads the routers' hit counters back without holding a step up."""

from __future__ import annotations

import torch


class HitCounts:
    """Counters on a device and the last copy of them that has arrived on the host.

    Args:
        hits: int64 ``[layers, experts]``, counted since start.
    """

    def __init__(self, hits: torch.Tensor) -> None:
        self.hits = hits
        self._arrived: torch.cuda.Event | None = None
        self._copy = torch.empty(0, dtype=hits.dtype)
        self._asked_at = self._counted_at = 0

    def poll(self, step: int) -> tuple[list[list[int]], int] | None:
        """Counts as of the call before this one, or None at the first; asks for new ones.

        Many steps lie between two calls, so that waiting for a copy costs nothing; passing over one that has
        not arrived would let tensor-parallel ranks order their groups by different counts. On a CPU the
        counts are those of now.

        Args:
            step: number of steps taken, now.

        Returns:
            Counts, and how many steps have passed from those of the return before to these.
        """
        if self.hits.device.type == "cpu":
            rows: list[list[int]] = self.hits.tolist()
            return rows, self._passed(step)
        then = None
        if self._arrived is None:
            self._copy = torch.empty(self.hits.shape, dtype=self.hits.dtype, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            self._arrived.synchronize()
            then = self._copy.tolist(), self._passed(self._asked_at)
        self._copy.copy_(self.hits, non_blocking=True)
        self._arrived.record()
        self._asked_at = step
        return then

    def _passed(self, step: int) -> int:
        passed, self._counted_at = step - self._counted_at, step
        return passed
