"""The decision at a KV allocation that clean free blocks cannot satisfy: which action is the cheapest."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vamp_runtime.policy.paper_prices import PaperPrices
from vamp_runtime.policy.parameters import CostParameters
from vamp_runtime.policy.situation import Situation


class Action(enum.Enum):
    """What to do about the blocks that are missing.

    At equal cost blocks that an earlier move has left over are taken first; else the first in this order
    wins, because it moves the least state: evicting only drops hashes, and a level can still be given later;
    spilling is evicting where host memory holds copies; combined moves fewer levels than expanding; waiting
    moves the same levels and delays a request; queueing leaves a request that is not admitted yet where it
    is, until others give their blocks back; preempting throws away the computed state of a request that is
    being served.
    """

    EVICT = "evict"
    SPILL = "spill"
    COMBINED = "combined"
    EXPAND = "expand"
    WAIT = "wait"
    QUEUE = "queue"
    PREEMPT = "preempt"


class Bound(enum.Enum):
    """Why plain expansion was not possible."""

    MAX_LEVEL = "max_level"
    RESERVE = "reserve"


TIE_ORDER = {action: order for order, action in enumerate(Action)}


class Rejected(NamedTuple):
    """An action not taken: its cost, and why it was impossible (``None``: it was possible, only dearer)."""

    action: Action
    cost_s: float
    infeasible: str | None


@dataclass(frozen=True)
class Decision:
    """What to do, and what was weighed against it.

    Attributes:
        action: the cheapest feasible action; ``WAIT`` with ``levels`` 0 also where none was.
        levels: further levels to request from the experts; never beyond the bound.
        take_blocks: blocks to take from the reserve now.
        evict_blocks: cached blocks to evict now.
        cost_s: price of the action in seconds; 0 where waiting is all that is left, which has no price.
        rejected: every other action, in the order of ``Action``.
        bound: the limit that made plain expansion impossible, whatever was chosen then.
    """

    action: Action
    levels: int
    take_blocks: int
    evict_blocks: int
    cost_s: float
    rejected: tuple[Rejected, ...]
    bound: Bound | None


class _Option(NamedTuple):
    action: Action
    cost_s: float
    infeasible: str | None
    levels: int = 0
    take_blocks: int = 0
    evict_blocks: int = 0


@dataclass(frozen=True)
class _Expansion:
    """How far the experts can answer: levels still allowed, and blocks beyond the reserve's target.

    Surplus blocks were paid for by an earlier move (levels come in whole numbers, and a request may have
    waited for some), so taking them asks for no further level. At the bound no refill can come, so all is
    surplus.
    """

    room: int
    surplus: int
    blocks_per_level: int

    def levels_for(self, blocks: int) -> int:
        return math.ceil(max(0, blocks - self.surplus) / self.blocks_per_level)


class Prices(Protocol):
    """What actions cost in one situation, in seconds."""

    def evict(self, blocks: int) -> float:
        """Evicting so many cached blocks, and losing all that they hold."""

    def spill(self, blocks: int) -> float:
        """Evicting the same, of which host memory brings back what it holds."""

    def offload(self, levels: int) -> float:
        """So many levels more."""

    def combined(self, levels: int, blocks: int) -> float:
        """Levels, and blocks evicted for the rest."""

    def queue(self) -> float | None:
        """Leaving a request in the queue until so many blocks are free; None where that is no answer."""

    def preempt(self) -> float:
        """Preempting a request for the missing blocks."""


def decide(situation: Situation, parameters: CostParameters) -> Decision:
    """The cheapest feasible action by the paper's cost model; ties by the order of ``Action``."""
    return decide_by(situation, PaperPrices(situation, parameters), parameters)


def decide_by(situation: Situation, prices: Prices, parameters: CostParameters) -> Decision:
    """The cheapest feasible action by ``prices``; ties by the order of ``Action``."""
    expansion = _expansion(situation, parameters)
    options = (
        _evict(situation, prices),
        _spill(situation, prices),
        _combined(situation, prices, expansion),
        _expand(situation, prices, expansion),
        _wait(situation, prices, expansion),
        *_queue(situation, prices),
        _preempt(situation, prices),
    )
    feasible = [option for option in options if option.infeasible is None]
    nothing = _Option(Action.WAIT, 0.0, None)
    chosen = min(feasible, key=lambda o: (o.cost_s, *_tie(o)), default=nothing)
    assert chosen.levels <= expansion.room and chosen.take_blocks <= situation.reserve_blocks
    assert chosen.evict_blocks <= situation.evictable_blocks
    rejected = tuple(
        Rejected(o.action, o.cost_s, o.infeasible) for o in options if o.action is not chosen.action
    )
    bound = _bound(situation, expansion)
    return Decision(
        action=chosen.action,
        levels=chosen.levels,
        take_blocks=chosen.take_blocks,
        evict_blocks=chosen.evict_blocks,
        cost_s=chosen.cost_s,
        rejected=rejected,
        bound=bound[0] if bound else None,
    )


def _tie(option: _Option) -> tuple[bool, int]:
    """Blocks that are there already come before all else: taking them moves nothing and loses nothing."""
    there = option.action is Action.EXPAND and not option.levels
    return not there, TIE_ORDER[option.action]


def describe(decision: Decision) -> str:
    """One line for the log: the action with its cost, and the cost of each rejected one."""
    moves = {"levels": decision.levels, "take": decision.take_blocks, "evict": decision.evict_blocks}
    parts = [f"{decision.action.value} at {decision.cost_s:.6g} s"]
    parts += [f"{name} {count}" for name, count in moves.items() if count]
    parts += [f"bound by {decision.bound.value}"] if decision.bound else []
    rejected = [
        f"{r.action.value} {r.cost_s:.6g} s" + (f" ({r.infeasible})" if r.infeasible else "")
        for r in decision.rejected
    ]
    return f"{', '.join(parts)}; rejected: {', '.join(rejected)}"


def _expansion(s: Situation, parameters: CostParameters) -> _Expansion:
    room = max(0, min(s.max_level, parameters.max_level(s.experts, s.shards_per_group)) - s.level)
    target = s.reserve_target if room else 0
    return _Expansion(room, max(0, s.reserve_blocks + s.arriving_blocks - target), s.blocks_per_level)


def _bound(s: Situation, expansion: _Expansion) -> tuple[Bound, str] | None:
    levels = expansion.levels_for(s.needed_blocks)
    if levels > expansion.room:
        return Bound.MAX_LEVEL, f"needs {levels} levels, {expansion.room} left"
    if s.needed_blocks > s.reserve_blocks:
        return Bound.RESERVE, f"needs {s.needed_blocks} blocks, reserve has {s.reserve_blocks}"
    return None


def _evictable(s: Situation, blocks: int) -> str | None:
    return (
        None if blocks <= s.evictable_blocks else f"needs {blocks} cached blocks, {s.evictable_blocks} there"
    )


def _evict(s: Situation, prices: Prices) -> _Option:
    blocks = s.needed_blocks
    return _Option(Action.EVICT, prices.evict(blocks), _evictable(s, blocks), evict_blocks=blocks)


def _spill(s: Situation, prices: Prices) -> _Option:
    """Evict, and let host memory bring back what it holds: priced apart from an eviction that loses all."""
    blocks = s.needed_blocks
    reason = _evictable(s, blocks)
    if not any(s.copied):
        reason = "host memory holds no copy of them"
    return _Option(Action.SPILL, prices.spill(blocks), reason, evict_blocks=blocks)


def _combined(s: Situation, prices: Prices, expansion: _Expansion) -> _Option:
    """Whole levels, as many as fit into the need, the bound and the reserve; the rest is evicted."""
    whole = max(0, s.needed_blocks - expansion.surplus) // s.blocks_per_level
    within = expansion.surplus + min(whole, expansion.room) * s.blocks_per_level
    take = min(s.needed_blocks, s.reserve_blocks, within)
    evict, levels = s.needed_blocks - take, expansion.levels_for(take)
    cost = prices.combined(levels, evict)
    if any(s.copied[:evict]):
        cost = min(cost, prices.offload(levels) + prices.spill(evict))
    reason = _evictable(s, evict)
    if take == 0:
        reason = "not one whole level"
    elif evict == 0:
        reason = "whole levels, nothing to evict"
    return _Option(Action.COMBINED, cost, reason, levels, take, evict)


def _expand(s: Situation, prices: Prices, expansion: _Expansion) -> _Option:
    levels = expansion.levels_for(s.needed_blocks)
    bound = _bound(s, expansion)
    return _Option(
        Action.EXPAND, prices.offload(levels), bound[1] if bound else None, levels, s.needed_blocks
    )


def _wait(s: Situation, prices: Prices, expansion: _Expansion) -> _Option:
    """The request can wait a step or two for levels that the reserve cannot give now, running or not."""
    levels = expansion.levels_for(s.needed_blocks)
    bound = _bound(s, expansion)
    reason = None
    if bound is None:
        reason = "the reserve has enough"
    elif bound[0] is Bound.MAX_LEVEL:
        reason = bound[1]
    return _Option(Action.WAIT, prices.offload(levels), reason, levels)


def _queue(s: Situation, prices: Prices) -> tuple[_Option, ...]:
    cost = prices.queue()
    if cost is None:
        return ()
    others = not s.running and s.can_preempt and s.held_blocks > 0
    reason = None if others else "only a request that waits while others hold the blocks"
    return (_Option(Action.QUEUE, cost, reason),)


def _preempt(s: Situation, prices: Prices) -> _Option:
    reason = None
    if not s.running:
        reason = "only a running request preempts"
    elif not s.can_preempt:
        reason = "no request can be preempted now"
    return _Option(Action.PREEMPT, prices.preempt(), reason)
