"""Choices from measurements: whether experts should make room, which blocks go, what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from vamp_runtime.policy.chains import Layout, Part
from vamp_runtime.policy.decide import Action, decide_by
from vamp_runtime.policy.measured import MeasuredParameters
from vamp_runtime.policy.measured_prices import MeasuredPrices
from vamp_runtime.policy.measurements import RELEASED_S, Measurements
from vamp_runtime.policy.parameters import CostParameters
from vamp_runtime.policy.read_seconds import Link
from vamp_runtime.policy.reads import LevelReads
from vamp_runtime.policy.reuse import ReuseTimes
from vamp_runtime.policy.situation import Situation

LAYOUT = Layout(block_tokens=544, attention=frozenset({0}), state=frozenset({1}))
PARAMETERS = MeasuredParameters(
    sigma=0.6, prior_steps=1000, horizon_min_s=10, horizon_max_s=300, min_lookups=20, fairness_s=20
)
COST = CostParameters(
    alpha=1.0,
    tau_s=40.0,
    t_prefill_s=1 / 84_000,
    t_sched_s=0.001,
    t_queue_s=0.1,
    c_eff_s=0.0,
    horizon_steps=1,
    max_offload_ratio=0.25,
)
# Levels of 24 blocks, as on an H200: 128 of 512 experts at most.
BLOCKS_AT = tuple(1288 + 24 * level for level in range(129))
SESSION_BLOCKS = 100


def make(bandwidth: float = 51e9, paced: bool = False) -> Measurements:
    times = ReuseTimes(prior=0.5, prior_events=8, tau_s=40, half_life=500)
    measurements = Measurements(PARAMETERS, COST, LAYOUT, times, window_s=120)
    reads = LevelReads(experts=512, group=1, max_level=128, top_k=10, sigma=0.6, prior_steps=1000)
    measurements.announce(
        reads,
        Link(
            expert_bytes=6 << 20,
            bandwidth=bandwidth,
            layers=24,
            hidden_s_per_token=0.0,
            step_tokens=8192,
            paced=paced,
        ),
    )
    return measurements


def hashes(session: int) -> Sequence[tuple[int, int]]:
    return [(session, place) for place in range(SESSION_BLOCKS - 1)]


def blocks(session: int) -> dict[int, Part]:
    first = session * SESSION_BLOCKS
    parts = {first + place: Part(0, 544 * (place + 1)) for place in range(SESSION_BLOCKS - 1)}
    return parts | {first + SESSION_BLOCKS - 1: Part(1, 544 * (SESSION_BLOCKS - 1))}


def take_turns(
    measurements: Measurements, sessions: int, rounds: int = 6, state: bool = True, loaded: int = 0
) -> float:
    """Sessions take turns, each a prefill of 0.7 s and some decoding; nothing is found in HBM, and so many
    tokens are loaded from host memory. The time after."""
    now = 0.0
    for turn in range(sessions * rounds):
        session = turn % sessions
        measurements.pressed(now)
        measurements.looked_up(now, hashes(session), hit_tokens=0, loaded_tokens=loaded)
        for step in range(20):
            measurements.step(now + 0.05 * step, 16)
        now += 1.0
        there = blocks(session)
        if not state:
            del there[max(there)]
        measurements.chains.rest(now, hashes(session), there)
    return now


def target(measurements: Measurements, now: float, level: int = 0) -> int:
    return measurements.target(now, level, BLOCKS_AT[level], BLOCKS_AT)


def cured(measurements: Measurements, now: float, blocks: int) -> float | None:
    return measurements.cured(now, 1288, 1288, blocks, measurements.missed_token_s(now, 1288, 0))


def test_experts_make_room_up_to_the_knee_and_not_beyond() -> None:
    measurements = make(bandwidth=2000e9)
    now = take_turns(measurements, sessions=20)
    # The working set is 2,000 blocks: 30 levels.
    assert target(measurements, now) == 30
    assert target(measurements, now, level=30) == 30
    assert target(measurements, now, level=12) == 30


def test_experts_stay_where_reading_them_costs_more() -> None:
    measurements = make(bandwidth=5e9)
    now = take_turns(measurements, sessions=20)
    assert target(measurements, now) == 0


def test_experts_stay_where_no_capacity_would_help() -> None:
    measurements = make(bandwidth=2000e9)
    now = take_turns(measurements, sessions=20, state=False)
    assert target(measurements, now) == 0


def test_nothing_moves_on_a_few_lookups() -> None:
    measurements = make(bandwidth=2000e9)
    now = take_turns(measurements, sessions=19, rounds=1)
    assert cured(measurements, now, 2000) is None and target(measurements, now) == 0


def test_a_first_turn_says_nothing_for_capacity() -> None:
    measurements = make(bandwidth=2000e9)
    now = take_turns(measurements, sessions=100, rounds=1)
    assert cured(measurements, now, 4000) == 0 and target(measurements, now) == 0


def test_orphans_go_first_and_then_the_chain_used_last() -> None:
    measurements = make()
    now = take_turns(measurements, sessions=20)
    measurements.chains.rest(
        now, hashes(3)[:80], {number: part for number, part in blocks(3).items() if part.end <= 40_000}
    )
    free = range(2000)
    victims = measurements.eviction.victims(now, 200, free)
    orphans = [block for block in blocks(3) if not measurements.chains.owned(block)]
    assert set(victims[: len(orphans)]) == set(orphans) and len(orphans) > 20
    assert len(set(victims)) == 200
    # The shortened chain has lost its state; then comes the session that had its turn just now.
    rest = victims[len(orphans) :]
    assert rest[0] // SESSION_BLOCKS == 3 and rest[-1] // SESSION_BLOCKS == 19


def test_worthless_blocks_cost_nothing_and_a_state_its_chain() -> None:
    measurements = make()
    measurements.chains.rest(0.0, hashes(0), blocks(0))
    state = max(blocks(0))
    chance = 0.5 / (1 + 10 / 40)
    whole = chance * (99 * 544 / 84_000 + 0.101)
    assert measurements.eviction_price(10.0, {state}, 1288, 0) == pytest.approx(whole)
    assert measurements.eviction_price(10.0, {0}, 1288, 0) == pytest.approx(whole)
    measurements.lost(state)
    assert measurements.eviction_price(10.0, {0, 1, 2}, 1288, 0) == 0


def test_what_host_memory_holds_costs_its_load() -> None:
    measurements = make()
    measurements.load_block_s = 544 / 84_000 / 4
    measurements.chains.rest(0.0, hashes(0), blocks(0))
    last = max(blocks(0))
    chance, prefill_s = 0.5 / (1 + 10 / 40), 99 * 544 / 84_000
    lost = measurements.eviction_price(10.0, {last}, 1288, 0, lambda block: block != last)
    assert lost == measurements.eviction_price(10.0, {last}, 1288, 0)
    held = measurements.eviction_price(10.0, {last}, 1288, 0, lambda block: True)
    assert held == pytest.approx(chance * prefill_s * 100 / 99 / 4)
    assert measurements.tail_price(10.0, {last}, 24, 1288, 0, lambda block: True) == pytest.approx(held)


def test_levels_are_not_worth_their_price_where_host_memory_brings_prefixes_back() -> None:
    wanted = {}
    for loaded in (0, SESSION_BLOCKS * 544):
        measurements = make(bandwidth=1000e9)
        measurements.load_block_s = 544 / 84_000 / 100
        now = take_turns(measurements, sessions=20, loaded=loaded)
        wanted[loaded] = cured(measurements, now, 2000), target(measurements, now)
    (dear, levels), (cheap, none) = wanted.values()
    assert levels == 30 and none == 0
    assert dear is not None and cheap == pytest.approx(dear / 100)


def test_the_tail_is_priced_by_what_lies_in_it_and_what_it_could_hold() -> None:
    measurements = make()
    now = take_turns(measurements, sessions=20)
    nothing, something = (
        measurements.tail_price(now, cached, 24, capacity=2000, level=0)
        for cached in (set[int](), {1950, 1951})
    )
    assert something > nothing > 0
    assert measurements.tail_price(now, set(), 24, capacity=3000, level=0) == 0


SITUATION = Situation(
    needed_blocks=100,
    evictable_blocks=1000,
    evictable_tokens=544_000,
    evictable_age_s=0.0,
    tokens_per_block=544,
    r_hit=0.0,
    blocks_per_level=24,
    reserve_blocks=200,
    arriving_blocks=0,
    reserve_target=24,
    level=0,
    max_level=128,
    shards_per_group=1,
    experts=512,
    partial_tokens=100,
    can_preempt=False,
    running=False,
)


def action(
    measurements: Measurements, now: float, situation: Situation = SITUATION, copied: bool = False
) -> Action:
    victims = measurements.eviction.victims(now, situation.needed_blocks, range(2000))
    if copied:
        situation = replace(situation, copied=(True,) * len(victims))
    on_host = (lambda block: True) if copied else None
    prices = MeasuredPrices(measurements, now, 1288, situation, victims, on_host)
    return decide_by(situation, prices, COST).action


def test_the_cheaper_of_experts_and_prefixes_goes() -> None:
    cheap, dear = make(bandwidth=2000e9), make(bandwidth=5e9)
    situation = replace(SITUATION, reserve_blocks=100, reserve_target=100)
    for measurements, expected in ((cheap, Action.EXPAND), (dear, Action.EVICT)):
        now = take_turns(measurements, sessions=20)
        assert action(measurements, now, situation) is expected
    assert action(dear, now) is Action.EXPAND, "what a move has brought already costs nothing"


def test_prefixes_that_host_memory_holds_go_before_experts() -> None:
    measurements = make(bandwidth=700e9)
    measurements.load_block_s = 544 / 84_000 / 100
    situation = replace(SITUATION, reserve_blocks=100, reserve_target=100)
    now = take_turns(measurements, sessions=20)
    assert action(measurements, now, situation) is Action.EXPAND
    assert action(measurements, now, situation, copied=True) is Action.SPILL
    measurements.load_block_s = 1.0
    assert action(measurements, now, situation, copied=True) is Action.EXPAND, "the link is slower"


def test_where_prompts_are_paced_a_level_costs_each_of_them_a_pass() -> None:
    """Steps that prefilled of late do not matter: the same reads, for as many prompts as come."""
    measurements = make(paced=True)
    now = take_turns(measurements, sessions=20)
    horizon, lookups = measurements.horizon_s(now), measurements.curve(now).lookups_per_s
    one_pass = 24 * 12 * (6 << 20) / 51e9
    price = measurements.offload_price(now, 1288, 0, 12)
    assert measurements._reads is not None
    decode = measurements._reading(now, 1288).step_decode[12] * 24 * measurements._reads.steps_per_s
    assert price == pytest.approx((one_pass * lookups + decode) * horizon, rel=0.01) and decode > 0
    assert measurements.offload_price(now, 1288, 12, 0) == pytest.approx(-price)


def test_long_answers_pay_for_levels_when_nobody_asks_any_more() -> None:
    """Levels must go back, and not come for nothing, while all that is left decodes on."""
    measurements = make(paced=True)
    began = now = take_turns(measurements, sessions=20)
    prices = []
    while now < began + 200:
        for _ in range(100):
            now += 0.02
            measurements.step(now, 16)
        prices.append(measurements.offload_price(now, 1288, 0, 40) / measurements.horizon_s(now))
    lasting = prices[-20:]
    assert min(lasting) > 0 and max(lasting) < 1.5 * min(lasting)
    assert max(prices) < 20 * min(lasting)


def test_what_is_there_of_a_prompt() -> None:
    measurements = make()
    measurements.chains.rest(0.0, hashes(0), blocks(0))
    assert measurements.eviction.wait([[*hashes(0), (0, 99)]]) == [99 * 544]
    assert measurements.eviction.wait([hashes(1)]) == [0]
    measurements.lost(0)
    assert measurements.eviction.wait([hashes(0)]) == [0]


def test_the_horizon_follows_the_pressure() -> None:
    measurements = make()
    assert measurements.horizon_s(0.0) == 10
    for now in range(100):
        measurements.pressed(float(now))
    assert measurements.horizon_s(99.0) == 99 and measurements.horizon_s(200.0) == 10
    measurements.pressed(200.0)
    assert measurements.horizon_s(205.0) == 10


def test_a_queue_has_a_price_where_host_memory_keeps_copies() -> None:
    measurements = make()
    measurements.released(1.0, 50)
    assert measurements.queue_price(5.0, 20, 0) is None, "blocks are worth having for those who come back"
    measurements.load_block_s = 1e-4
    measurements.released(1.0, 50)
    measurements.released(4.0, 50)
    assert measurements.queue_price(5.0, 20, 0) == pytest.approx(20 / (100 / RELEASED_S))
    assert measurements.queue_price(5.0, 20, 4) == pytest.approx(20 / (100 / RELEASED_S) / 5), (
        "others wait too"
    )
    assert measurements.queue_price(12.0, 20, 0) == pytest.approx(20 / (50 / RELEASED_S))
    assert measurements.queue_price(15.0, 20, 0) is None, "nobody gives anything back"


def test_with_copies_what_is_preempted_is_loaded_again_but_for_its_last_block() -> None:
    measurements = make()
    whole = measurements.preempt_price(10, 100)
    assert whole == pytest.approx((10 * 544 + 100) / 84_000 + 0.101)
    measurements.load_block_s, measurements.loaded_prior = 1e-4, 1.0
    assert measurements.preempt_price(10, 100) == pytest.approx(1e-3 + 100 / 84_000 + 0.101)
    measurements.released(0.0, 150)  # a request has so many, and all of them go
    assert measurements.preempt_price(10, 100) == pytest.approx(15e-3 + 100 / 84_000 + 0.101)
    measurements.loaded_prior = 0.0
    assert measurements.preempt_price(10, 100) == pytest.approx((150 * 544 + 100) / 84_000 + 0.101)


def test_a_miss_counts_as_loaded_until_something_was_not() -> None:
    measurements = make()
    computed = measurements.missed_token_s(0.0, 1288, 0)
    measurements.load_block_s, measurements.loaded_prior = 1e-5, 1.0
    loaded = measurements.missed_token_s(0.0, 1288, 0)
    assert loaded == pytest.approx(1e-5 / 544) and loaded < computed / 100
    now = take_turns(measurements, sessions=20)
    assert measurements.missed_token_s(now, 1288, 0) == pytest.approx(computed, rel=0.2)


def test_a_miss_weighs_as_much_as_the_profile_says_and_less_where_copies_come_back() -> None:
    measurements = make()
    plain = measurements.missed_token_s(0.0, 1288, 0)
    measurements.parameters = replace(PARAMETERS, miss_weight=8.0)
    assert measurements.missed_token_s(0.0, 1288, 0) == pytest.approx(8 * plain)
    measurements.load_block_s = 1e9  # so long that all is computed
    for share, weight in ((1.0, 1.0), (0.5, 4.5), (0.0, 8.0)):
        measurements.loaded_prior = share
        assert measurements.missed_token_s(0.0, 1288, 0) == pytest.approx(weight * plain)
