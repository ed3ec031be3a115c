"""The decision at a failing allocation: every action, every reason against one, ties, bounds, properties."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_runtime.policy.decide import Action, Bound, Decision, decide, decide_by, describe
from vamp_runtime.policy.paper_prices import PaperPrices
from vamp_runtime.policy.parameters import CostParameters
from vamp_runtime.policy.situation import Situation

# Powers of two, so that sums and ties are exact: t_overhead = 0.5 s, one shard over the horizon = 1/32 s.
P = CostParameters(
    alpha=1.0,
    tau_s=8.0,
    t_prefill_s=1 / 1024,
    t_sched_s=0.25,
    t_queue_s=0.25,
    c_eff_s=1 / 128,
    horizon_steps=4,
    max_offload_ratio=0.5,
)
NO_OVERHEAD = replace(P, t_sched_s=0.0, t_queue_s=0.0)
LOSING = (Action.EVICT, Action.SPILL)
FREE = replace(NO_OVERHEAD, c_eff_s=0.0)

# 16 of 32 experts may leave in groups of 2: 8 levels of 4 blocks.
S = Situation(
    needed_blocks=6,
    evictable_blocks=100,
    evictable_tokens=1600,
    evictable_age_s=0.0,
    tokens_per_block=16,
    r_hit=0.5,
    blocks_per_level=4,
    reserve_blocks=8,
    arriving_blocks=0,
    reserve_target=8,
    level=0,
    max_level=8,
    shards_per_group=2,
    experts=32,
    partial_tokens=8,
    can_preempt=True,
    running=True,
)


def costs(decision: Decision) -> dict[Action, float]:
    return {decision.action: decision.cost_s} | {r.action: r.cost_s for r in decision.rejected}


def reason(decision: Decision, action: Action) -> str | None:
    return next(r.infeasible for r in decision.rejected if r.action is action)


def moves(decision: Decision) -> tuple[Action, int, int, int]:
    return decision.action, decision.levels, decision.take_blocks, decision.evict_blocks


def test_expand_and_every_price() -> None:
    decision = decide(S, P)
    assert moves(decision) == (Action.EXPAND, 2, 6, 0)
    assert decision.bound is None
    assert costs(decision) == {
        Action.EXPAND: 0.125,  # 2 levels x 2 shards / 32
        Action.EVICT: 0.296875,  # 0.5 x (96 / 1024 + 0.5)
        Action.SPILL: 0.296875,  # there are no copies
        Action.COMBINED: 0.328125,  # 2 / 32 + 0.5 x (32 / 1024 + 0.5)
        Action.PREEMPT: 3.046875,  # 6 x (0.5 + 8 / 1024)
        Action.WAIT: 0.125,
    }


# Loading a block takes 1 / 128 s, prefilling its 16 tokens 1 / 64 s.
COPIED = replace(S, copied=(True,) * 6, load_block_s=1 / 128, level=8, reserve_blocks=0, reserve_target=0)


def test_spill_when_host_memory_holds_copies() -> None:
    decision = decide(COPIED, P)
    assert moves(decision) == (Action.SPILL, 0, 0, 6)
    assert decision.cost_s == 0.1484375  # 0.5 x (6 / 128 + 0.25)
    assert costs(decision)[Action.EVICT] == 0.296875


def test_a_block_without_a_copy_costs_its_prefill_and_the_queue() -> None:
    decision = decide(replace(COPIED, copied=(True,) * 5 + (False,)), P)
    assert decision.action is Action.SPILL
    assert decision.cost_s == 0.27734375  # 0.5 x (5 / 128 + 1 / 64 + 0.5)


def test_a_link_slower_than_prefilling_brings_nothing() -> None:
    decision = decide(replace(COPIED, load_block_s=1.0), P)
    assert moves(decision) == (Action.EVICT, 0, 0, 6)
    assert costs(decision)[Action.SPILL] == decision.cost_s == 0.296875


def test_levels_are_not_asked_for_where_copies_bring_blocks_back_for_less() -> None:
    situation = replace(S, copied=(True,) * 6, load_block_s=1 / 1024)
    cheap_link = replace(P, t_sched_s=0.0)
    assert decide(replace(situation, copied=()), cheap_link).action is Action.EXPAND
    assert decide(situation, cheap_link).action is Action.SPILL


def test_the_remainder_of_a_combination_may_be_copied() -> None:
    situation = replace(S, needed_blocks=5, load_block_s=1 / 1024)
    parameters = replace(NO_OVERHEAD, t_prefill_s=1 / 256)
    plain = costs(decide(situation, parameters))[Action.COMBINED]
    copied = costs(decide(replace(situation, copied=(True, False, False, False, False)), parameters))
    assert (plain, copied[Action.COMBINED]) == (0.09375, 0.06298828125)  # 2 / 32 + 0.5 / 1024


def test_evict_when_hits_are_rare() -> None:
    decision = decide(replace(S, r_hit=0.125), P)
    assert moves(decision) == (Action.EVICT, 0, 0, 6)
    assert decision.cost_s == 0.07421875  # 0.125 x 0.59375
    assert reason(decision, Action.EXPAND) is None


def test_evict_when_the_candidate_is_old() -> None:
    assert decide(replace(S, evictable_age_s=math.inf), P).action is Action.EVICT


def test_combined_when_the_last_level_is_mostly_waste() -> None:
    decision = decide(replace(S, needed_blocks=5), replace(NO_OVERHEAD, t_prefill_s=1 / 256))
    assert moves(decision) == (Action.COMBINED, 1, 4, 1)
    assert decision.cost_s == 0.09375  # 2 / 32 + 0.5 x 16 / 256; expanding 0.125, evicting 0.15625


def test_preempt_when_it_is_free() -> None:
    decision = decide(replace(S, partial_tokens=0), NO_OVERHEAD)
    assert moves(decision) == (Action.PREEMPT, 0, 0, 0)


@pytest.mark.parametrize("running", [False, True])
def test_wait_for_levels_that_the_reserve_cannot_give(running: bool) -> None:
    decision = decide(replace(S, running=running, reserve_blocks=4, reserve_target=4), P)
    assert moves(decision) == (Action.WAIT, 2, 0, 0)
    assert (decision.cost_s, decision.bound) == (0.125, Bound.RESERVE)


def test_wait_where_nothing_is_possible() -> None:
    decision = decide(replace(S, evictable_blocks=0, reserve_blocks=0, level=8, can_preempt=False), P)
    assert moves(decision) == (Action.WAIT, 0, 0, 0)
    assert len(decision.rejected) == 5 and all(r.infeasible for r in decision.rejected)


@pytest.mark.parametrize(
    ("change", "action", "expected"),
    [
        ({"evictable_blocks": 5}, Action.EVICT, "needs 6 cached blocks, 5 there"),
        ({"evictable_blocks": 1}, Action.COMBINED, "needs 2 cached blocks, 1 there"),
        ({"needed_blocks": 3}, Action.COMBINED, "not one whole level"),
        ({"needed_blocks": 8}, Action.COMBINED, "whole levels, nothing to evict"),
        ({"reserve_blocks": 5}, Action.EXPAND, "needs 6 blocks, reserve has 5"),
        ({"level": 7}, Action.EXPAND, "needs 2 levels, 1 left"),
        ({"max_level": 1}, Action.EXPAND, "needs 2 levels, 1 left"),
        ({}, Action.WAIT, "the reserve has enough"),
        ({"running": False, "level": 7}, Action.WAIT, "needs 2 levels, 1 left"),
        ({"running": False}, Action.PREEMPT, "only a running request preempts"),
        ({"can_preempt": False}, Action.PREEMPT, "no request can be preempted now"),
    ],
)
def test_infeasible(change: dict[str, int], action: Action, expected: str) -> None:
    assert reason(decide(replace(S, **change), P), action) == expected


@pytest.mark.parametrize(
    ("change", "parameters", "action"),
    [
        ({"r_hit": 0.0, "partial_tokens": 0}, FREE, Action.EVICT),  # four actions at 0
        ({"r_hit": 0.0, "partial_tokens": 0, "evictable_blocks": 2}, FREE, Action.COMBINED),
        ({"r_hit": 0.0, "partial_tokens": 0, "evictable_blocks": 0}, FREE, Action.EXPAND),
        # 0.5 x 128 tokens / 512 = 0.125 s to evict, 2 levels x 2 shards / 32 = 0.125 s to expand
        ({"needed_blocks": 8}, replace(NO_OVERHEAD, t_prefill_s=1 / 512), Action.EVICT),
    ],
)
def test_ties_move_the_least_state(
    change: dict[str, float], parameters: CostParameters, action: Action
) -> None:
    decision = decide(replace(S, **change), parameters)
    assert decision.action is action
    assert any(r.cost_s == decision.cost_s and r.infeasible is None for r in decision.rejected)


def test_combined_stops_at_the_bound_and_evicts_the_rest() -> None:
    decision = decide(
        replace(
            S,
            needed_blocks=20,
            reserve_blocks=40,
            reserve_target=40,
            level=6,
            r_hit=1.0,
            can_preempt=False,
        ),
        replace(NO_OVERHEAD, t_prefill_s=1 / 64),
    )
    assert moves(decision) == (Action.COMBINED, 2, 8, 12)
    assert decision.bound is Bound.MAX_LEVEL
    assert decision.cost_s == 3.125  # 4 / 32 + 192 / 64


def test_combined_stops_at_the_reserve() -> None:
    decision = decide(replace(S, needed_blocks=20, r_hit=1.0), replace(NO_OVERHEAD, t_prefill_s=1 / 64))
    assert moves(decision) == (Action.WAIT, 5, 0, 0)  # 5 x 2 / 32 = 0.3125
    assert costs(decision)[Action.PREEMPT] == 2.5  # 20 x 8 / 64
    assert decision.bound is Bound.RESERVE
    assert costs(decision)[Action.COMBINED] == 3.125  # takes the 8 blocks: 4 / 32 + 12 x 16 / 64


def test_the_ratio_bounds_levels_below_the_home_slots() -> None:
    situation = replace(S, needed_blocks=12, reserve_blocks=12, reserve_target=12)
    decision = decide(situation, replace(P, max_offload_ratio=0.125))
    assert reason(decision, Action.EXPAND) == "needs 3 levels, 2 left"


def test_the_reserve_is_the_last_thing_given_at_the_bound() -> None:
    decision = decide(replace(S, level=8), P)
    assert moves(decision) == (Action.EXPAND, 0, 6, 0)
    assert decision.cost_s == 0.0


def test_blocks_above_the_target_are_paid_for() -> None:
    assert moves(decide(replace(S, reserve_blocks=14), P)) == (Action.EXPAND, 0, 6, 0)
    assert moves(decide(replace(S, reserve_blocks=10), P)) == (Action.EXPAND, 1, 6, 0)
    # The levels that a waiting request asked for are on their way: ask for no more.
    waiting = replace(S, running=False, reserve_blocks=4, reserve_target=4, arriving_blocks=8)
    assert moves(decide(waiting, P)) == (Action.WAIT, 0, 0, 0)


def test_tokens_are_never_more_than_the_candidate_holds() -> None:
    decision = decide(replace(S, evictable_tokens=32), P)
    assert costs(decision)[Action.EVICT] == 0.265625  # 0.5 x (32 / 1024 + 0.5)


def test_describe_is_one_line_with_every_cost() -> None:
    assert describe(decide(S, P)) == (
        "expand at 0.125 s, levels 2, take 6; rejected: evict 0.296875 s, "
        "spill 0.296875 s (host memory holds no copy of them), combined 0.328125 s, "
        "wait 0.125 s (the reserve has enough), preempt 3.04688 s"
    )
    assert "bound by reserve" in describe(decide(replace(S, reserve_blocks=5), P))


# Dyadic numbers keep every price exact, so that the properties hold without tolerances.
def dyadic(high: int, denominator: int) -> st.SearchStrategy[float]:
    return st.integers(0, high).map(lambda n: n / denominator)


plain_situations = st.builds(
    Situation,
    needed_blocks=st.integers(1, 60),
    evictable_blocks=st.integers(0, 60),
    evictable_tokens=st.integers(0, 1000),
    evictable_age_s=st.sampled_from([0.0, 8.0, 24.0, math.inf]),
    tokens_per_block=st.sampled_from([1, 16]),
    r_hit=dyadic(16, 16),
    blocks_per_level=st.integers(1, 20),
    reserve_blocks=st.integers(0, 60),
    arriving_blocks=st.integers(0, 40),
    reserve_target=st.integers(0, 40),
    level=st.integers(0, 10),
    max_level=st.integers(0, 20),
    shards_per_group=st.integers(1, 4),
    experts=st.integers(1, 32),
    partial_tokens=st.integers(0, 16),
    can_preempt=st.booleans(),
    running=st.booleans(),
)
copies = st.tuples(st.lists(st.booleans(), max_size=60), dyadic(64, 1024))
situations = st.tuples(plain_situations, copies).map(
    lambda drawn: replace(
        drawn[0], copied=tuple(drawn[1][0][: drawn[0].needed_blocks]), load_block_s=drawn[1][1]
    )
)
parameter_sets = st.builds(
    CostParameters,
    alpha=dyadic(4, 4),
    tau_s=st.just(8.0),
    t_prefill_s=st.integers(1, 64).map(lambda n: n / 1024),
    t_sched_s=dyadic(4, 16),
    t_queue_s=dyadic(4, 16),
    c_eff_s=dyadic(64, 1024),
    horizon_steps=st.integers(1, 8),
    max_offload_ratio=dyadic(8, 8),
)


@given(situations, parameter_sets)
def test_the_cheapest_feasible_action_wins(situation: Situation, parameters: CostParameters) -> None:
    decision = decide(situation, parameters)
    feasible = [r for r in decision.rejected if r.infeasible is None]
    assert all(decision.cost_s <= r.cost_s for r in feasible)
    assert {decision.action} | {r.action for r in decision.rejected} == set(Action) - {Action.QUEUE}
    assert len(decision.rejected) == len(Action) - 2
    assert "\n" not in describe(decision)


@given(situations, parameter_sets)
def test_nothing_is_given_that_is_not_there(situation: Situation, parameters: CostParameters) -> None:
    decision = decide(situation, parameters)
    bound = min(situation.max_level, parameters.max_level(situation.experts, situation.shards_per_group))
    assert decision.levels == 0 or situation.level + decision.levels <= bound
    assert decision.take_blocks <= situation.reserve_blocks
    assert decision.evict_blocks <= situation.evictable_blocks
    if decision.action in (Action.EXPAND, Action.EVICT, Action.SPILL, Action.COMBINED):
        assert decision.take_blocks + decision.evict_blocks == situation.needed_blocks
    # At the bound the reserve is not refilled; below it every block taken or promised is covered by a level.
    # What the reserve lacked before is not this decision's to make up.
    if decision.action in (Action.EXPAND, Action.WAIT) and situation.level < bound and decision.cost_s:
        before = situation.reserve_blocks + situation.arriving_blocks
        after = before - situation.needed_blocks + decision.levels * situation.blocks_per_level
        assert after >= min(before, situation.reserve_target)


@given(situations, parameter_sets, dyadic(16, 16))
def test_more_hits_never_turn_to_eviction(
    situation: Situation, parameters: CostParameters, r_hit: float
) -> None:
    low, high = sorted((situation.r_hit, r_hit))
    if decide(replace(situation, r_hit=low), parameters).action not in LOSING:
        assert decide(replace(situation, r_hit=high), parameters).action not in LOSING


@given(situations, parameter_sets, dyadic(64, 1024))
def test_dearer_experts_never_turn_from_eviction(
    situation: Situation, parameters: CostParameters, c_eff_s: float
) -> None:
    low, high = sorted((parameters.c_eff_s, c_eff_s))
    if decide(situation, replace(parameters, c_eff_s=low)).action in LOSING:
        assert decide(situation, replace(parameters, c_eff_s=high)).action in LOSING


@given(plain_situations, parameter_sets, dyadic(64, 1024), st.data())
def test_copies_make_eviction_cheaper_and_nothing_dearer(
    situation: Situation, parameters: CostParameters, load_block_s: float, data: st.DataObject
) -> None:
    copied = data.draw(st.lists(st.booleans(), max_size=situation.needed_blocks))
    hosted = replace(situation, copied=tuple(copied), load_block_s=load_block_s)
    before, after = costs(decide(situation, parameters)), costs(decide(hosted, parameters))
    assert all(after[action] <= before[action] for action in before)
    assert after[Action.EVICT] == before[Action.EVICT]


@dataclass(frozen=True)
class Queueing(PaperPrices):
    """The paper's prices where a request may also wait for others, at a price."""

    wait_s: float | None = 0.001

    def queue(self) -> float | None:
        return self.wait_s


def test_a_waiting_request_stays_in_the_queue_where_that_is_cheaper_than_levels() -> None:
    held = replace(S, evictable_blocks=0, evictable_tokens=0, can_preempt=True, running=False, held_blocks=9)
    decision = decide_by(held, Queueing(held, P), P)
    assert decision.action is Action.QUEUE
    assert decision.levels == decision.take_blocks == decision.evict_blocks == 0
    dear = decide_by(held, Queueing(held, P, wait_s=1e6), P)
    assert dear.action is not Action.QUEUE and costs(dear)[Action.QUEUE] == 1e6
    for other in (
        replace(held, running=True),
        replace(held, can_preempt=False),
        replace(held, held_blocks=0),
    ):
        found = decide_by(other, Queueing(other, P), P)
        assert found.action is not Action.QUEUE
        assert "while others hold the blocks" in (reason(found, Action.QUEUE) or "")
