"""Reuse times rank victims; reuse distances say what capacity would cure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vamp_runtime.policy.reuse import EDGES, ReuseDistances, ReuseTimes


def times(prior: float = 0.5) -> ReuseTimes:
    return ReuseTimes(prior=prior, prior_events=4, tau_s=40, half_life=200)


def test_before_events_the_least_recently_used_goes_first() -> None:
    reuse = times()
    ages = [0, 1, 10, 100, 1000]
    densities = [reuse.density(age) for age in ages]
    assert densities == sorted(densities, reverse=True)
    assert reuse.chance(0) == 0.5 and reuse.chance(40) == pytest.approx(0.25)


def test_where_prefixes_take_turns_the_one_used_last_goes_first() -> None:
    reuse = times()
    for _ in range(200):
        reuse.reused(20)
    assert reuse.density(0) < reuse.density(5) < reuse.density(15) < reuse.density(19)
    assert reuse.density(19) > reuse.density(60) > reuse.density(600), "overdue: it will not come back"
    assert reuse.chance(5) > 0.95 and reuse.chance(60) < 0.5


def test_prefixes_given_up_lower_the_chance() -> None:
    returning, mixed = times(), times()
    for _ in range(100):
        returning.reused(10)
        mixed.reused(10)
        mixed.ended(120)
    assert mixed.chance(0) == pytest.approx(0.5, abs=0.01) and returning.chance(0) > 0.9
    assert mixed.density(0) < returning.density(0)


def test_old_events_fade() -> None:
    reuse = times()
    for _ in range(2000):
        reuse.reused(1)
    for _ in range(2000):
        reuse.ended(60)
    assert reuse.chance(0) < 0.05


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e6)), max_size=80), st.floats(0, 1e6), st.floats(0, 1))
def test_chances_are_chances(events: list[tuple[bool, float]], age: float, prior: float) -> None:
    reuse = times(prior)
    for hit, at in events:
        (reuse.reused if hit else reuse.ended)(at)
    assert 0 <= reuse.chance(age) <= 1 and reuse.density(age) >= 0


def test_ages_beyond_the_last_edge_have_a_bin() -> None:
    reuse = times()
    reuse.reused(EDGES[-1] * 10)
    assert reuse.density(EDGES[-1] * 20) > 0


def taking_turns(sessions: int, blocks: int, rounds: int = 10) -> ReuseDistances:
    """Every session needs all of them; a second between two lookups, 1,000 tokens each."""
    distances = ReuseDistances(window_s=1000)
    for now in range(sessions * rounds):
        first = now < sessions
        distances.record(float(now), 0 if first else sessions * blocks, 0 if first else 1000)
    return distances


def test_below_the_knee_lru_hits_nothing_and_holding_its_share() -> None:
    curve = taking_turns(sessions=10, blocks=100).curve(99.0)
    assert curve.lookups == 100
    assert curve.lru(999) == 0 and curve.lru(1000) == pytest.approx(1000 * 90 / 99)
    assert curve.held(500) == pytest.approx(curve.lru(1000) / 2)
    assert curve.held(1000) == curve.held(5000) == curve.lru(5000)


def test_lookups_leave_the_window() -> None:
    distances = ReuseDistances(window_s=10)
    distances.record(0.0, 10, 100)
    assert distances.curve(5.0).lru(10) == pytest.approx(20)
    assert distances.curve(11.0).lookups == 0 and distances.curve(11.0).held(10) == 0


SAMPLES = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 10_000)), max_size=60)


@settings(deadline=None)
@given(SAMPLES, st.lists(st.integers(0, 600), min_size=3, max_size=3).map(sorted))
def test_the_hull_is_concave_and_never_below(samples: list[tuple[int, int]], at: list[int]) -> None:
    distances = ReuseDistances(window_s=1e6)
    for now, (need, tokens) in enumerate(samples):
        distances.record(float(now), need, tokens)
    curve = distances.curve(float(len(samples)))
    low, middle, high = at
    slack = 1e-6 * (1 + curve.held(600))
    for blocks in at:
        assert curve.held(blocks) >= curve.lru(blocks) - slack
    assert curve.held(low) <= curve.held(middle) + slack and curve.lru(low) <= curve.lru(middle)
    share = (middle - low) / (high - low) if high > low else 0
    straight = curve.held(low) + share * (curve.held(high) - curve.held(low))
    assert curve.held(middle) >= straight - slack


AGES = st.floats(min_value=0, max_value=2 * EDGES[-1])


@given(st.lists(st.tuples(st.booleans(), AGES), max_size=40), AGES)
def test_sums_kept_are_those_of_all_events(events: list[tuple[bool, float]], age: float) -> None:
    """Hits, ends and seconds beyond an age, against every event's bin one by one."""
    reuse = times()
    counts = [[0.0] * len(EDGES), [0.0] * len(EDGES)]
    for hit, at in events:
        (reuse.reused if hit else reuse.ended)(at)
        counts = [[0.5 ** (1 / 200) * count for count in bins] for bins in counts]
        counts[not hit][next((i for i, edge in enumerate(EDGES) if at <= edge), len(EDGES) - 1)] += 1
    first = next((i for i, edge in enumerate(EDGES) if age <= edge), len(EDGES) - 1)
    hits, ends = (sum(bins[first:]) for bins in counts)
    seconds = sum(
        (counts[0][i] + counts[1][i]) * max(EDGES[i] - age, EDGES[i] * (1 - 0.5**0.5) / 2)
        for i in range(first, len(EDGES))
    )
    prior = 4 * 0.5
    assert reuse.chance(age) == pytest.approx((hits + prior / (1 + age / 40)) / (hits + ends + 4))
    assert reuse.density(age) == pytest.approx((hits + prior) / (seconds + 4 * (40 + age)))
