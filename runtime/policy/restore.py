"""When levels go back from the KV cache to the experts. Not in the paper, which only expands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vamp_runtime.policy.cost import offload_cost, spill_cost
from vamp_runtime.policy.parameters import CostParameters, RestoreParameters


@dataclass(frozen=True, kw_only=True)
class RestoreSituation:
    """What giving levels back rests on.

    Attributes:
        level: groups of every layer that are out of HBM.
        shards_per_group: expert shards in one group.
        experts: local shards per layer and rank.
        blocks_per_level: KV blocks that one level takes away, 1 or more.
        clean_blocks: free blocks without cached content, less what should stay free for new requests.
        cached_blocks: free blocks with cached content that would go next.
        tokens_per_block: tokens of one full block.
        cached_age_s: seconds since these were last used.
        r_hit: prefix-cache hit rate, 0 to 1.
        waiting_requests: requests that wait for admission or were preempted.
        since_growth_s: seconds since the last levels went to the KV cache, or a move failed.
        moving: a move is under way.
        copied_blocks: those of ``cached_blocks`` that host memory holds a copy of.
        load_block_s: seconds to copy one block from host memory.
    """

    level: int
    shards_per_group: int
    experts: int
    blocks_per_level: int
    clean_blocks: int
    cached_blocks: int
    tokens_per_block: int
    cached_age_s: float
    r_hit: float
    waiting_requests: int
    since_growth_s: float
    moving: bool
    copied_blocks: int = 0
    load_block_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.blocks_per_level > 0 and self.shards_per_group > 0
        assert min(self.level, self.clean_blocks, self.cached_blocks, self.waiting_requests) >= 0
        assert self.cached_age_s >= 0 and 0 <= self.r_hit <= 1
        assert 0 <= self.copied_blocks <= self.cached_blocks and self.load_block_s >= 0


@dataclass(frozen=True)
class RestoreDecision:
    """Levels to give back, what that saves and loses in seconds, and why none where ``levels`` is 0."""

    levels: int
    saving_s: float
    loss_s: float
    reason: str | None


def decide_restore(
    situation: RestoreSituation, parameters: CostParameters, restore: RestoreParameters
) -> RestoreDecision:
    """The number of levels with the largest ``saving - dead_zone * loss`` over 0; at a tie the fewest.

    The saving is ``C_e`` of the levels over the horizon, the loss ``C_c`` of the cached blocks that would go,
    or what it takes to load them where host memory holds copies.
    """

    def saving(levels: int) -> float:
        return offload_cost(levels * situation.shards_per_group, situation.experts, parameters)

    def loss(blocks: int, cached: int) -> float:
        return _loss(situation, cached, parameters)

    return restore_by(situation, saving, loss, restore)


def restore_by(
    situation: RestoreSituation,
    saving_s: Callable[[int], float],
    loss_s: Callable[[int, int], float],
    restore: RestoreParameters,
) -> RestoreDecision:
    """``decide_restore`` by other prices, in seconds: of levels that go back, and of blocks that go.

    ``loss_s`` takes all blocks that go, and those of them that are cached.
    """
    reason = _hold(situation, restore)
    if reason is not None:
        return RestoreDecision(0, 0.0, 0.0, reason)
    best = RestoreDecision(0, 0.0, 0.0, "the cached blocks are worth more")
    best_gain = 0.0
    for levels in range(1, situation.level + 1):
        lost = max(0, levels * situation.blocks_per_level - situation.clean_blocks)
        if lost > situation.cached_blocks:
            break
        saving, loss = saving_s(levels), loss_s(levels * situation.blocks_per_level, lost)
        gain = saving - restore.dead_zone * loss
        if gain > best_gain:
            best, best_gain = RestoreDecision(levels, saving, loss, None), gain
    return best


def _loss(s: RestoreSituation, blocks: int, parameters: CostParameters) -> float:
    if not blocks:
        return 0.0
    # Which of the cached blocks a level takes is not known here: those without a copy count first.
    lost = min(blocks, s.cached_blocks - s.copied_blocks)
    rates = s.load_block_s, s.cached_age_s, s.r_hit, parameters
    return spill_cost(blocks - lost, lost, s.tokens_per_block, *rates)


def too_soon(waiting_requests: int, since_growth_s: float, restore: RestoreParameters) -> str | None:
    """Why nothing goes back now, however many levels and whatever they hold; None where something may."""
    if waiting_requests:
        return f"{waiting_requests} requests wait"
    if since_growth_s < restore.min_dwell_s:
        return f"grown {since_growth_s:.6g} s ago, dwell {restore.min_dwell_s:.6g} s"
    return None


def _hold(s: RestoreSituation, restore: RestoreParameters) -> str | None:
    if s.level == 0:
        return "every expert is in HBM"
    if s.moving:
        return "a move is under way"
    reason = too_soon(s.waiting_requests, s.since_growth_s, restore)
    if reason is not None:
        return reason
    if s.blocks_per_level > s.clean_blocks + s.cached_blocks:
        return "too few free blocks for one level"
    return None
