"""Decides at a KV allocation that would evict or fail.

Stands between vLLM's allocation (``kv_manager.py``), the live pool (``pool.py``), the levels (``levels.py``)
and the cost model (``vamp_runtime.policy``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, get_block_hash

from vamp_integration.cold_reads import LevelCounts
from vamp_integration.commands import Report
from vamp_integration.costs import Costs
from vamp_integration.journal import Journal
from vamp_integration.kv_offload import VampOffloadingConnector
from vamp_integration.levels import Levels
from vamp_integration.measured import EngineFacts, Measured
from vamp_integration.pool import VampBlockPool
from vamp_kernels.ranges import ranged
from vamp_runtime.controller import StepCommand
from vamp_runtime.policy.decide import Action, Decision, decide
from vamp_runtime.policy.situation import Situation

# Levels that seem worth their price are asked for this part of the pool ahead of what is used of them.
AHEAD = 16
# Actions by which an allocation does without the tail that is about to go back.
DOES_WITHOUT = (Action.EVICT, Action.SPILL)


class Arbiter:
    """Answers one allocation at a time; for the scheduler's thread only.

    Args:
        tokens_per_block: tokens of one KV block.
        resize, max_move_s: as in ``Levels``.

    Attributes:
        running, waiting: requests that run as the step begins, and that the last one left in the queue.
        host_kv: the connector that copies KV blocks to host memory and back, where the engine has one.
        reads: what was counted last of the experts that steps read.
        measured: prices decisions where the policy's profile says so; else the paper's cost model does.
    """

    def __init__(
        self,
        pool: VampBlockPool,
        costs: Costs,
        tokens_per_block: int,
        resize: Callable[[int], None],
        max_move_s: float,
    ) -> None:
        self.pool = pool
        self.costs = costs
        self.tokens_per_block = tokens_per_block
        self.journal = Journal()
        self.levels = Levels(pool, self.journal, resize, max_move_s)
        self.controller = self.levels.controller
        self.hash_tokens = pool.hash_block_size
        self.hit_rate = costs.hit_rate(ghost_blocks=0)
        self.host_kv: VampOffloadingConnector | None = None
        self.holding = False
        self.running = self.waiting = 0
        self.measured: Measured | None = None
        self.reads: LevelCounts | None = None
        pool.on_evict = self._evicted

    def measure(self, facts: Callable[[], EngineFacts]) -> None:
        """Price by measurements where ``costs`` has parameters for it, beginning anew; else by the paper.

        Raises ``ConfigError`` where the policy does not know the engine's kind of KV cache.
        """
        parameters, capacity = self.costs.measured, self.controller.capacity
        measured = None
        if parameters is not None:
            host = self.host_holds, self.load_block_s, self.host_share
            measured = Measured(parameters, self.costs, self.pool, facts(), *host)
        if measured is not None and capacity is not None:
            measured.announce(capacity)
            if self.reads is not None:
                measured.counted(self.reads)
        self.measured, self.pool.on_lost = measured, measured.measurements.lost if measured else None

    # Around a step.

    def command(self) -> StepCommand | None:
        """What the step that has just been scheduled carries.

        A hold ends here: a request that finishes between two schedules must free its blocks at once.
        """
        self.holding = False
        return self.controller.take_command()

    def settle(self, report: Report) -> None:
        """Take over what the ranks report: their capacity, or the outcome of a move."""
        if report.capacity is not None:
            capacity = report.capacity
            self.levels.announce(capacity)
            self.hit_rate = self.costs.hit_rate(capacity.blocks_at[-1] - capacity.blocks_at[0] + 1)
            if self.measured is not None:
                self.measured.announce(capacity)
        if report.reads is not None:
            self.reads = report.reads
            if self.measured is not None:
                self.measured.counted(report.reads)
        if report.memory is not None:
            self.journal.memory = report.memory
        if report.outcome is not None:
            self.levels.settle(report.outcome)

    # At an allocation.

    def weigh(
        self, need: int, hits: Collection[KVCacheBlock], extra: int, request: Any, running: bool
    ) -> int:
        """Blocks that vLLM shall believe the allocation needs.

        Args:
            need: blocks vLLM is about to take from the free queue, prefix hits among them.
            hits: those of them that are prefix hits lying in the free queue.
            extra: blocks that vLLM wants to stay free beyond that.

        Returns:
            ``need``, after growing the pool if that was the decision; or more than the pool has, which vLLM
            takes as "not this step".
        """
        if self.levels.held:
            return need
        if need > self.pool.num_gpu_blocks:
            # The hybrid manager's word for "not in this step"; nothing is short.
            self.journal.not_this_step += 1
            return need
        fresh = need - len(hits) + extra
        blocks = self.pool.clean(fresh, hits)
        return need if fresh <= len(blocks) else self._weigh(need, fresh, blocks, hits, request, running)

    @ranged("decide")
    def _weigh(
        self,
        need: int,
        fresh: int,
        blocks: Sequence[KVCacheBlock],
        hits: Collection[KVCacheBlock],
        request: Any,
        running: bool,
    ) -> int:
        """``weigh``, where ``blocks``, the clean ones, are fewer than the ``fresh`` ones needed."""
        decision = self._decide(fresh, blocks, hits, request, running)
        keep = self.measured is not None and self._does_without(decision, fresh - len(blocks))
        if self.pool.cordon_limit is not None and not keep:
            # Pressure is back before the tail was given away: keep it.
            self.pool.lift_cordon()
            self.levels.last_growth_at = time.monotonic()
            blocks = self.pool.clean(fresh, hits)
            if fresh <= len(blocks):
                return need
            decision = self._decide(fresh, blocks, hits, request, running)
        if self.measured is not None and self.pool.cordon_limit is None:
            self._aim(self.measured)
        self.journal.decided(decision)
        return self._carry_out(decision, need)

    def _decide(
        self,
        fresh: int,
        clean: Sequence[KVCacheBlock],
        hits: Collection[KVCacheBlock],
        request: Any,
        running: bool,
    ) -> Decision:
        situation = self._situation(fresh - len(clean), len(clean), hits, request, running)
        if self.measured is None:
            return decide(situation, self.costs.parameters)
        return self.measured.decide(situation, clean, hits)

    def _does_without(self, decision: Decision, missing: int) -> bool:
        """Whether the tail can go back all the same: a queue has to be waited for with it and without."""
        queued = decision.action is Action.QUEUE and missing > len(self.pool.parked)
        return queued or decision.action in DOES_WITHOUT

    def _carry_out(self, decision: Decision, need: int) -> int:
        if decision.levels:
            self.levels.want(decision.levels)
        if decision.action in (Action.EXPAND, Action.COMBINED):
            drawn = self.levels.draw(decision.take_blocks)
            assert drawn == decision.take_blocks, (drawn, decision)
        elif decision.action is Action.WAIT and (self.levels.wanted or self.controller.moving):
            self.holding = True
            return self.pool.num_gpu_blocks + 1
        return need

    def _aim(self, measured: Measured) -> None:
        """Go towards the level that is worth its price, however little is short now.

        Not further than what will be used soon: until then, reading more experts buys nothing.
        """
        controller, capacity = self.controller, self.controller.capacity
        if capacity is None or time.monotonic() < self.levels.no_moves_until:
            return
        level = controller.level + self.levels.coming
        blocks_at = capacity.blocks_at[: controller.max_level + 1]
        unused = blocks_at[min(level, controller.max_level)] - controller.pool_blocks
        ahead = controller.reserve_target + max(1, controller.pool_blocks // AHEAD) - unused
        if ahead > 0 and (levels := measured.aim(level, blocks_at)) > 0:
            self.levels.want(min(levels, math.ceil(ahead / max(capacity.blocks_per_level, 1))))

    def _situation(
        self, missing: int, clean: int, hits: Collection[KVCacheBlock], request: Any, running: bool
    ) -> Situation:
        now, controller, capacity = time.monotonic(), self.controller, self.controller.capacity
        blocked = capacity is None or now < self.levels.no_moves_until
        coming = self.levels.coming
        level = controller.level + coming
        per_level = max(capacity.blocks_per_level, 1) if capacity else 1
        evictable = self.pool.get_num_free_blocks() - clean - len(hits)
        return Situation(
            needed_blocks=missing,
            evictable_blocks=evictable,
            evictable_tokens=evictable * self.tokens_per_block,
            evictable_age_s=self._candidate_age(clean, hits, now),
            tokens_per_block=self.tokens_per_block,
            r_hit=self.r_hit(now),
            blocks_per_level=per_level,
            reserve_blocks=controller.reserve_blocks,
            arriving_blocks=coming * per_level,
            reserve_target=controller.reserve_target,
            level=level,
            max_level=level if blocked else max(controller.max_level, level),
            shards_per_group=capacity.group if capacity else 1,
            experts=capacity.experts if capacity else 1,
            partial_tokens=request.num_computed_tokens % self.tokens_per_block,
            can_preempt=evictable < missing,
            running=running,
            copied=self._copied(missing, clean, hits),
            load_block_s=self.load_block_s,
            # One that has begun, or was loaded from host memory, may wait for those that run, not for itself.
            held_blocks=0 if request.num_computed_tokens and not self.running else self.pool.held_blocks,
            waiting=max(0, self.waiting - 1),  # it is one of them
        )

    def _copied(self, missing: int, clean: int, hits: Collection[KVCacheBlock]) -> tuple[bool, ...]:
        """Whether host memory holds each of the next ``missing`` blocks to be evicted.

        The measured policy evicts others, and looks for itself.
        """
        if self.host_kv is None or self.measured is not None:
            return ()
        candidates = islice(self.pool.free_order(hits), clean, clean + missing)
        return tuple(self.host_holds(block) for block in candidates)

    @property
    def load_block_s(self) -> float:
        """Seconds to copy one block from host memory; 0 where it keeps none."""
        return 0.0 if self.host_kv is None else self.host_kv.load_block_s

    @property
    def host_share(self) -> float:
        """Blocks that host memory has room for, of the pool's; 1 at most, and 0 where it keeps none."""
        return 0.0 if self.host_kv is None else min(1.0, self.host_kv.host_blocks / self.pool.num_gpu_blocks)

    def host_holds(self, block: KVCacheBlock) -> bool:
        """Whether host memory holds the cached content of ``block``."""
        content = block.block_hash
        return self.host_kv is not None and content is not None and self.host_kv.holds(content)

    def _candidate_age(self, clean: int, hits: Collection[KVCacheBlock], now: float) -> float:
        """Seconds since the block that would be evicted first was last used."""
        candidate = next(islice(self.pool.free_order(hits), clean, None), None)
        return 0.0 if candidate is None else max(0.0, now - self.pool.freed_at.get(candidate.block_id, now))

    def looked_up(self, request: Any, hit_tokens: int, loaded_tokens: int = 0) -> None:
        """Count an admitted request's prefix lookup; missed blocks evicted lately are ghost hits.

        Tokens loaded from host memory are hits of the window: they are used again, and not computed.
        """
        found = hit_tokens + loaded_tokens
        missed = request.block_hashes[found // self.hash_tokens :]
        self.journal.evicted_tokens_missed += self.hit_rate.record(
            time.monotonic(), request.num_tokens, found, missed, self.hash_tokens
        )
        if self.measured is not None:
            self.measured.looked_up(request, hit_tokens, loaded_tokens)

    def _evicted(self, lost: BlockHashWithGroupId) -> None:
        self.hit_rate.evicted(get_block_hash(lost))
        if self.host_kv is not None and self.host_kv.holds(lost):
            self.journal.spilled_blocks += 1

    def r_hit(self, now: float) -> float:
        reusable = self.costs.policy.hit_rate == "reusable"
        return self.hit_rate.reusable(now) if reusable else self.hit_rate.observed(now)
