"""The scheduler's side of the boundary: which blocks exist, which are in the pool, which move is on its way.

Pure bookkeeping. The scheduler decides and numbers the moves, the ranks carry them out (``Boundary``), and
their outcome comes back here. Block ids below ``pool_blocks`` are in the scheduler's pool; those from there
to ``mapped_blocks`` are the reserve: mapped and zeroed on every rank, ready to answer a failing allocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vamp_runtime.memory.move import Move, MoveKind, Outcome, Swap


@dataclass(frozen=True)
class Capacity:
    """What the ranks' memory can hold; every rank announces the same.

    Attributes:
        blocks_at: KV blocks mapped at each level, from 0 to the highest.
        experts: experts per layer on a rank.
        group: experts per expert group.
        level_bytes: HBM bytes that one level moves on a rank.
        layers: layers with experts on a rank.
        beside_steps: moves do not hold steps up.
    """

    blocks_at: tuple[int, ...]
    experts: int
    group: int
    level_bytes: int
    layers: int = 1
    beside_steps: bool = False

    @property
    def group_bytes(self) -> int:
        """HBM bytes of one group."""
        return self.level_bytes // self.layers

    @property
    def max_level(self) -> int:
        return len(self.blocks_at) - 1

    @property
    def blocks_per_level(self) -> int:
        """The fewest blocks that one more level brings (page remainders make levels differ by a block)."""
        steps = zip(self.blocks_at, self.blocks_at[1:], strict=False)
        return min((after - before for before, after in steps), default=0)


@dataclass(frozen=True)
class StepCommand:
    """Rides on a step to every rank: which blocks the pool owns from this step on, and at most one move."""

    claimed_blocks: int
    move: Move | None = None


class CapacityController:
    """Levels, reserve and the one move in flight, as the scheduler sees them.

    Args:
        pool_blocks: blocks in the scheduler's pool at start (without the reserve).

    Attributes:
        limit: highest level to ask for, where that is less than the ranks could give.
    """

    def __init__(self, pool_blocks: int) -> None:
        self.capacity: Capacity | None = None
        self.limit: int | None = None
        self.level = 0
        self.epoch = 0
        self.pool_blocks = pool_blocks
        self.initial_pool_blocks = pool_blocks
        self.reserve_target = 0
        self.in_flight: Move | None = None
        self._queued: Move | None = None
        self._sent_claim = pool_blocks

    def announce(self, capacity: Capacity) -> None:
        """Take over the ranks' capacity, once, before the first move."""
        assert self.capacity is None and capacity.blocks_at[0] >= self.pool_blocks, (
            capacity,
            self.pool_blocks,
        )
        self.capacity = capacity
        self.reserve_target = capacity.blocks_at[0] - self.pool_blocks

    @property
    def max_level(self) -> int:
        if self.capacity is None:
            return 0
        return self.capacity.max_level if self.limit is None else min(self.limit, self.capacity.max_level)

    @property
    def mapped_blocks(self) -> int:
        return self.capacity.blocks_at[self.level] if self.capacity else self.pool_blocks

    @property
    def moving(self) -> bool:
        """Whether a move is queued or under way; there is at most one."""
        return self._queued is not None or self.in_flight is not None

    @property
    def arriving_levels(self) -> int:
        """Levels of a queued or flying move to KV."""
        move = self._queued or self.in_flight
        return move.levels if move is not None and move.kind is MoveKind.OFFLOAD else 0

    @property
    def has_command(self) -> bool:
        return self._queued is not None or self._sent_claim != self.pool_blocks

    @property
    def reserve_blocks(self) -> int:
        """Blocks that can join the pool now. A restore on its way owns the tail, so then none."""
        move = self._queued or self.in_flight
        if move is not None and move.kind is MoveKind.RESTORE:
            return 0
        return self.mapped_blocks - self.pool_blocks

    def draw(self, blocks: int) -> range:
        """Ids of up to ``blocks`` reserve blocks, lowest first, which now belong to the pool."""
        assert blocks >= 0
        count = min(blocks, self.reserve_blocks)
        first, self.pool_blocks = self.pool_blocks, self.pool_blocks + count
        return range(first, first + count)

    def request_offload(self, levels: int) -> int:
        """Queue a move of up to ``levels`` levels to KV; the number queued, 0 where none can be."""
        levels = min(levels, self.max_level - self.level)
        if levels <= 0 or self.moving:
            return 0
        self._queue(MoveKind.OFFLOAD, levels)
        return levels

    def restore_limit(self, levels: int) -> int:
        """Pool blocks that may stay when ``levels`` levels go back, the reserve being kept."""
        assert self.capacity is not None and 0 < levels <= self.level
        return self.capacity.blocks_at[self.level - levels] - self.reserve_target

    def request_restore(self, levels: int) -> int:
        """Queue a move of ``levels`` levels back to the experts. Returns the new pool size, which the caller
        must already have emptied down to; 0 where no move can be queued."""
        if not 0 < levels <= self.level or self.moving:
            return 0
        self.pool_blocks = min(self.pool_blocks, self.restore_limit(levels))
        self._queue(MoveKind.RESTORE, levels)
        return self.pool_blocks

    def request_swap(self, swaps: Sequence[Swap]) -> int:
        """Queue an exchange of groups; the number of pairs queued, 0 where no move can be."""
        if self.moving or not swaps or not self.level:
            return 0
        self._queue(MoveKind.SWAP, 0, tuple(swaps))
        return len(swaps)

    def take_command(self) -> StepCommand | None:
        """What the step being built must carry, or ``None``. A taken move is in flight until ``settle``."""
        if not self.has_command:
            return None
        move, self._queued = self._queued, None
        if move is not None:
            # The pool may have grown between queueing and this step; the ranks check against what holds now.
            move = replace(move, claimed_blocks=self.pool_blocks)
            self.in_flight = move
        self._sent_claim = self.pool_blocks
        return StepCommand(self.pool_blocks, move)

    def settle(self, outcome: Outcome) -> Move:
        """Take over what the ranks agreed on for the move in flight; a failed one leaves the level alone."""
        move, self.in_flight = self.in_flight, None
        assert move is not None and outcome.epoch == move.epoch, (move, outcome)
        if outcome.ok:
            self.level = move.level_after
        assert outcome.level == self.level and outcome.blocks == self.mapped_blocks, (outcome, self.level)
        self.check_integrity()
        return move

    def check_integrity(self) -> None:
        assert 0 <= self.level <= (self.capacity.max_level if self.capacity else 0)
        assert self.initial_pool_blocks <= self.pool_blocks <= self.mapped_blocks

    def _queue(self, kind: MoveKind, levels: int, swaps: tuple[Swap, ...] = ()) -> None:
        self.epoch += 1
        self._queued = Move(self.epoch, kind, levels, self.level, self.pool_blocks, swaps)
