"""Prices in seconds of GPU time, from measurements."""

from __future__ import annotations

import pytest

from vamp_runtime.errors import ConfigError
from vamp_runtime.policy.chains import Chain, Layout, Loss, Part
from vamp_runtime.policy.measured import (
    MeasuredParameters,
    Waiting,
    admission_order,
    best_level,
    blended,
    chain_rank,
    cured_s,
    eviction_s,
    expected_touched,
    layer_s,
    load_s,
    lognormal_shares,
    offload_s,
    preempt_s,
)
from vamp_runtime.policy.reuse import HitCurve, ReuseDistances, ReuseTimes

MIB = 2**20
T_PREFILL_S = 1 / 84_000
LAYOUT = Layout(block_tokens=544, attention=frozenset({0}), state=frozenset({1}))


def parameters(**changes: float) -> MeasuredParameters:
    values = {"horizon_min_s": 10.0, "horizon_max_s": 300.0, "sigma": 0.6, "prior_steps": 100.0}
    return MeasuredParameters(min_lookups=8, fairness_s=20.0, **{**values, **changes})


def test_the_horizon_is_as_long_as_the_pressure_has_lasted() -> None:
    assert [parameters().horizon_s(lasted) for lasted in (0, 60, 1e6)] == [10, 60, 300]
    with pytest.raises(ConfigError, match=r"^horizon_max_s = 5: must be at least horizon_min_s, such as 10"):
        parameters(horizon_max_s=5)


@pytest.mark.parametrize(
    ("sigma", "cold", "share"), [(0.6, 0.15, 0.055), (1.06, 0.15, 0.019), (0.0, 0.25, 0.25)]
)
def test_the_prior_is_as_cold_as_recorded_models(sigma: float, cold: float, share: float) -> None:
    shares = lognormal_shares(512, sigma)
    assert sum(shares) == pytest.approx(1) and list(shares) == sorted(shares)
    assert sum(shares[: round(cold * 512)]) == pytest.approx(share, abs=0.01)


def test_a_batch_touches_more_of_the_cold_set() -> None:
    coldest = lognormal_shares(256, 0.6)[:38]
    touched = [expected_touched(coldest, tokens, 8) for tokens in (1, 16, 64, 1e9)]
    assert 0.25 < touched[0] < 0.56 and 3.8 < touched[1] < 8.0 and 12 < touched[2] < 23
    assert touched[3] == pytest.approx(38)


def test_counts_take_over_from_the_prior() -> None:
    assert blended(10, 2, 0, 100) == 10
    assert blended(10, 2, 100, 100) == 6
    assert blended(10, 2, 1e9, 100) == pytest.approx(2)


def test_a_layer_waits_for_what_the_link_cannot_hide() -> None:
    one = layer_s(1, 6 * MIB, 51e9, 0)
    assert one == pytest.approx(0.123e-3, rel=0.01)
    assert layer_s(1, 6 * MIB, 51e9, 1e-3) == 0
    assert layer_s(10, 6 * MIB, 51e9, one) == pytest.approx(9 * one)


def test_offloading_is_charged_over_the_horizon_and_returned() -> None:
    per_layer = [0.0, 1e-4, 3e-4]
    up = offload_s(per_layer, 1, 2, layers=24, steps_per_s=50, horizon_s=60)
    assert up == pytest.approx(2e-4 * 24 * 50 * 60)
    assert offload_s(per_layer, 2, 1, 24, 50, 60) == pytest.approx(-up)


def taking_turns(working_set: int) -> HitCurve:
    distances = ReuseDistances(window_s=1000)
    distances.record(0.0, 0, 0)
    for now in range(1, 101):
        distances.record(float(now), working_set, 56_000)
    return distances.curve(100.0)


def test_capacity_beyond_the_working_set_is_worth_nothing() -> None:
    curve = taking_turns(working_set=2000)
    price = cured_s(curve, 1000, 1000, 2000, T_PREFILL_S, horizon_s=60)
    assert price == pytest.approx(60 * 56_000 * T_PREFILL_S), "nothing was hit of late"
    assert cured_s(curve, 2000, 2000, 4000, T_PREFILL_S, 60) == 0
    assert cured_s(curve, 2000, 2000, 1000, T_PREFILL_S, 60) == pytest.approx(-price / 2), (
        "some are kept whole"
    )


def test_nothing_to_hit_is_worth_nothing() -> None:
    distances = ReuseDistances(window_s=100)
    for now in range(20):
        distances.record(float(now), 100, 0)
    assert cured_s(distances.curve(20.0), 0, 0, 1000, T_PREFILL_S, 60) == 0


def test_a_knee_several_levels_away_is_found() -> None:
    missed = {0: 10.0, 1: 10.0, 2: 10.0, 3: 0.0, 4: 0.0}
    assert best_level(range(5), lambda level: missed[level] + 2.0 * level) == 3
    assert best_level(range(5), lambda level: missed[level] + 4.0 * level) == 0
    assert best_level([2, 0, 1], lambda level: 0.0) == 2, "at a tie nothing moves"


def test_the_load_is_what_is_missed_and_what_is_read() -> None:
    assert load_s(1000.0, 1e-4, decode=0.2, prefill=0.3) == pytest.approx(0.6)


def chain(used_at: float, blocks: int, state: bool = True) -> Chain:
    held = Chain(["x"], used_at)
    parts = [Part(0, 544 * (place + 1)) for place in range(blocks)]
    held.hold(dict(enumerate([*parts, Part(1, 544 * blocks)] if state else parts)))
    return held


def test_a_chain_without_its_state_is_worth_nothing() -> None:
    reuse = ReuseTimes(prior=0.5, prior_events=4, tau_s=40, half_life=100)
    whole, broken = chain(90, 10), chain(99, 10, state=False)
    assert (whole.usable(LAYOUT), broken.usable(LAYOUT)) == (5440, 0)
    ranks = [chain_rank(held, LAYOUT, reuse, 100, T_PREFILL_S) for held in (whole, broken)]
    assert ranks[1] < ranks[0]


def test_eviction_is_a_chance_and_preemption_certain() -> None:
    reuse = ReuseTimes(prior=0.5, prior_events=4, tau_s=40, half_life=100)
    lost = [Loss(5440, used_at=9.0), Loss(0, used_at=9.0)]
    assert eviction_s(lost, reuse, 9.0, T_PREFILL_S, 0.1) == pytest.approx(0.5 * (5440 * T_PREFILL_S + 0.1))
    # Half of the tokens come back with 5 blocks from host memory, where that is sooner.
    half = [Loss(5440, used_at=9.0, loadable=2720, loads=5)]
    quick, slow = 0.1 * 544 * T_PREFILL_S, 10 * 544 * T_PREFILL_S
    assert eviction_s(half, reuse, 9.0, T_PREFILL_S, 0.1, quick) == pytest.approx(
        0.5 * (0.55 * 5440 * T_PREFILL_S + 0.1)
    )
    assert eviction_s(half, reuse, 9.0, T_PREFILL_S, 0.1, slow) == eviction_s(
        lost, reuse, 9.0, T_PREFILL_S, 0.1
    )
    # A load waits for no prefill step.
    whole = [Loss(5440, used_at=9.0, loadable=5440, loads=10)]
    assert eviction_s(whole, reuse, 9.0, T_PREFILL_S, 0.1, quick) == pytest.approx(0.5 * 10 * quick)
    assert preempt_s(5440, T_PREFILL_S, 0.1) == pytest.approx(5440 * T_PREFILL_S + 0.1)


def test_what_is_there_goes_first_but_nobody_waits_for_ever() -> None:
    waiting = [Waiting(0, 1000, 0), Waiting(50, 1000, 100), Waiting(60, 1000, 500), Waiting(70, 1000, 999)]
    assert admission_order(waiting, 80, fairness_s=100) == [2, 3, 0, 1]
    assert admission_order(waiting, 80, fairness_s=30) == [0, 1, 2, 3]
    assert admission_order(waiting, 80, fairness_s=79) == [0, 2, 3, 1]
    assert admission_order([], 0, 1) == []
