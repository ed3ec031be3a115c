"""Hook: ``vllm/v1/core/block_pool.py`` ``BlockPool`` grows, shrinks and remembers what it evicts.

What: block ids are appended when KV memory was mapped (``grow``), and the highest ids are withdrawn when it
is to be unmapped (``cordon``, ``parked``, ``truncate``). Freed and evicted blocks are stamped and reported.
Why: vLLM's pool has a fixed size, and evicts inside ``get_new_blocks`` without telling anyone.
How: ``adopt`` changes the class of the live pool, because the coordinator and every single-type manager hold
the same object. It goes when vLLM has a pool of variable size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice, takewhile

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from vamp_runtime.errors import ConfigError


class VampBlockPool(BlockPool):
    """A ``BlockPool`` whose highest ids come and go. Block 0 stays the null block."""

    freed_at: dict[int, float]
    evictions: int
    on_evict: Callable[[BlockHashWithGroupId], None] | None
    on_lost: Callable[[int], None] | None
    cordon_limit: int | None
    parked: dict[int, KVCacheBlock]

    @classmethod
    def adopt(cls, pool: BlockPool) -> VampBlockPool:
        """Turn the live ``pool`` into one that can grow, in place."""
        if type(pool) is not BlockPool:
            raise ConfigError(
                f"block pool: {type(pool).__name__} is not vLLM's BlockPool; remove the other plugin"
            )
        pool.__class__ = cls
        assert isinstance(pool, cls)
        pool.freed_at, pool.evictions, pool.on_evict, pool.on_lost = {}, 0, None, None
        pool.cordon_limit, pool.parked = None, {}
        return pool

    def grow(self, ids: range) -> None:
        """Append ``ids``, mapped and zeroed on every rank; they are handed out before any cached block."""
        assert ids.start == self.num_gpu_blocks == len(self.blocks) and self.cordon_limit is None
        new = [KVCacheBlock(block_id, pool=self) for block_id in ids]
        self.blocks.extend(new)
        self.free_block_queue.prepend_n(new)
        self.num_gpu_blocks += len(new)

    def free_order(self, hits: Collection[KVCacheBlock] = ()) -> Iterator[KVCacheBlock]:
        """Free blocks in the order in which they would be handed out, without ``hits``."""
        hit_ids = {block.block_id for block in hits}
        block = self.free_block_queue.fake_free_list_head.next_free_block
        while block is not None and block is not self.free_block_queue.fake_free_list_tail:
            if block.block_id not in hit_ids:
                yield block
            block = block.next_free_block

    def clean(self, wanted: int, hits: Collection[KVCacheBlock]) -> list[KVCacheBlock]:
        """Blocks at the head of the free queue that hold nothing of value, up to ``wanted``."""
        empty = takewhile(lambda block: block.block_hash is None, self.free_order(hits))
        return list(islice(empty, wanted))

    def put_first(self, blocks: list[KVCacheBlock]) -> None:
        """Hand out these free blocks next, in this order."""
        for block in blocks:
            self.free_block_queue.remove(block)
        self.free_block_queue.prepend_n(blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        now = time.monotonic()
        empty: dict[int, KVCacheBlock] = {}
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.freed_at[block.block_id] = now
                if not self._park(block) and block.block_hash is None:
                    empty[block.block_id] = block
        # Nothing is lost with them, and at the head of the queue ``clean`` finds them.
        self.put_first(list(empty.values()))

    def reset_prefix_cache(self) -> bool:
        # vLLM takes every block outside the free queue for used, and raises where it has freed them all.
        if self.cordon_limit is not None:
            self.lift_cordon()
        reset: bool = super().reset_prefix_cache()
        if reset and self.on_lost is not None:
            for block in self.blocks:
                self.on_lost(block.block_id)
        return reset

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        lost = block.block_hash
        evicted: bool = super()._maybe_evict_cached_block(block)
        if evicted:
            self.evictions += 1
            if self.on_evict is not None and lost is not None:
                self.on_evict(lost)
            if self.on_lost is not None:
                self.on_lost(block.block_id)
        return evicted

    # Shrinking: cordon the tail, wait until every block of it is parked, then cut it off.

    def cordon(self, limit: int) -> None:
        """Withdraw ids from ``limit`` on: no prefix hit may revive them, and freed ones are parked."""
        assert 1 < limit <= self.num_gpu_blocks and self.cordon_limit is None
        self.cordon_limit = limit
        for block in self.blocks[limit:]:
            self._maybe_evict_cached_block(block)
            if block.ref_cnt == 0:
                self._park(block)

    @property
    def held_blocks(self) -> int:
        """Blocks that requests hold; one more is vLLM's null block."""
        return self.num_gpu_blocks - self.get_num_free_blocks() - len(self.parked) - 1

    @property
    def cordoned_free(self) -> bool:
        """Whether every cordoned block is parked, so that nothing refers to the tail."""
        return self.cordon_limit is not None and len(self.parked) == self.num_gpu_blocks - self.cordon_limit

    def truncate(self) -> None:
        """Cut off the cordoned tail; its memory may then be unmapped."""
        assert self.cordoned_free and self.cordon_limit is not None
        del self.blocks[self.cordon_limit :]
        for block_id in self.parked:
            self.freed_at.pop(block_id, None)
        self.num_gpu_blocks = self.cordon_limit
        self.cordon_limit, self.parked = None, {}

    def lift_cordon(self) -> None:
        """Give the parked blocks back to the pool."""
        assert self.cordon_limit is not None
        self.cordon_limit = None
        self.free_block_queue.prepend_n(list(self.parked.values()))
        self.parked = {}

    def _park(self, block: KVCacheBlock) -> bool:
        """Keep a free block that is cordoned out of the queue; whether it is."""
        # vLLM may free a block twice in one call (the source of two copies).
        cordoned = self.cordon_limit is not None and block.block_id >= self.cordon_limit
        if cordoned and block.block_id not in self.parked:
            # A cordoned block may have been given a hash again while its request ran on.
            self._maybe_evict_cached_block(block)
            self.free_block_queue.remove(block)
            self.parked[block.block_id] = block
        return cordoned
