"""Watch vLLM's scheduler in its own process: counters and samples, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Watch:
    """Counts and samples of one scheduler, unmodified or VAMP's.

    The two counters wrap bound methods of these very objects (``Scheduler._preempt_request``,
    ``BlockPool._maybe_evict_cached_block``); the wrappers pass arguments and results on.

    Args:
        scheduler: ``vllm.v1.core.sched.scheduler.Scheduler`` of the engine core.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.preemptions = 0
        self.evictions = 0
        scheduler._preempt_request = self._counted(scheduler._preempt_request, self._count_preemption)
        evict = self.pool._maybe_evict_cached_block
        self.pool._maybe_evict_cached_block = self._counted(evict, self._count_eviction)

    def _counted(self, method: Callable[..., Any], count: Callable[[Any], None]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            count(result)
            return result

        return counted

    def _count_preemption(self, result: Any) -> None:
        self.preemptions += 1

    def _count_eviction(self, evicted: bool) -> None:
        self.evictions += evicted

    def sample(self) -> dict[str, int]:
        """State now: blocks in the pool, VAMP's level, blocks that requests hold, blocks that are cached, "
        "requests."""
        report = self.vamp_report()
        blocks = int(report["pool_blocks"]) if report else self.pool.num_gpu_blocks
        return {
            "blocks": blocks,
            "level": int(report["level"]) if report else 0,
            "used": max(0, blocks - 1 - self.pool.get_num_free_blocks()),
            "cached": len(self.pool.cached_block_hash_to_block),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
        }

    def vamp_report(self) -> dict[str, Any] | None:
        """VAMP's own report; None for an unmodified scheduler."""
        report = getattr(self.scheduler, "vamp_report", None)
        return None if report is None else report()
