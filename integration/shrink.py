"""Takes levels back from the KV cache: cordon the tail, wait until it is free, send the restore.

Cached blocks in the tail lose their hashes; the decision has priced that loss (``decide_restore``). Where
vLLM copies KV blocks to host memory, the tail is free only when none of them is still being copied.
"""

from __future__ import annotations

import time

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vamp_integration.arbiter import Arbiter
from vamp_integration.settings import VampSettings
from vamp_runtime.policy.restore import RestoreSituation, decide_restore, too_soon

# Looking costs a walk over the free blocks, so not in every step.
LOOK_EVERY_S = 0.25
# Levels that go back together at most: half as many, and so on, where not all of them should.
MOST_LEVELS = 8


class Shrinker:
    """The restoring half of the policy, for the scheduler's thread only."""

    def __init__(self, arbiter: Arbiter, settings: VampSettings) -> None:
        self.arbiter = arbiter
        self.settings = settings
        self._levels = 0
        self._cordoned_at = 0.0
        self._looked_at = 0.0
        self._steps = 0
        self._rising = True

    def begin_step(self, waiting: int) -> None:
        """Carry a restore on, or begin one."""
        self._steps += 1
        if self.arbiter.pool.cordon_limit is not None:
            self._carry_on()
        elif self.settings.exercise_steps:
            self._exercise()
        elif self.settings.restore and not self.arbiter.levels.held:
            self._look(waiting)

    def restore(self, levels: int) -> bool:
        """Begin to take ``levels`` levels back; whether that was possible now."""
        arbiter, controller = self.arbiter, self.arbiter.controller
        if controller.moving or not 0 < levels <= controller.level:
            return False
        self._levels, self._cordoned_at = levels, time.monotonic()
        limit = min(controller.restore_limit(levels), controller.pool_blocks)
        arbiter.pool.cordon(limit)
        self._carry_on()
        return True

    def _carry_on(self) -> None:
        arbiter, limit = self.arbiter, self.arbiter.pool.cordon_limit
        assert limit is not None
        if arbiter.pool.cordoned_free and not self._copying(limit):
            if arbiter.host_kv is not None:
                arbiter.host_kv.forget(limit)
            arbiter.pool.truncate()
            blocks = arbiter.controller.request_restore(self._levels)
            assert blocks == arbiter.pool.num_gpu_blocks, (blocks, arbiter.pool.num_gpu_blocks)
            arbiter.levels.resize(blocks)
            arbiter.journal.capacity(arbiter.controller)
        elif time.monotonic() - self._cordoned_at > self.settings.max_cordon_s:
            arbiter.pool.lift_cordon()
            arbiter.journal.cordons_given_up += 1
            # The next try has to wait as long as after a growth.
            arbiter.levels.last_growth_at = time.monotonic()

    def _copying(self, limit: int) -> bool:
        """Whether a copy to or from host memory still keeps the free tail from being unmapped."""
        host_kv = self.arbiter.host_kv
        waits = host_kv is not None and host_kv.uses(limit)
        self.arbiter.journal.steps_waited_for_copies += waits
        return waits

    def _look(self, waiting: int) -> None:
        now, arbiter, controller = time.monotonic(), self.arbiter, self.arbiter.controller
        if controller.level == 0 or controller.moving or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        if arbiter.measured is not None and arbiter.host_kv is not None and arbiter.host_kv.copies_known:
            waiting = 0  # a request may be in the queue because that is the cheapest place for it
        if too_soon(waiting, now - arbiter.levels.last_growth_at, arbiter.costs.restore) is not None:
            return  # before tails are walked over
        most = min(MOST_LEVELS, arbiter.levels.most, controller.level)
        for levels in (most >> halved for halved in range(most.bit_length())):
            leaving = self._leaving(levels)
            situation = self._situation(levels, leaving, waiting, now)
            if arbiter.measured is None:
                decision = decide_restore(situation, arbiter.costs.parameters, arbiter.costs.restore)
            else:
                cached = {block.block_id for block in leaving if block.block_hash is not None}
                decision = arbiter.measured.decide_restore(situation, controller.level, levels, cached)
            if decision.levels:
                self.restore(levels)
                return

    def _situation(
        self, levels: int, leaving: list[KVCacheBlock], waiting: int, now: float
    ) -> RestoreSituation:
        """With so many levels as one, and what may leave with them."""
        arbiter, controller = self.arbiter, self.arbiter.controller
        capacity = controller.capacity
        assert capacity is not None
        tail = self._tail(levels)
        cached = [block for block in leaving if block.block_hash is not None]
        ages = [now - arbiter.pool.freed_at.get(block.block_id, now) for block in cached]
        return RestoreSituation(
            level=1,
            shards_per_group=levels * capacity.group,
            experts=capacity.experts,
            blocks_per_level=max(len(tail), 1),
            # Levels whose blocks never joined the pool, or have left it already, go back for nothing.
            clean_blocks=len(leaving) - len(cached) if tail else 1,
            cached_blocks=len(cached),
            tokens_per_block=arbiter.tokens_per_block,
            cached_age_s=min(ages, default=0.0),
            r_hit=arbiter.r_hit(now),
            waiting_requests=waiting,
            since_growth_s=now - arbiter.levels.last_growth_at,
            moving=controller.moving,
            copied_blocks=sum(map(arbiter.host_holds, cached)),
            load_block_s=arbiter.load_block_s,
        )

    def _tail(self, levels: int) -> list[KVCacheBlock]:
        """What leaves with so many levels, whatever the free queue would hand out next."""
        limit = self.arbiter.controller.restore_limit(levels)
        tail: list[KVCacheBlock] = self.arbiter.pool.blocks[min(limit, self.arbiter.controller.pool_blocks) :]
        return tail

    def _leaving(self, levels: int) -> list[KVCacheBlock]:
        """Of the tail, the blocks that are free, and those in use whose content host memory holds too.

        A cordon waits for these, and whoever uses them loses no more than a load.
        """
        return [block for block in self._tail(levels) if block.ref_cnt == 0 or self._copied(block)]

    def _copied(self, block: KVCacheBlock) -> bool:
        arbiter = self.arbiter
        if arbiter.measured is None or arbiter.host_kv is None:
            return False
        return block.block_hash is None or arbiter.host_holds(block)

    def _exercise(self) -> None:
        """Diagnostic: up a level every so many steps until the bound, then down again, for ever."""
        controller = self.arbiter.controller
        # Also while a level is on its way that a request waits for: it is not to go back at once.
        if controller.level == controller.max_level:
            self._rising = False
        elif controller.level == 0:
            self._rising = True
        if controller.moving or self._steps % self.settings.exercise_steps or controller.max_level == 0:
            return
        if self._rising:
            self.arbiter.levels.draw_surplus()
            self.arbiter.levels.want(1)
        else:
            self.restore(1)
