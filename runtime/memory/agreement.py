"""How the ranks decide together whether a move is published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Vote:
    """What one rank says about a move.

    Attributes:
        epoch: the move's number.
        ok: whether this rank has prepared it.
        digest: 63-bit hash of the move and of the groups chosen for it; 0 where none were.
    """

    epoch: int
    ok: bool
    digest: int


class Agreement(Protocol):
    """A vote among all ranks. Every rank calls it once for each move, whatever became of the move there."""

    def all_agree(self, vote: Vote) -> bool:
        """Whether every rank voted ok with the same epoch and digest; the answer is the same on every rank.

        Raises:
            StateLost: a rank did not answer in time.
        """


class SoleRank:
    """The agreement of one rank with itself."""

    def all_agree(self, vote: Vote) -> bool:
        return vote.ok
