"""When levels go back to the experts, and how many."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_runtime.policy.parameters import CostParameters, RestoreParameters
from vamp_runtime.policy.restore import RestoreSituation, decide_restore

# One shard over the horizon = 1/32 s, so a level of 2 shards saves 1/16 s; no overhead.
P = CostParameters(
    alpha=1.0,
    tau_s=8.0,
    t_prefill_s=1 / 1024,
    t_sched_s=0.0,
    t_queue_s=0.0,
    c_eff_s=1 / 128,
    horizon_steps=4,
    max_offload_ratio=0.5,
)
R = RestoreParameters(dead_zone=2.0, min_dwell_s=10.0)
S = RestoreSituation(
    level=3,
    shards_per_group=2,
    experts=32,
    blocks_per_level=4,
    clean_blocks=0,
    cached_blocks=100,
    tokens_per_block=16,
    cached_age_s=0.0,
    r_hit=0.25,
    waiting_requests=0,
    since_growth_s=10.0,
    moving=False,
)


def test_everything_goes_back_when_the_cache_is_cheap() -> None:
    decision = decide_restore(S, P, R)
    # a level: saves 0.0625, loses 0.25 x 64 / 1024 = 0.015625, twice that is less
    assert (decision.levels, decision.saving_s, decision.loss_s) == (3, 0.1875, 0.046875)
    assert decision.reason is None


@pytest.mark.parametrize(
    ("r_hit", "levels"),
    [
        (0.4375, 3),  # loses 0.02734375 a level: twice that is 0.0546875 < 0.0625
        (0.5, 0),  # loses 0.03125 a level: twice that is exactly the saving, inside the dead zone
        (1.0, 0),
    ],
)
def test_the_dead_zone(r_hit: float, levels: int) -> None:
    assert decide_restore(replace(S, r_hit=r_hit), P, R).levels == levels


def test_clean_blocks_go_first_and_cost_nothing() -> None:
    decision = decide_restore(replace(S, r_hit=1.0, clean_blocks=9), P, R)
    # 2 levels are clean; the third saves 0.0625 and loses 3 cached blocks, 48 / 1024, times 2 = 0.09375
    assert (decision.levels, decision.loss_s) == (2, 0.0)


def test_old_blocks_are_worth_less() -> None:
    assert decide_restore(replace(S, r_hit=1.0, cached_age_s=math.inf), P, R).levels == 3


def test_blocks_with_copies_are_worth_their_load() -> None:
    """At r_hit 1 a level of 4 cached blocks loses 1/16 s, as much as it saves; with copies 4/1024 s."""
    dear = replace(S, r_hit=1.0, cached_blocks=12, load_block_s=1 / 1024)
    assert decide_restore(dear, P, R).levels == 0
    decision = decide_restore(replace(dear, copied_blocks=12), P, R)
    assert (decision.levels, decision.loss_s) == (3, 0.01171875)
    # Those without a copy count first: all of the first level, none of the others.
    decision = decide_restore(replace(dear, copied_blocks=8), P, R)
    assert (decision.levels, decision.loss_s) == (3, 0.0703125)


def test_only_free_blocks_can_go() -> None:
    assert decide_restore(replace(S, cached_blocks=8), P, R).levels == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"level": 0}, "every expert is in HBM"),
        ({"moving": True}, "a move is under way"),
        ({"waiting_requests": 2}, "2 requests wait"),
        ({"since_growth_s": 9.5}, "grown 9.5 s ago, dwell 10 s"),
        ({"cached_blocks": 3}, "too few free blocks for one level"),
        ({"r_hit": 1.0}, "the cached blocks are worth more"),
    ],
)
def test_why_not(change: dict[str, float], reason: str) -> None:
    decision = decide_restore(replace(S, **change), P, R)
    assert (decision.levels, decision.reason) == (0, reason)


@given(
    st.builds(
        RestoreSituation,
        level=st.integers(0, 20),
        shards_per_group=st.integers(1, 4),
        experts=st.just(80),
        blocks_per_level=st.integers(1, 10),
        clean_blocks=st.integers(0, 50),
        cached_blocks=st.integers(0, 50),
        tokens_per_block=st.just(16),
        cached_age_s=st.floats(0, 100),
        r_hit=st.floats(0, 1),
        waiting_requests=st.integers(0, 1),
        since_growth_s=st.floats(0, 20),
        moving=st.booleans(),
        load_block_s=st.floats(0, 1),
    ),
    st.floats(1, 4),
)
def test_levels_pay_and_are_there(situation: RestoreSituation, dead_zone: float) -> None:
    restore = RestoreParameters(dead_zone=dead_zone, min_dwell_s=10.0)
    decision = decide_restore(situation, P, restore)
    assert (decision.levels == 0) == (decision.reason is not None)
    assert decision.levels <= situation.level
    if decision.levels:
        assert decision.saving_s > dead_zone * decision.loss_s
        assert situation.waiting_requests == 0 and not situation.moving
        assert situation.since_growth_s >= 10.0
        blocks = situation.clean_blocks + situation.cached_blocks
        assert decision.levels * situation.blocks_per_level <= blocks
