"""Hook: ``vllm/v1/core/kv_cache_manager.py`` ``KVCacheManager.allocate_slots``, where the paper decides.

What: every allocation that would evict cached blocks, or fail, is weighed first. Why: vLLM evicts inside the
block pool without a decision, and answers a shortage with preemption only. How: ``adopt`` changes the class
of the live manager and wraps its coordinator's ``get_num_blocks_to_allocate``, the one place that knows the
need before anything is taken; the pool may grow there, since both of vLLM's checks come after it.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request, RequestStatus

from vamp_integration.arbiter import Arbiter


class VampKVCacheManager(KVCacheManager):
    """A ``KVCacheManager`` whose allocations are weighed by an ``Arbiter``."""

    arbiter: Arbiter
    _allocating: tuple[Request, int] | None

    @classmethod
    def adopt(cls, manager: KVCacheManager, arbiter: Arbiter) -> VampKVCacheManager:
        """Turn the live ``manager`` into one that asks ``arbiter``, in place."""
        assert type(manager) is KVCacheManager, type(manager)
        pools = {id(single.block_pool) for single in manager.coordinator.single_type_managers}
        assert pools == {id(manager.block_pool)} == {id(arbiter.pool)}
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.arbiter, manager._allocating = arbiter, None
        manager._wrap_need()
        return manager

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        watermark = self.watermark_blocks if waiting and kwargs.get("has_scheduled_reqs", True) else 0
        self._allocating = (request, watermark + kwargs.get("reserved_blocks", 0))
        try:
            return super().allocate_slots(request, *args, **kwargs)
        finally:
            self._allocating = None

    def free(self, request: Request) -> None:
        """The measured policy notes which blocks hold the prefix that comes to rest."""
        self._note_rest(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> Any:
        """As ``free``, for blocks that vLLM returns to the pool a step later."""
        self._note_rest(request)
        return super().pop_blocks_for_free(request)

    def _note_rest(self, request: Request) -> None:
        if self.arbiter.measured is not None:
            self.arbiter.measured.rest(request)

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Called once for every admitted request: the lookup that counts for the hit rate."""
        super().record_prefix_cache_stats(request, num_hits)
        host_kv = self.arbiter.host_kv
        loaded = host_kv.loading(request) if host_kv is not None else 0
        if request.num_preemptions:
            self.arbiter.journal.preempted_tokens_lost += request.num_tokens - num_hits - loaded
        elif self.prefix_cache_lookup_enabled(request):
            self.arbiter.looked_up(request, num_hits, loaded)

    def _wrap_need(self) -> None:
        original = self.coordinator.get_num_blocks_to_allocate

        def get_num_blocks_to_allocate(*args: Any, **kwargs: Any) -> int:
            need: int = original(*args, **kwargs)
            if self._allocating is None or need == 0:
                return need
            request, extra = self._allocating
            hits = [
                block
                for group in kwargs["new_computed_blocks"]
                for block in group
                if block.ref_cnt == 0 and not block.is_null
            ]
            running = request.status == RequestStatus.RUNNING
            return self.arbiter.weigh(need, hits, extra, request, running)

        self.coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate  # type: ignore[method-assign]
