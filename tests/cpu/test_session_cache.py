"""Recorded coding sessions that take turns: LRU falls off a cliff, whole sessions kept do not."""

from __future__ import annotations

from functools import lru_cache

import pytest
from support.session_cache import Outcome, SessionCache, recorded, replay

SECONDS = 60
# The working set of 28 sessions grows from 2,800 to 3,300 blocks in that time.
BELOW, ABOVE = 2440, 3300


@lru_cache
def served(blocks: int, hold: bool, fairness_s: float = 0.0) -> tuple[Outcome, SessionCache]:
    cache = SessionCache(blocks, hold)
    return replay(cache, recorded(), SECONDS, fairness_s), cache


@pytest.mark.parametrize("blocks", [1288, 1870, BELOW])
def test_below_the_knee_lru_hits_nothing(blocks: int) -> None:
    outcome, _ = served(blocks, hold=False)
    assert outcome.turns > 28 and outcome.hit_tokens == 0


@pytest.mark.parametrize("hold", [False, True])
def test_above_the_knee_both_hit(hold: bool) -> None:
    outcome, _ = served(ABOVE, hold)
    assert outcome.hit_rate > 0.95


@pytest.mark.parametrize(("blocks", "least"), [(1288, 0.25), (BELOW, 0.5)])
def test_below_the_knee_whole_sessions_are_held(blocks: int, least: float) -> None:
    held, lru = served(blocks, hold=True)[0], served(blocks, hold=False)[0]
    assert held.hit_rate > least and held.turns > 1.4 * lru.turns


def test_admitting_first_what_is_there_helps_and_passes_nobody_over_for_ever() -> None:
    first_come, ordered = served(BELOW, hold=True)[0], served(BELOW, hold=True, fairness_s=10.0)[0]
    assert ordered.hit_rate > first_come.hit_rate and ordered.turns > first_come.turns
    # Who has waited 10 s has at most the other 27 before it, 100,000 tokens of prefill each.
    assert max(ordered.ttft_s) < 10 + 28 * 1.2


def test_the_curve_knows_the_knee_under_lru() -> None:
    outcome, cache = served(BELOW, hold=False)
    measurements = cache.measurements
    curve = measurements.curve(SECONDS)
    assert curve.lru(BELOW) == 0 and curve.lru(ABOVE) > 0.9 * curve.lru(10**6)
    # What holding reaches is at most the straight line to the knee, and not far below it.
    predicted = curve.held(BELOW) / curve.lru(10**6)
    assert 0.6 * predicted < served(BELOW, hold=True)[0].hit_rate < 1.1 * predicted
    assert outcome.hit_tokens == 0


@lru_cache
def grown(link_rate: float) -> tuple[Outcome, SessionCache]:
    cache = SessionCache(BELOW, hold=True, levels=128, link_rate=link_rate)
    return replay(cache, recorded(), SECONDS), cache


def test_experts_make_room_up_to_the_knee_where_their_bytes_are_cheap() -> None:
    outcome, cache = grown(4e12)
    # 3,300 blocks are 36 levels.
    assert 24 <= cache.level <= 40
    assert outcome.hit_rate > served(BELOW, hold=True)[0].hit_rate + 0.1


def test_experts_stay_where_their_bytes_are_dear() -> None:
    outcome, cache = grown(5e9)
    assert cache.level == 0
    assert outcome.hit_tokens == served(BELOW, hold=True)[0].hit_tokens


def test_sessions_that_have_ended_make_room() -> None:
    sessions = recorded()
    gone, there = sessions[:14], sessions[14:]
    cache = SessionCache(1800, hold=True)
    replay(cache, [turns[:4] for turns in gone], SECONDS)
    assert len(list(cache.measurements.chains)) == 14
    later = replay(cache, there, SECONDS, start_s=SECONDS)
    assert later.hit_rate > 0.8
