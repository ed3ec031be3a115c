"""What a running engine has shown of its cache and its experts, and the choices that follow from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence

from vamp_runtime.policy.chains import Chains, Layout, Loss
from vamp_runtime.policy.cost import overhead
from vamp_runtime.policy.eviction_order import EvictionOrder
from vamp_runtime.policy.measured import (
    MeasuredParameters,
    back_s,
    best_level,
    cured_s,
    eviction_s,
    load_s,
    offload_s,
    preempt_s,
)
from vamp_runtime.policy.parameters import CostParameters
from vamp_runtime.policy.read_seconds import Link, ReadSeconds, read_seconds
from vamp_runtime.policy.reads import LevelReads
from vamp_runtime.policy.reuse import HitCurve, ReuseDistances, ReuseTimes

# More sessions than this are not told apart; the ones unused for longest are forgotten.
MOST_CHAINS = 1024
# Curves are made anew after this many seconds; decisions come faster than they change.
ANEW_EVERY_S = 0.25
# What reads cost changes slowly, and takes milliseconds to work out for every level.
READS_ANEW_S = 1.0
# Requests under way hold blocks that no chain has yet: the most at so many lookups have to fit too.
BESIDE_LOOKUPS = 16
# Lookups that missed something after which what they loaded counts half.
LOADED_HALF_LIFE = 100.0
# Blocks that requests have given back are remembered for so many seconds.
RELEASED_S = 10.0


class Measurements:
    """Takes events, and gives prices and the level to aim at. Bookkeeping only.

    Args:
        window_s: seconds after which a lookup is forgotten; a chain not before the longest horizon.
        load_block_s: seconds to copy one block from host memory, where it keeps copies.
        loaded_prior: of what is missed, the part that host memory brings back; until it is measured.

    Attributes:
        eviction: which blocks go first.
    """

    def __init__(
        self,
        parameters: MeasuredParameters,
        cost: CostParameters,
        layout: Layout,
        times: ReuseTimes,
        window_s: float,
        load_block_s: float = 0.0,
        loaded_prior: float = 0.0,
    ) -> None:
        self.parameters, self.cost, self.times = parameters, cost, times
        self.load_block_s, self.loaded_prior = load_block_s, loaded_prior
        self._missed = self._loaded = 0.0
        self.chains = Chains(layout, MOST_CHAINS, times.ended)
        self.eviction = EvictionOrder(self.chains, times, cost.t_prefill_s)
        self._distances = ReuseDistances(window_s)
        self._released: deque[tuple[float, int]] = deque()
        self._beside: deque[int] = deque(maxlen=BESIDE_LOOKUPS)
        self._forget_s = max(window_s, parameters.horizon_max_s)
        self._curve: tuple[float, HitCurve] | None = None
        self._read_s: tuple[float, ReadSeconds] | None = None
        self._reads: LevelReads | None = None
        self._link: Link | None = None
        self._pressed_since = self._pressed_at = float("-inf")

    # Events.

    def announce(self, reads: LevelReads, link: Link) -> None:
        """What can leave, and what reading it costs, once that is known."""
        self._reads, self._link, self._read_s = reads, link, None

    def step(self, now_s: float, tokens: int) -> None:
        if self._reads is not None:
            self._reads.step(now_s, tokens)

    def counted(self, reads: Sequence[float], steps: int) -> None:
        if self._reads is not None:
            self._reads.counted(reads, steps)

    def looked_up(
        self,
        now_s: float,
        hashes: Sequence[Hashable],
        hit_tokens: int = 0,
        loaded_tokens: int = 0,
        used_blocks: int = 0,
        request: Hashable = None,
    ) -> None:
        """``request`` is admitted, for the first time.

        Args:
            hit_tokens, loaded_tokens: tokens that it finds, and loads from host memory.
            used_blocks: blocks that requests under way hold.
        """
        self.chains.forget_unused(now_s, self._forget_s)
        self._beside.append(max(0, used_blocks - self.chains.size_under_way))
        if self._reads is not None:
            self._reads.looked_up()
        lookup = self.chains.looked_up(now_s, hashes, request)
        if lookup is None:
            self._distances.record(now_s, 0, 0)
            return
        self.times.reused(lookup.age_s)
        self._distances.record(now_s, lookup.need + max(self._beside), lookup.tokens, hit_tokens)
        if lookup.tokens > hit_tokens:
            decay, missed = 0.5 ** (1 / LOADED_HALF_LIFE), lookup.tokens - hit_tokens
            self._missed = decay * self._missed + missed
            self._loaded = decay * self._loaded + min(loaded_tokens, missed)

    def lost(self, block: int) -> None:
        self.chains.lost(block)

    def released(self, now_s: float, blocks: int) -> None:
        """A request has ended and given back so many blocks."""
        if self.load_block_s:
            self._released.append((now_s, blocks))
        while self._released and now_s - self._released[0][0] > RELEASED_S:
            self._released.popleft()

    def pressed(self, now_s: float) -> None:
        """An allocation found too few blocks without cached content."""
        if now_s - self._pressed_at > self.parameters.horizon_min_s:
            self._pressed_since = now_s
        self._pressed_at = now_s

    # Prices.

    def eviction_price(
        self,
        now_s: float,
        victims: Collection[int],
        capacity: int,
        level: int,
        on_host: Callable[[int], bool] | None = None,
    ) -> float:
        """Having ``victims`` no more: nothing where they are good for nothing.

        Once the curve can be trusted, what so many blocks more would cure over the horizon, of which this
        eviction is a part; before that, the chance that these come back. Where ``on_host`` says which blocks
        host memory holds too, those that they are loaded with cost no more than the load.
        """
        lost = self.chains.loss_of(victims, on_host)
        tokens, miss_s = sum(loss.tokens for loss in lost), self._miss_s
        if not tokens:
            return 0.0
        token_s = sum(back_s(loss, miss_s, self.load_block_s) for loss in lost) / tokens
        token_s *= 1 + self._read_token_s(now_s, capacity, level) / self.cost.t_prefill_s
        cured = self.cured(now_s, capacity, capacity, capacity + len(victims), token_s)
        return self._now_lost(now_s, lost) if cured is None else cured

    def tail_price(
        self,
        now_s: float,
        blocks: Collection[int],
        count: int,
        capacity: int,
        level: int,
        on_host: Callable[[int], bool] | None = None,
    ) -> float:
        """Giving ``count`` blocks up for good, among them the cached ``blocks``, which nobody chose."""
        lost = self._now_lost(now_s, self.chains.loss_of(blocks, on_host))
        token_s = self.missed_token_s(now_s, capacity, level)
        return lost + (self.cured(now_s, capacity, capacity - count, capacity, token_s) or 0.0)

    def offload_price(self, now_s: float, capacity: int, before: int, after: int) -> float:
        """Going from level ``before`` to ``after``, over the horizon; below 0 where that is less."""
        if self._reads is None or self._link is None:
            return 0.0
        reading = self._reading(now_s, capacity)
        top = len(reading.step) - 1
        before, after, horizon_s = min(before, top), min(after, top), self.horizon_s(now_s)
        layers, steps_per_s, paced = self._link.layers, self._reads.steps_per_s, self._link.paced
        # Where prompts are paced, passes come with them, and reads beside decoding with the steps there are.
        per_step = reading.step_decode if paced else reading.step
        passes = reading.prefill[after] - reading.prefill[before] if paced else 0.0
        return offload_s(per_step, before, after, layers, steps_per_s, horizon_s) + passes * horizon_s

    def queue_price(self, now_s: float, blocks: int, waiting: int) -> float | None:
        """A request that waits until others have given back ``blocks``; None without copies in host memory.

        Its wait holds up nobody else. Where ``waiting`` others are in the queue too, each enters in the place
        of the next: the more there are, the less is won by letting one in. But without copies, blocks that it
        takes from the experts now are those in which the next prefixes are kept.
        """
        given = sum(count for at_s, count in self._released if now_s - at_s <= RELEASED_S)
        return blocks * RELEASED_S / given / (1 + waiting) if given else None

    def preempt_price(self, blocks: int, partial_tokens: int) -> float:
        """A running request computes again what it loses, or loads it where host memory has copies.

        Without copies ``blocks`` count, those that are missing; else as many as a request has.
        """
        loaded, tokens = self._loaded_share, self.chains.layout.block_tokens
        if self._released:
            blocks = max(blocks, sum(count for _, count in self._released) // len(self._released))
        computed = preempt_s(round((1 - loaded) * blocks * tokens) + partial_tokens, self._miss_s, 0.0)
        return loaded * blocks * self.load_block_s + computed + self._overhead_s

    def target(self, now_s: float, level: int, capacity: int, blocks_at: Sequence[int]) -> int:
        """The level worth going up to from ``level``, with ``capacity`` blocks now; ``level`` where none is.

        Args:
            blocks_at: blocks at each level, from 0 up to the highest allowed.
        """
        curve = self.curve(now_s)
        if self._link is None or curve.lookups < self.parameters.min_lookups:
            return level
        reading = self._reading(now_s, capacity)

        def load(wanted: int) -> float:
            blocks = capacity + blocks_at[wanted] - blocks_at[level]
            missed = curve.reusable - curve.expected(capacity, blocks)
            token_s = self.missed_token_s(now_s, capacity, wanted)
            return load_s(missed, token_s, reading.decode[wanted], reading.prefill[wanted])

        return best_level(range(level, min(len(blocks_at), len(reading.step))), load)

    def cured(self, now_s: float, capacity: int, before: int, after: int, token_s: float) -> float | None:
        """Seconds that capacity would save over the horizon; None while too little is known.

        Args:
            token_s: seconds that a missed token takes.
        """
        curve = self.curve(now_s)
        if curve.lookups < self.parameters.min_lookups:
            return None
        return cured_s(curve, capacity, before, after, token_s, self.horizon_s(now_s))

    def missed_token_s(self, now_s: float, capacity: int, level: int) -> float:
        """What a token that was there once weighs at ``level``: seconds of prefill, or its part of a load."""
        layout, miss_s = self.chains.layout, self._miss_s
        copy_s = min(self.load_block_s * len(layout.attention) / layout.block_tokens, miss_s)
        loaded = self._loaded_share
        miss_s *= 1 + self._read_token_s(now_s, capacity, level) / self.cost.t_prefill_s
        return loaded * copy_s + (1 - loaded) * miss_s

    def curve(self, now_s: float) -> HitCurve:
        """What capacity hits, from the lookups of the window."""
        if self._curve is None or now_s - self._curve[0] > ANEW_EVERY_S:
            self._curve = now_s, self._distances.curve(now_s)
        return self._curve[1]

    def horizon_s(self, now_s: float) -> float:
        recent = now_s - self._pressed_at <= self.parameters.horizon_min_s
        return self.parameters.horizon_s(now_s - self._pressed_since if recent else 0.0)

    def _read_token_s(self, now_s: float, capacity: int, level: int) -> float:
        """Seconds that reads at ``level`` add to a token of a step full of prompts."""
        if self._reads is None or self._link is None:
            return 0.0
        token_s = self._reading(now_s, capacity).token
        return token_s[min(level, len(token_s) - 1)]

    def _reading(self, now_s: float, capacity: int) -> ReadSeconds:
        assert self._reads is not None and self._link is not None
        if self._read_s is not None and now_s - self._read_s[0] <= READS_ANEW_S:
            return self._read_s[1]
        seconds = read_seconds(self._reads, self._link, self.curve(now_s), capacity)
        if self._reads.steps_per_s:  # before any step nothing is known that were worth keeping
            self._read_s = now_s, seconds
        return seconds

    def _now_lost(self, now_s: float, lost: Sequence[Loss]) -> float:
        rates = self._miss_s, self._overhead_s, self.load_block_s
        return eviction_s(lost, self.times, now_s, *rates)

    @property
    def _miss_s(self) -> float:
        """What computing a missed token weighs. A load from host memory stops nobody: it weighs itself."""
        return self._weight * self.cost.t_prefill_s

    @property
    def _overhead_s(self) -> float:
        return self._weight * overhead(self.cost)

    @property
    def _weight(self) -> float:
        # The more of it comes back from host memory, the fewer others a miss stops.
        loaded = self._loaded_share
        return loaded + (1 - loaded) * self.parameters.miss_weight

    @property
    def _loaded_share(self) -> float:
        """Of what is missed, the part that host memory brings back."""
        return self._loaded / self._missed if self._missed else self.loaded_prior
