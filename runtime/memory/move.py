"""What a move is and what becomes of it: the words that scheduler and ranks exchange."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MoveKind(enum.Enum):
    OFFLOAD = "offload"
    RESTORE = "restore"
    SWAP = "swap"


@dataclass(frozen=True)
class Swap:
    """One group of a layer that leaves HBM, and one that takes its pages."""

    layer: int
    leaving: int
    returning: int


@dataclass(frozen=True)
class Move:
    """One change of level, or an exchange of groups at the same level; the same on every rank.

    Attributes:
        epoch: one more than that of the move before, whether that was published or not.
        levels: groups of every layer to move; 0 for a SWAP.
        level_before: the level the scheduler believes in.
        claimed_blocks: blocks in the scheduler's pool; for a RESTORE those that stay in it.
        swaps: the groups of a SWAP, at most one pair for each layer.
    """

    epoch: int
    kind: MoveKind
    levels: int
    level_before: int
    claimed_blocks: int
    swaps: tuple[Swap, ...] = ()

    @property
    def level_after(self) -> int:
        """The level once the move is published."""
        gained = {MoveKind.OFFLOAD: self.levels, MoveKind.RESTORE: -self.levels, MoveKind.SWAP: 0}
        return self.level_before + gained[self.kind]


@dataclass(frozen=True)
class Outcome:
    """What became of a move on this rank.

    Attributes:
        level: groups of every layer out of HBM now.
        blocks: KV blocks backed now, claimed or not.
        bytes_moved: bytes of the HBM pages that changed hands.
        copied_bytes: bytes copied from homes.
        seconds: from request to publish or abandon.
        reason: why the move was abandoned; empty if it was published.
        pages_seconds: of ``seconds``, those in which pages were moved. The rest waited: for kernels queued
            before the redirect, for the other ranks, and for the step that publishes.
    """

    epoch: int
    ok: bool
    level: int
    blocks: int
    bytes_moved: int
    copied_bytes: int
    seconds: float
    reason: str
    pages_seconds: float = 0.0
