"""What each way to find KV blocks costs, in seconds of GPU time, from measurements on the running engine.

Pure functions. Where the paper multiplies constants (``policy/cost.py``), these take what was counted:
expert bytes that steps read over the link, tokens that more capacity would have hit, prefixes that came back.
All are prices over one horizon: as long as the pressure is expected to last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from vamp_runtime.errors import ConfigError
from vamp_runtime.policy.chains import Chain, Layout, Loss
from vamp_runtime.policy.reuse import HitCurve, ReuseTimes


@dataclass(frozen=True, kw_only=True)
class MeasuredParameters:
    """What is assumed before, and around, what is measured.

    Attributes:
        sigma: spread of ln popularity of a layer's experts: the log-normal prior.
        prior_steps: steps of counts that weigh as much as this prior.
        horizon_min_s, horizon_max_s: bounds of the horizon, in seconds.
        min_lookups: lookups that the hit curve must rest on before it is trusted.
        fairness_s: seconds that a request may be passed over by others whose prefix is still there.
        miss_weight: seconds of reading experts, spread over all steps, that weigh as much as one of computing
            what was missed, which comes at once and before a first token; 1 where all of it is loaded from
            copies in host memory, and in between where some is.

    Raises:
        ConfigError: the bounds of the horizon are the wrong way round.
    """

    sigma: float
    prior_steps: float
    horizon_min_s: float
    horizon_max_s: float
    min_lookups: int
    fairness_s: float
    miss_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.horizon_min_s > self.horizon_max_s:
            works = f"at least horizon_min_s, such as {self.horizon_min_s:g}"
            raise ConfigError(f"horizon_max_s = {self.horizon_max_s:g}: must be {works}")

    def horizon_s(self, pressure_s: float) -> float:
        """Pressure is expected to last as long again as it has lasted, within bounds."""
        return min(max(pressure_s, self.horizon_min_s), self.horizon_max_s)


# Offloading.


@lru_cache(maxsize=64)
def lognormal_shares(experts: int, sigma: float) -> tuple[float, ...]:
    """Shares of a layer's selections by expert, coldest first, at the quantiles of a log-normal; sum 1."""
    normal = NormalDist()
    weights = [math.exp(sigma * normal.inv_cdf((rank + 0.5) / experts)) for rank in range(experts)]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def expected_touched(shares: Iterable[float], tokens: float, top_k: int) -> float:
    """Distinct experts of ``shares`` that a step of ``tokens`` tokens reads, if they choose independently."""
    return sum(1 - math.pow(1 - min(1.0, top_k * share), tokens) for share in shares)


def blended(prior: float, measured: float, steps: float, prior_steps: float) -> float:
    """Touched experts from the prior and from ``steps`` steps of counts."""
    return (prior * prior_steps + measured * steps) / (prior_steps + steps)


def layer_s(touched: float, expert_bytes: int, bandwidth: float, hidden_s: float) -> float:
    """Seconds that ``touched`` host-backed experts add to one layer and step.

    ``max(0, host_bytes_touched / link_bandwidth - time_hidden)``.
    """
    return max(0.0, touched * expert_bytes / bandwidth - hidden_s)


def offload_s(
    per_layer_s: Sequence[float], before: int, after: int, layers: int, steps_per_s: float, horizon_s: float
) -> float:
    """Price of going from level ``before`` to ``after``; below 0 where ``after`` is less.

    Args:
        per_layer_s: by level, what it adds to one layer and step (``layer_s``).
        steps_per_s: steps that the engine takes.
    """
    return (per_layer_s[after] - per_layer_s[before]) * layers * steps_per_s * horizon_s


# Capacity.


def cured_s(
    curve: HitCurve, capacity: int, before: int, after: int, token_s: float, horizon_s: float
) -> float:
    """What going from ``before`` to ``after`` blocks would save, with whole prefixes kept.

    A miss counts where the prefix had been there and ``after`` blocks would have kept it: first turns, and
    what a hybrid model would not have hit anyway, are worth nothing, and so is capacity beyond the last knee.

    Args:
        capacity: blocks that there are now.
        token_s: seconds that a missed token takes: to prefill, or to load from host memory.
    """
    return (curve.expected(capacity, after) - curve.expected(capacity, before)) * token_s * horizon_s


def load_s(missed: float, token_s: float, decode: float, prefill: float) -> float:
    """Seconds a second that depend on the level: misses that capacity would cure, and what reads add.

    Args:
        missed: tokens a second that a capacity misses although they had been there.
        token_s: what one weighs at the level, its share of the step's reads included.
        decode, prefill: seconds a second that reads add to steps that decode, and to what prompts wait for
            that are not missed.
    """
    return missed * token_s + decode + prefill


def best_level(levels: Sequence[int], load: Callable[[int], float]) -> int:
    """The level of ``levels`` with the least load; at a tie the first.

    Looking at all levels at once, and not at the next one only, is what finds a knee that several levels away
    is worth its price and one level away is worth nothing.
    """
    return min(levels, key=load)


# Victims.


def chain_rank(
    chain: Chain, layout: Layout, times: ReuseTimes, now_s: float, t_prefill_s: float
) -> tuple[float, float]:
    """Order in which chains are given up, lowest first: prefill saved per block and second of keeping it.

    At a tie the chain used last goes first, so that what was kept stays whole.
    """
    age = max(0.0, now_s - chain.used_at)
    saved = chain.usable(layout) * t_prefill_s / max(len(chain.blocks), 1)
    return times.density(age) * saved, -chain.used_at


def back_s(loss: Loss, t_prefill_s: float, load_block_s: float) -> float:
    """Seconds to get a loss back: what host memory holds the sooner way, and prefill of the rest."""
    loaded = min(loss.loads * load_block_s, loss.loadable * t_prefill_s)
    return loaded + (loss.tokens - loss.loadable) * t_prefill_s


def eviction_s(
    lost: Iterable[Loss],
    times: ReuseTimes,
    now_s: float,
    t_prefill_s: float,
    overhead_s: float,
    load_block_s: float = 0.0,
) -> float:
    """Expected time to get back what is evicted; ``overhead_s`` where some of it must be computed."""

    def once(loss: Loss) -> float:
        loaded_whole = loss.loadable == loss.tokens and loss.loads * load_block_s < loss.tokens * t_prefill_s
        return back_s(loss, t_prefill_s, load_block_s) + (0.0 if loaded_whole else overhead_s)

    return sum(times.chance(max(0.0, now_s - loss.used_at)) * once(loss) for loss in lost if loss.tokens)


def preempt_s(lost_tokens: int, t_prefill_s: float, overhead_s: float) -> float:
    """A preempted request certainly comes back: what it loses is computed again."""
    return lost_tokens * t_prefill_s + overhead_s


# Admission.


@dataclass(frozen=True)
class Waiting:
    """A request that waits: when it came, and how many of its prompt's tokens are there."""

    arrived_s: float
    prompt_tokens: int
    cached_tokens: int


def admission_order(waiting: Sequence[Waiting], now_s: float, fairness_s: float) -> list[int]:
    """Positions in the order of admission.

    First those that have waited ``fairness_s`` or longer; then those with at least half of their prompt
    there, before it is evicted for the others; then the rest. Each by arrival.
    """

    def place(position: int) -> tuple[int, float, int]:
        request = waiting[position]
        there = 2 * request.cached_tokens >= max(request.prompt_tokens, 1)
        rank = 0 if now_s - request.arrived_s >= fairness_s else 1 if there else 2
        return rank, request.arrived_s, position

    return sorted(range(len(waiting)), key=place)
