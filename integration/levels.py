"""Asks the ranks for levels, and keeps the block pool in step with what they report.

Between whoever wants levels (``arbiter.py``), the move bookkeeping (``vamp_runtime.controller``) and the live
pool (``pool.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vamp_integration.journal import Journal
from vamp_integration.log import logger
from vamp_integration.pool import VampBlockPool
from vamp_runtime.controller import Capacity, CapacityController
from vamp_runtime.memory.boundary import Move, MoveKind, Outcome

# Longest move, in seconds, where moves run beside steps: it holds none up, but blocks should keep coming.
BESIDE_STEPS_S = 0.25
# Shortest, so that the time of a level is never 0.
LEAST_MOVE_S = 1e-4
# After a failed move the ranks' memory is as before; trying again at once would fail again.
RETRY_S = 5.0


class Levels:
    """Levels that are there, on their way, and wanted; for the scheduler's thread only.

    Args:
        resize: called with the new number of blocks whenever the pool has grown or shrunk.
        max_move_s: longest time that one move may take, in seconds; at least one level moves.

    Attributes:
        max_move_s: as given, or BESIDE_STEPS_S where the ranks say that moves hold no step up.
        level_s, swap_s: seconds that one level, and one pair of groups, took in the last move of its kind.
        held: the level stays as it is, whatever the demand (``configure.hold``).
        wanted: levels that could not be asked for yet.
        no_moves_until: before this time a move would fail as the last one did.
        last_growth_at: when a growth last settled, or anything else after which the tail should stay.
    """

    def __init__(
        self, pool: VampBlockPool, journal: Journal, resize: Callable[[int], None], max_move_s: float
    ) -> None:
        self.controller = CapacityController(pool.num_gpu_blocks)
        self.resize = resize
        self.held = False
        self.wanted = 0
        self.max_move_s = self.level_s = self.swap_s = max_move_s
        self.no_moves_until = 0.0
        self.last_growth_at = time.monotonic()
        self._pool = pool
        self._journal = journal

    @property
    def coming(self) -> int:
        """Levels wanted, or asked for and on their way."""
        return self.wanted + self.controller.arriving_levels

    @property
    def most(self) -> int:
        """Levels that one move may take. How long one takes is known from the last move; before that, one."""
        return max(1, int(self.max_move_s / self.level_s))

    def begin_step(self) -> None:
        """Ask for levels that could not be asked for before, and those that a failed refill still owes."""
        if self.held:
            if self._pool.cordon_limit is None:
                self.draw_surplus()
            return
        self._refill()
        if self.wanted and self._pool.cordon_limit is None:
            self.wanted -= self.controller.request_offload(min(self.wanted, self.most))

    def want(self, levels: int) -> None:
        """Ask for up to ``levels`` more levels, now or as soon as the move under way has settled."""
        left = self.controller.max_level - self.controller.level - self.coming
        self.wanted += max(0, min(levels, left))
        self.begin_step()

    def hold(self) -> None:
        """Ask for no more levels, and forget those that were still to be asked for."""
        self.held, self.wanted = True, 0

    def draw(self, blocks: int) -> int:
        """Put up to ``blocks`` reserve blocks into the pool; the number put."""
        ids = self.controller.draw(blocks)
        if len(ids):
            self._pool.grow(ids)
            self.resize(self._pool.num_gpu_blocks)
            self._journal.capacity(self.controller)
        return len(ids)

    def draw_surplus(self) -> int:
        """Put what the reserve has beyond its target into the pool; the number put."""
        return self.draw(max(0, self.controller.reserve_blocks - self.controller.reserve_target))

    def announce(self, capacity: Capacity) -> None:
        """Take over what the ranks can hold."""
        self.controller.announce(capacity)
        if capacity.beside_steps:
            self.max_move_s = self.level_s = self.swap_s = BESIDE_STEPS_S
        self._journal.capacity(self.controller)

    def settle(self, outcome: Outcome) -> None:
        """Take over the outcome of a move."""
        move = self.controller.settle(outcome)
        self._journal.moved(self.controller, move, outcome)
        if move.kind is MoveKind.SWAP:
            self._swapped(move, outcome)
            return
        now = time.monotonic()
        if move.kind is MoveKind.OFFLOAD or not outcome.ok:
            self.last_growth_at = now
        if not outcome.ok:
            logger.warning("VAMP: move %d failed and was undone (%s)", outcome.epoch, outcome.reason)
            self.no_moves_until, self.wanted = now + RETRY_S, 0
            return
        # Beside steps, most of a move is waiting for one, which takes no longer for more levels.
        beside = self.controller.capacity is not None and self.controller.capacity.beside_steps
        own_s = outcome.pages_seconds if beside else outcome.seconds
        self.level_s = max(own_s, LEAST_MOVE_S) / move.levels
        if move.kind is MoveKind.OFFLOAD:
            logger.info(
                "VAMP: level %d, %d KV blocks (%d in the pool), %.1f MiB moved in %.1f ms",
                outcome.level,
                outcome.blocks,
                self.controller.pool_blocks,
                outcome.bytes_moved / 2**20,
                outcome.seconds * 1e3,
            )

    def _swapped(self, move: Move, outcome: Outcome) -> None:
        """A swap changes no capacity, and one that was refused is no reason to put other moves off."""
        if outcome.ok:
            self.swap_s = outcome.seconds / len(move.swaps)
            what = f"exchanged, {outcome.bytes_moved / 2**20:.1f} MiB in {outcome.seconds * 1e3:.1f} ms"
        else:
            what = f"not exchanged ({outcome.reason})"
        logger.info("VAMP: %d pairs of expert groups %s", len(move.swaps), what)

    def _refill(self) -> None:
        """A move that failed has left the reserve short; try again when its time has come."""
        controller = self.controller
        short = controller.reserve_target - (controller.mapped_blocks - controller.pool_blocks)
        room = controller.level < controller.max_level and not controller.moving
        if short > 0 and room and not self.wanted and time.monotonic() >= self.no_moves_until:
            self.wanted = 1
