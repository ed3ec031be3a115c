"""The sliding hit rate: window, prior, and hits on blocks that were evicted recently."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_runtime.policy.hit_rate import HitRate


def make(
    *,
    window_tokens: int = 1000,
    window_s: float = 60.0,
    prior: float = 0.5,
    prior_tokens: int = 0,
    ghost_blocks: int = 100,
) -> HitRate:
    return HitRate(
        window_tokens=window_tokens,
        window_s=window_s,
        prior=prior,
        prior_tokens=prior_tokens,
        ghost_blocks=ghost_blocks,
    )


def test_starts_at_the_prior() -> None:
    rate = make(prior=0.25)
    assert (rate.observed(0.0), rate.reusable(0.0)) == (0.25, 0.25)


def test_the_prior_fades_as_tokens_arrive() -> None:
    rate = make(prior=0.5, prior_tokens=200)
    rate.record(0.0, 100, 0)
    assert rate.observed(0.0) == 0.25  # (0 + 0.5 x 100) / 200
    rate.record(1.0, 50, 50)
    assert rate.observed(1.0) == 0.375  # (50 + 0.5 x 50) / 200
    rate.record(2.0, 50, 0)
    assert rate.observed(2.0) == 0.25  # 50 / 200: gone
    rate.record(3.0, 200, 50)
    assert rate.observed(3.0) == 0.25  # 100 / 400


def test_the_window_slides_by_tokens() -> None:
    rate = make(window_tokens=1000)
    rate.record(0.0, 600, 600)
    rate.record(1.0, 600, 0)
    assert rate.observed(1.0) == 0.5  # 600 / 1200: the last request alone is too few
    rate.record(2.0, 400, 0)
    assert rate.observed(2.0) == 0.0  # the last two reach 1000


def test_a_request_larger_than_the_window_counts_alone() -> None:
    rate = make(window_tokens=1000)
    rate.record(0.0, 500, 500)
    rate.record(1.0, 5000, 1000)
    assert rate.observed(1.0) == 0.2


def test_the_window_slides_by_time_back_to_the_prior() -> None:
    rate = make(window_s=60.0, prior=0.5)
    rate.record(0.0, 100, 100)
    rate.record(50.0, 100, 0)
    assert rate.observed(60.0) == 0.5  # both: 100 / 200
    assert rate.observed(60.5) == 0.0  # the second alone
    assert rate.observed(111.0) == 0.5  # none: the prior


def test_ghost_hits_show_what_capacity_would_cure() -> None:
    """Sessions that take turns and do not fit: nothing is hit, all of it was evicted a moment ago."""
    rate = make(window_tokens=10_000)
    for turn in range(3):
        for session in range(4):
            hashes = [(session, block) for block in range(8)]
            rate.record(turn * 4.0 + session, 128, 0, hashes, 16)
            for block_hash in hashes:
                rate.evicted(block_hash)
    assert rate.observed(20.0) == 0.0
    assert rate.reusable(20.0) == pytest.approx(2 / 3)  # every turn but the first


def test_a_ghost_counts_once() -> None:
    rate = make(window_tokens=10_000)
    rate.evicted("a")
    rate.record(0.0, 32, 0, ["a", "b"], 16)
    rate.record(1.0, 32, 0, ["a", "b"], 16)
    assert rate.reusable(1.0) == 0.25  # 16 / 64: the first request computed "a" anew


def test_ghosts_are_bounded_oldest_first() -> None:
    rate = make(ghost_blocks=2)
    for block_hash in ("a", "b", "a", "c"):  # evicting "a" again makes it young
        rate.evicted(block_hash)
    rate.record(0.0, 48, 0, ["a", "c", "b"], 16)
    assert rate.reusable(0.0) == pytest.approx(2 / 3)


def test_a_ghost_proves_its_whole_prefix() -> None:
    rate = make(window_tokens=10_000)
    rate.evicted("c")
    rate.record(0.0, 64, 0, ["a", "b", "c", "d"], 16)
    assert rate.reusable(0.0) == 0.75


def test_without_ghosts_both_readings_agree() -> None:
    rate = make(ghost_blocks=0)
    rate.evicted("a")
    rate.record(0.0, 16, 0, ["a"], 16)
    assert rate.reusable(0.0) == rate.observed(0.0) == 0.0


def test_a_clock_that_runs_back_is_caught() -> None:
    rate = make()
    rate.record(1.0, 1, 0)
    with pytest.raises(AssertionError, match="runs back"):
        rate.observed(0.5)


requests = st.lists(
    st.tuples(
        st.floats(0, 40),
        st.integers(0, 500),
        st.floats(0, 1),
        st.lists(st.integers(0, 20), unique=True, max_size=8),
    ),
    max_size=40,
)


@given(requests, st.floats(0, 1), st.integers(0, 800))
def test_rates_stay_between_0_and_1_and_match_the_window(
    stream: list[tuple[float, int, float, list[int]]], prior: float, prior_tokens: int
) -> None:
    rate = make(prior=prior, prior_tokens=prior_tokens, ghost_blocks=8)
    now, seen = 0.0, []
    for delay, queried, share, hashes in stream:
        now += delay
        hit = int(queried * share)
        rate.record(now, queried, hit, hashes, 16)
        for block_hash in hashes:
            rate.evicted(block_hash)
        seen.append((now, queried, hit))
        assert 0 <= rate.observed(now) <= rate.reusable(now) <= 1
    window: list[tuple[float, int, int]] = []
    for entry in reversed(seen):  # from scratch: newest first until 1000 tokens or 60 s
        if now - entry[0] > 60.0 or sum(q for _, q, _ in window) >= 1000:
            break
        window.append(entry)
    queried_total, hits = sum(q for _, q, _ in window), sum(h for _, _, h in window)
    missing = max(0, prior_tokens - queried_total)
    total = queried_total + missing
    assert rate.observed(now) == pytest.approx((hits + prior * missing) / total if total else prior)
