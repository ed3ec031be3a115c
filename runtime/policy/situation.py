"""What is known at a KV allocation that clean free blocks cannot satisfy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a decision rests on.

    Attributes:
        needed_blocks: KV blocks missing after the clean free ones, 1 or more (the paper's G).
        evictable_blocks: free blocks that hold cached content: the candidate.
        evictable_tokens: tokens cached in them.
        evictable_age_s: seconds since the candidate was last used.
        tokens_per_block: tokens of one full block.
        r_hit: prefix-cache hit rate, 0 to 1.
        blocks_per_level: whole KV blocks that one level buys, 1 or more.
        reserve_blocks: blocks mapped and zeroed, not yet in the pool: what can be given now.
        arriving_blocks: blocks of levels already requested that are not in the reserve yet.
        reserve_target: blocks the reserve is to hold again after a refill.
        level: groups of every layer that are out of HBM or on their way out.
        max_level: groups of every layer that can leave, by home slots.
        shards_per_group: expert shards in one group (the paper's g).
        experts: local shards per layer and rank (the paper's E).
        partial_tokens: tokens in the last, unfinished block of the request that would be preempted.
        can_preempt: there is a running request whose blocks can be freed now.
        running: the allocation is of a running request; otherwise of one that waits for admission.
        copied: for each of the first ``needed_blocks`` candidates, in the order of eviction, whether host
            memory holds a copy of it; empty where the engine keeps none (no KV offloading).
        load_block_s: seconds to copy one block from host memory, where it keeps some.
        held_blocks: blocks that admitted requests hold.
        waiting: requests in the queue, of late.
    """

    needed_blocks: int
    evictable_blocks: int
    evictable_tokens: int
    evictable_age_s: float
    tokens_per_block: int
    r_hit: float
    blocks_per_level: int
    reserve_blocks: int
    arriving_blocks: int
    reserve_target: int
    level: int
    max_level: int
    shards_per_group: int
    experts: int
    partial_tokens: int
    can_preempt: bool
    running: bool
    copied: tuple[bool, ...] = ()
    load_block_s: float = 0.0
    held_blocks: int = 0
    waiting: int = 0

    def __post_init__(self) -> None:
        assert self.needed_blocks > 0 and self.blocks_per_level > 0 and self.shards_per_group > 0
        assert min(self.evictable_blocks, self.evictable_tokens, self.partial_tokens, self.level) >= 0
        assert min(self.reserve_blocks, self.arriving_blocks, self.reserve_target, self.max_level) >= 0
        assert self.evictable_age_s >= 0 and 0 <= self.r_hit <= 1
        assert len(self.copied) <= self.needed_blocks and self.load_block_s >= 0
