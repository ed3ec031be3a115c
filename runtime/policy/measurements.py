"""What a running engine has shown of its cache and its experts, and the choices that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass

from vamp_runtime.policy.chains import Chains, Layout, Loss, Part
from vamp_runtime.policy.cost import overhead
from vamp_runtime.policy.measured import (
    MeasuredParameters,
    back_s,
    best_level,
    chain_rank,
    cured_s,
    eviction_s,
    offload_s,
    preempt_s,
)
from vamp_runtime.policy.parameters import CostParameters
from vamp_runtime.policy.reads import LevelReads
from vamp_runtime.policy.reuse import HitCurve, ReuseDistances, ReuseTimes

# More sessions than this are not told apart; the ones unused for longest are forgotten.
MOST_CHAINS = 1024
# Curves are made anew after this many seconds; decisions come faster than they change.
ANEW_EVERY_S = 0.25
# Lookups that missed something after which what they loaded counts half.
LOADED_HALF_LIFE = 100.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """What reading experts from host memory costs on one rank.

    Attributes:
        expert_bytes: of one expert of one layer.
        bandwidth: bytes/s at which a kernel reads host memory.
        layers: with experts.
        hidden_s_per_token: seconds per token of a step that transfers are hidden behind, in one layer.
    """

    expert_bytes: int
    bandwidth: float
    layers: int
    hidden_s_per_token: float


class Measurements:
    """Takes events, and gives prices, victims and the level to aim at. Bookkeeping only.

    Args:
        window_s: seconds after which a lookup is forgotten; a chain not before the longest horizon.
        load_block_s: seconds to copy one block from host memory, where it keeps copies.
    """

    def __init__(
        self,
        parameters: MeasuredParameters,
        cost: CostParameters,
        layout: Layout,
        times: ReuseTimes,
        window_s: float,
        load_block_s: float = 0.0,
    ) -> None:
        self.parameters, self.cost, self.times = parameters, cost, times
        self.load_block_s = load_block_s
        self._missed = self._loaded = 0.0
        self.chains = Chains(layout, MOST_CHAINS, times.ended)
        self._distances = ReuseDistances(window_s)
        self._forget_s = max(window_s, parameters.horizon_max_s)
        self._curve: tuple[float, HitCurve] | None = None
        self._per_layer: tuple[float, list[float]] | None = None
        self._reads: LevelReads | None = None
        self._link: Link | None = None
        self._pressed_since = self._pressed_at = float("-inf")

    # Events.

    def announce(self, reads: LevelReads, link: Link) -> None:
        """What can leave, and what reading it costs, once that is known."""
        self._reads, self._link = reads, link

    def step(self, now_s: float, tokens: int) -> None:
        if self._reads is not None:
            self._reads.step(now_s, tokens)

    def counted(self, reads: Sequence[float], steps: int) -> None:
        if self._reads is not None:
            self._reads.counted(reads, steps)

    def looked_up(
        self, now_s: float, hashes: Sequence[Hashable], hit_tokens: int = 0, loaded_tokens: int = 0
    ) -> None:
        """A request is admitted, for the first time; so many tokens it finds, and loads from host memory."""
        self.chains.forget_unused(now_s, self._forget_s)
        lookup = self.chains.looked_up(now_s, hashes)
        if lookup is None:
            self._distances.record(now_s, 0, 0)
            return
        self.times.reused(lookup.age_s)
        self._distances.record(now_s, lookup.need, lookup.tokens)
        if lookup.tokens > hit_tokens:
            decay, missed = 0.5 ** (1 / LOADED_HALF_LIFE), lookup.tokens - hit_tokens
            self._missed = decay * self._missed + missed
            self._loaded = decay * self._loaded + min(loaded_tokens, missed)

    def rest(self, now_s: float, hashes: Sequence[Hashable], blocks: Mapping[int, Part]) -> None:
        """A request gives up its blocks; ``blocks`` are those with cached content."""
        self.chains.rest(now_s, hashes, blocks)

    def lost(self, block: int) -> None:
        self.chains.lost(block)

    def pressed(self, now_s: float) -> None:
        """An allocation found too few blocks without cached content."""
        if now_s - self._pressed_at > self.parameters.horizon_min_s:
            self._pressed_since = now_s
        self._pressed_at = now_s

    # Choices.

    def cached_tokens(self, hashes: Sequence[Hashable]) -> int:
        """Tokens that a request with these blocks would be given, about."""
        found = self.chains.match(hashes)
        if found is None:
            return 0
        chain, shared = found
        return min(chain.usable(self.chains.layout), shared * self.chains.layout.block_tokens)

    def victims(self, now_s: float, count: int, free: Container[int]) -> list[int]:
        """Up to ``count`` blocks of ``free`` to evict, in that order; none that no chain has ever had."""
        chosen = [block for block in self.chains.orphans if block in free][:count]
        if len(chosen) < count:
            layout, prefill = self.chains.layout, self.cost.t_prefill_s
            ranked = sorted(
                self.chains, key=lambda chain: chain_rank(chain, layout, self.times, now_s, prefill)
            )
            for block in self.chains.order(ranked, free):
                chosen.append(block)
                if len(chosen) == count:
                    break
        return chosen

    def eviction_price(
        self,
        now_s: float,
        victims: Collection[int],
        capacity: int,
        on_host: Callable[[int], bool] | None = None,
    ) -> float:
        """Having ``victims`` no more: nothing where they are good for nothing.

        Once the curve can be trusted, what so many blocks more would cure over the horizon, of which this
        eviction is a part; before that, the chance that these come back. Where ``on_host`` says which blocks
        host memory holds too, those that they are loaded with cost no more than the load.
        """
        lost = self.chains.loss_of(victims, on_host)
        tokens, prefill_s = sum(loss.tokens for loss in lost), self.cost.t_prefill_s
        if not tokens:
            return 0.0
        token_s = sum(back_s(loss, prefill_s, self.load_block_s) for loss in lost) / tokens
        cured = self.cured(now_s, capacity, capacity + len(victims), token_s)
        return self._now_lost(now_s, lost) if cured is None else cured

    def tail_price(
        self,
        now_s: float,
        blocks: Collection[int],
        count: int,
        capacity: int,
        on_host: Callable[[int], bool] | None = None,
    ) -> float:
        """Giving ``count`` blocks up for good, among them the cached ``blocks``, which nobody chose."""
        lost = self._now_lost(now_s, self.chains.loss_of(blocks, on_host))
        return lost + (self.cured(now_s, capacity - count, capacity) or 0.0)

    def offload_price(self, now_s: float, before: int, after: int) -> float:
        """Going from level ``before`` to ``after``, over the horizon; below 0 where that is less."""
        if self._reads is None or self._link is None:
            return 0.0
        link, per_layer = self._link, self._per_layer_s(now_s, self._reads, self._link)
        top = len(per_layer) - 1
        return offload_s(
            per_layer,
            min(before, top),
            min(after, top),
            link.layers,
            self._reads.steps_per_s,
            self.horizon_s(now_s),
        )

    def preempt_price(self, blocks: int, partial_tokens: int) -> float:
        lost = blocks * self.chains.layout.block_tokens + partial_tokens
        return preempt_s(lost, self.cost.t_prefill_s, overhead(self.cost))

    def target(self, now_s: float, level: int, capacity: int, blocks_at: Sequence[int]) -> int:
        """The level worth going up to from ``level``, with ``capacity`` blocks now; ``level`` where none is.

        Args:
            blocks_at: blocks at each level, from 0 up to the highest allowed.
        """
        if self.cured(now_s, capacity, capacity) is None:
            return level

        def cured(wanted: int) -> float:
            return self.cured(now_s, capacity, capacity + blocks_at[wanted] - blocks_at[level]) or 0.0

        def offload(wanted: int) -> float:
            return self.offload_price(now_s, level, wanted)

        return best_level(range(level, len(blocks_at)), offload, cured)[0]

    def cured(self, now_s: float, before: int, after: int, token_s: float | None = None) -> float | None:
        """Seconds that capacity would save over the horizon; None while too little is known.

        A missed token takes ``token_s``, by default as long as those missed of late (``missed_token_s``).
        """
        curve = self.curve(now_s)
        if curve.lookups < self.parameters.min_lookups:
            return None
        token_s = self.missed_token_s if token_s is None else token_s
        return cured_s(curve, before, after, token_s, self.horizon_s(now_s))

    @property
    def missed_token_s(self) -> float:
        """Seconds for a token that was there once: prefill, or its part of a load, as it was of late."""
        layout, prefill_s = self.chains.layout, self.cost.t_prefill_s
        load_s = min(self.load_block_s * len(layout.attention) / layout.block_tokens, prefill_s)
        loaded = self._loaded / self._missed if self._missed else 0.0
        return loaded * load_s + (1 - loaded) * prefill_s

    def curve(self, now_s: float) -> HitCurve:
        """What capacity hits, from the lookups of the window."""
        if self._curve is None or now_s - self._curve[0] > ANEW_EVERY_S:
            self._curve = now_s, self._distances.curve(now_s)
        return self._curve[1]

    def horizon_s(self, now_s: float) -> float:
        recent = now_s - self._pressed_at <= self.parameters.horizon_min_s
        return self.parameters.horizon_s(now_s - self._pressed_since if recent else 0.0)

    def _per_layer_s(self, now_s: float, reads: LevelReads, link: Link) -> list[float]:
        if self._per_layer is None or now_s - self._per_layer[0] > ANEW_EVERY_S:
            seconds = reads.per_layer_s(
                link.expert_bytes, link.bandwidth, lambda tokens: tokens * link.hidden_s_per_token
            )
            self._per_layer = now_s, seconds
        return self._per_layer[1]

    def _now_lost(self, now_s: float, lost: Sequence[Loss]) -> float:
        rates = self.cost.t_prefill_s, overhead(self.cost), self.load_block_s
        return eviction_s(lost, self.times, now_s, *rates)


@dataclass(frozen=True)
class MeasuredPrices:
    """``decide.Prices`` at one allocation.

    Attributes:
        capacity: blocks of the pool now.
        level: groups of every layer that are out or on their way out.
        needed: blocks missing.
        partial_tokens: tokens in the last block of the request that would be preempted.
        victims: blocks that would be evicted, in that order.
        on_host: whether host memory holds the content of a block too; None where it holds none of them.
    """

    measurements: Measurements
    now_s: float
    capacity: int
    level: int
    needed: int
    partial_tokens: int
    victims: Sequence[int]
    on_host: Callable[[int], bool] | None = None

    def evict(self, blocks: int) -> float:
        return self.measurements.eviction_price(self.now_s, set(self.victims[:blocks]), self.capacity)

    def spill(self, blocks: int) -> float:
        victims = set(self.victims[:blocks])
        return self.measurements.eviction_price(self.now_s, victims, self.capacity, self.on_host)

    def offload(self, levels: int) -> float:
        return self.measurements.offload_price(self.now_s, self.level, self.level + levels)

    def combined(self, levels: int, blocks: int) -> float:
        return self.offload(levels) + self.evict(blocks)

    def preempt(self) -> float:
        return self.measurements.preempt_price(self.needed, self.partial_tokens)
