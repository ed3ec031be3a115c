"""The measured policy at vLLM's objects: prefixes at rest by their blocks, victims, admission order.

Everything it knows lies in ``vamp_runtime.policy.measurements``; this file reads vLLM's requests, blocks and
groups for it. For the scheduler's thread only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import RequestStatus

from vamp_integration import settings
from vamp_integration.cold_reads import LevelCounts
from vamp_integration.costs import Costs, model_profile
from vamp_integration.log import logger
from vamp_integration.plan import hardware_profile
from vamp_integration.pool import VampBlockPool
from vamp_integration.settings import VampSettings
from vamp_runtime.controller import Capacity
from vamp_runtime.errors import ConfigError
from vamp_runtime.policy.chains import Layout, Part
from vamp_runtime.policy.decide import Action, Decision, decide_by
from vamp_runtime.policy.measured import MeasuredParameters, Waiting, admission_order
from vamp_runtime.policy.measured_prices import MeasuredPrices
from vamp_runtime.policy.measurements import Measurements
from vamp_runtime.policy.read_seconds import Link
from vamp_runtime.policy.reads import LevelReads
from vamp_runtime.policy.restore import RestoreDecision, RestoreSituation, restore_by
from vamp_runtime.policy.reuse import ReuseTimes
from vamp_runtime.policy.situation import Situation

# Seconds between two looks at the waiting requests, and at the level to aim at.
ORDER_EVERY_S = 0.05
# Requests that are looked at, of all that wait: more are not admitted before the next look.
MOST_ORDERED = 64
# Blocks of theirs that are looked for at most, in a few milliseconds: 64 prompts of 250,000 tokens in blocks
# of 544, two in blocks of 16.
MOST_LOOKUPS = 1 << 15
AIM_EVERY_S = 0.25
# Seconds for which an answer holds: that a request has to queue while all is as it was, and which blocks host
# memory has. Both are asked for in every step, and take milliseconds.
AGAIN_S = 0.25


@dataclass(frozen=True)
class EngineFacts:
    """What the policy knows of the engine from its configuration.

    Attributes:
        layout: of the KV cache groups.
        top_k: experts that a token is routed to.
        bandwidth: bytes/s at which a kernel reads host memory.
        layers: of the model; its prefill time is spread over them.
        staged: large steps bring experts to HBM while layers compute.
        step_tokens: most tokens of a step.
        prefill_share: as VAMP's setting, at this time.
        ordered: a routing profile says which groups are cold before anything has been counted.
    """

    layout: Layout
    top_k: int
    bandwidth: float
    layers: int
    staged: bool
    step_tokens: int
    prefill_share: float
    ordered: bool = False


def cache_layout(config: KVCacheConfig, block_tokens: int) -> Layout:
    """The groups that prefixes are made of; ``ConfigError`` where they are of another kind or size."""
    attention, state = set[int](), set[int]()
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        if spec.block_size != block_tokens or not isinstance(spec, FullAttentionSpec | MambaSpec):
            raise ConfigError(
                f"policy: measured knows full attention and recurrent state in blocks of one size, not "
                f"{type(spec).__name__} in blocks of {spec.block_size} tokens; use policy = paper"
            )
        (state if isinstance(spec, MambaSpec) else attention).add(index)
    return Layout(block_tokens, frozenset(attention), frozenset(state))


def resolve_policy(
    chosen: VampSettings, config: KVCacheConfig, block_tokens: int, on_cpu: bool
) -> VampSettings:
    """``chosen`` with the profile that ``policy = auto`` stands for here: measured, where that can be."""
    if chosen.policy != "auto" or on_cpu:
        return chosen
    try:
        cache_layout(config, block_tokens)
    except ConfigError as error:
        logger.info("VAMP: policy = auto takes paper, not measured (%s)", error)
        return replace(chosen, policy="paper")
    return replace(chosen, policy="measured")


def engine_facts(
    vllm_config: Any, config: KVCacheConfig, block_tokens: int, prefill_share: float
) -> EngineFacts:
    """The facts of a live engine; ``ConfigError`` where the policy does not know its KV cache."""
    chosen, device = settings.of(vllm_config), vllm_config.device_config.device_type
    assert chosen is not None
    hf_config = vllm_config.model_config.hf_text_config
    model = model_profile(chosen, hf_config, on_cpu=device == "cpu")
    return EngineFacts(
        layout=cache_layout(config, block_tokens),
        top_k=model.top_k.value,
        bandwidth=hardware_profile(chosen, device).host_read_bandwidth.value,
        layers=hf_config.num_hidden_layers,
        staged=chosen.staging != "off" and device != "cpu",
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        prefill_share=prefill_share,
        ordered=bool(chosen.record_order),
    )


class FreeBlocks(Collection[int]):
    """Ids of free blocks with cached content, but for some; vLLM's queue is not walked unless asked to be."""

    def __init__(self, pool: VampBlockPool, without: Collection[KVCacheBlock]) -> None:
        self._pool, self._without = pool, without
        self._without_ids = {block.block_id for block in without}

    def __contains__(self, block_id: object) -> bool:
        assert isinstance(block_id, int)
        block = self._pool.blocks[block_id]
        return block.ref_cnt == 0 and block.block_hash is not None and block_id not in self._without_ids

    def __iter__(self) -> Iterator[int]:
        blocks = self._pool.free_order(self._without)
        return (block.block_id for block in blocks if block.block_hash is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def no_better(now: Situation, before: Situation) -> bool:
    """Whether a request that had to queue finds all as it was, or others hold cached blocks besides."""
    if now.needed_blocks != before.needed_blocks or now.evictable_blocks > before.evictable_blocks:
        return False
    alike = replace(
        now,
        evictable_blocks=before.evictable_blocks,
        evictable_tokens=before.evictable_tokens,
        evictable_age_s=before.evictable_age_s,
        r_hit=before.r_hit,
        copied=before.copied,
        held_blocks=before.held_blocks if now.held_blocks >= before.held_blocks > 0 else now.held_blocks,
    )
    return alike == before


class Measured:
    """One engine's measurements.

    Args:
        parameters: of the policy profile, ``costs.measured``.
        host_holds: whether host memory holds the cached content of a block too.
        load_block_s: seconds to copy one block from there.
        loaded_prior: as in ``Measurements``.
    """

    def __init__(
        self,
        parameters: MeasuredParameters,
        costs: Costs,
        pool: VampBlockPool,
        facts: EngineFacts,
        host_holds: Callable[[KVCacheBlock], bool],
        load_block_s: float,
        loaded_prior: float,
    ) -> None:
        policy = costs.policy
        self._host_holds = host_holds
        assert policy.reuse_prior_events is not None and policy.reuse_half_life is not None
        self.pool, self.facts, self.costs, self.parameters = pool, facts, costs, parameters
        times = ReuseTimes(
            prior=policy.hit_rate_prior.value,
            prior_events=policy.reuse_prior_events.value,
            tau_s=policy.tau.value,
            half_life=policy.reuse_half_life.value,
        )
        self.measurements = Measurements(
            parameters,
            costs.parameters,
            facts.layout,
            times,
            policy.hit_rate_window.value,
            load_block_s,
            loaded_prior,
        )
        self._hashes_per_block = facts.layout.block_tokens // pool.hash_block_size
        self._there: dict[str, int] = {}  # waiting requests' tokens that are cached, at the last look
        self._lookups_left = 0
        self._ordered_at = self._aimed_at = -math.inf
        self._queued: tuple[float, Situation, Decision] | None = None
        self._copies: dict[Hashable, bool] = {}
        self._copies_at = -math.inf

    def announce(self, capacity: Capacity) -> None:
        """What the experts can give, once the ranks have said it."""
        reads = LevelReads(
            experts=capacity.experts,
            group=capacity.group,
            max_level=capacity.max_level,
            top_k=self.facts.top_k,
            sigma=self.parameters.sigma,
            prior_steps=self.parameters.prior_steps,
            ordered=self.facts.ordered,
        )
        # While a layer computes, staging brings the next one's experts.
        hidden = self.costs.parameters.t_prefill_s / self.facts.layers if self.facts.staged else 0.0
        link = Link(
            expert_bytes=capacity.group_bytes // capacity.group,
            bandwidth=self.facts.bandwidth,
            layers=capacity.layers,
            hidden_s_per_token=hidden,
            step_tokens=self.facts.step_tokens,
            paced=self.facts.prefill_share < 1,
        )
        self.measurements.announce(reads, link)

    # Events.

    def counted(self, counts: LevelCounts) -> None:
        self.measurements.counted(counts.reads, counts.steps)

    def step(self, tokens: int) -> None:
        """A step of ``tokens`` tokens has been scheduled."""
        self.measurements.step(time.monotonic(), tokens)

    def looked_up(self, request: Any, hit_tokens: int, loaded_tokens: int) -> None:
        used = self.pool.num_gpu_blocks - self.pool.get_num_free_blocks()
        tokens = hit_tokens, loaded_tokens
        hashes = self._hashes(request)
        self.measurements.looked_up(time.monotonic(), hashes, *tokens, used, request.request_id)

    def rest(self, request: Any) -> None:
        """``request`` is about to free its blocks: note those with cached content."""
        tokens = self.facts.layout.block_tokens
        hashes = self._hashes(request)[: request.num_computed_tokens // tokens]
        blocks: dict[int, Part] = {}
        for place, block_hash in enumerate(hashes):
            for group in sorted(self.facts.layout.attention | self.facts.layout.state):
                for block in self.pool.get_cached_block(block_hash, [group]) or ():
                    blocks[block.block_id] = Part(group, (place + 1) * tokens)
        now = time.monotonic()
        self.measurements.released(now, len(blocks))
        self.measurements.chains.rest(now, hashes, blocks, request.request_id)

    def _hashes(self, request: Any) -> Sequence[Any]:
        # Hashes are chained: the last of a block names all before it.
        scale = self._hashes_per_block
        hashes: Sequence[Hashable] = list(request.block_hashes)[scale - 1 :: scale]
        return hashes

    # Choices.

    def decide(
        self, situation: Situation, clean: Sequence[KVCacheBlock], hits: Collection[KVCacheBlock]
    ) -> Decision:
        """The cheapest action; blocks to evict are put where the pool takes them next, after ``clean``."""
        now = time.monotonic()
        self.measurements.pressed(now)
        self._forget_copies(now)
        queued = self._queued
        if queued is not None and now - queued[0] < AGAIN_S and no_better(situation, queued[1]):
            return queued[2]
        wanted = min(situation.needed_blocks, situation.evictable_blocks)
        # All free blocks without content are among ``clean``.
        victims = self.measurements.eviction.victims(now, wanted, FreeBlocks(self.pool, [*clean, *hits]))
        situation = replace(situation, copied=tuple(map(self._on_host, victims)))
        on_host = self._on_host if any(situation.copied) else None
        capacity = self.pool.num_gpu_blocks
        prices = MeasuredPrices(self.measurements, now, capacity, situation, victims, on_host)
        decision = decide_by(situation, prices, self.costs.parameters)
        chosen = [self.pool.blocks[block_id] for block_id in victims[: decision.evict_blocks]]
        if chosen:
            self.pool.put_first([*clean, *chosen])
        if decision.action is Action.QUEUE:
            self._queued = now, situation, decision
        return decision

    def _forget_copies(self, now: float) -> None:
        if now - self._copies_at > AGAIN_S:
            self._copies_at = now
            self._copies.clear()

    def _on_host(self, block_id: int) -> bool:
        block = self.pool.blocks[block_id]
        content = block.block_hash
        if content not in self._copies:
            self._copies[content] = self._host_holds(block)
        return self._copies[content]

    def aim(self, level: int, blocks_at: Sequence[int]) -> int:
        """Levels worth asking for beyond ``level``, at most up to that of the last of ``blocks_at``."""
        now = time.monotonic()
        if now - self._aimed_at < AIM_EVERY_S or level >= len(blocks_at):
            return 0
        self._aimed_at = now
        # Levels on their way count as there.
        capacity = max(self.pool.num_gpu_blocks, blocks_at[level])
        return self.measurements.target(now, level, capacity, blocks_at) - level

    def decide_restore(
        self, situation: RestoreSituation, level: int, levels: int, cached_tail: Collection[int]
    ) -> RestoreDecision:
        """Whether ``levels`` go back from ``level``, all or none, with the cached blocks ``cached_tail``."""
        now, measurements, tail = time.monotonic(), self.measurements, set(cached_tail)
        self._forget_copies(now)
        capacity = self.pool.num_gpu_blocks
        on_host = self._on_host if situation.copied_blocks else None

        def saving(_: int) -> float:
            return -measurements.offload_price(now, capacity, level, level - levels)

        def loss(blocks: int, cached: int) -> float:
            return measurements.tail_price(now, tail, blocks, capacity, level, on_host)

        return restore_by(situation, saving, loss, self.costs.restore)

    def order(self, waiting: Any) -> None:
        """Look at who waits: what they go on from is evicted last; those whose prefix is there come first.

        The order is changed in place, and only where it is vLLM's own.
        """
        now = time.monotonic()
        if now - self._ordered_at < ORDER_EVERY_S:
            return
        self._ordered_at = now
        self._lookups_left = MOST_LOOKUPS
        first = list(takewhile(self._may_look_at, islice(waiting, MOST_ORDERED)))
        others = list(islice(waiting, len(first), None))
        there = self.measurements.eviction.wait(map(self._hashes, first))
        self._there = {request.request_id: cached for request, cached in zip(first, there, strict=True)}
        if not isinstance(waiting, FCFSRequestQueue) or len(first) < 2:
            return
        places = [self._waiting(request, cached) for request, cached in zip(first, there, strict=True)]
        order = admission_order(places, time.time(), self.parameters.fairness_s)
        waiting.clear()
        waiting.extend([first[place] for place in order] + others)

    def there(self, request: Any) -> int | None:
        """Tokens of a waiting request's prompt that are cached, about; None where that is not known."""
        if request.request_id not in self._there:
            if not self._may_look_at(request):
                return None
            self._there[request.request_id] = self.measurements.eviction.there(self._hashes(request))
        return self._there[request.request_id]

    def _may_look_at(self, request: Any) -> bool:
        self._lookups_left -= len(request.block_hashes) // self._hashes_per_block
        return self._lookups_left >= 0

    def _waiting(self, request: Any, cached: int) -> Waiting:
        # One that was preempted has been served already and comes back first, as vLLM has it.
        if request.status == RequestStatus.PREEMPTED:
            return Waiting(-math.inf, request.num_tokens, 0)
        return Waiting(request.arrival_time, request.num_tokens, cached)
