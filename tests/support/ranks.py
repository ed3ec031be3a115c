"""Ranks as threads of one process: a vote that really waits for every rank, and a way to run them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vamp_runtime.errors import StateLost
from vamp_runtime.memory.agreement import Agreement, Vote

T = TypeVar("T")


class ThreadRanks:
    """The votes of ``n`` threads; ``timeout`` seconds are all that a silent rank is given."""

    def __init__(self, n: int, timeout: float) -> None:
        self.n = n
        self._timeout = timeout
        self._votes: list[Vote | None] = [None] * n
        self._agreed = False
        # The last to arrive counts; nobody can vote again before all have read the answer and come back.
        self._barrier = threading.Barrier(n, action=self._count)

    def seat(self, rank: int) -> Agreement:
        return _Seat(self, rank)

    def vote(self, rank: int, vote: Vote) -> bool:
        self._votes[rank] = vote
        try:
            self._barrier.wait(self._timeout)
        except threading.BrokenBarrierError:
            raise StateLost(f"epoch {vote.epoch}: no vote of every rank in {self._timeout} s") from None
        return self._agreed

    def _count(self) -> None:
        first = self._votes[0]
        self._agreed = first is not None and first.ok and all(vote == first for vote in self._votes)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """``work(rank)`` on a thread of each rank; the results by rank."""
        with ThreadPoolExecutor(self.n) as pool:
            return list(pool.map(work, range(self.n)))


class _Seat:
    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def all_agree(self, vote: Vote) -> bool:
        return self._ranks.vote(self._rank, vote)
