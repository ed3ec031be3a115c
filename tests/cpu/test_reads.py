"""Expert bytes that a level would cost: the prior, and counts that take over from it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vamp_runtime.policy.reads import LONGEST_STEP_S, LevelReads, prior_by_level

MIB = 2**20


def reads(max_level: int = 128, prior_steps: float = 100.0, ordered: bool = True) -> LevelReads:
    sizes = {"experts": 512, "group": 1, "max_level": max_level, "top_k": 10}
    return LevelReads(**sizes, sigma=0.6, prior_steps=prior_steps, ordered=ordered)


def seconds(of: LevelReads, hidden_s: float = 0.0) -> list[float]:
    return of.per_layer_s(6 * MIB, 51e9, lambda tokens: hidden_s)


def test_without_steps_nothing_is_read() -> None:
    assert seconds(reads(max_level=2)) == [0.0, 0.0, 0.0] and reads().steps_per_s == 0


def test_a_level_costs_more_the_warmer_it_is_and_the_larger_the_steps() -> None:
    small, large = reads(), reads()
    for now in range(10):
        small.step(now * 0.01, 16)
        large.step(now * 0.01, 256)
    assert small.steps_per_s == pytest.approx(100)
    for of in (small, large):
        price = seconds(of)
        assert price[0] == 0 and price == sorted(price)
        assert price[128] - price[127] > price[1] - price[0]
    assert seconds(large)[77] > 2 * seconds(small)[77]
    # 15 % of the experts, all of them read: 9 ms a layer.
    assert seconds(large)[77] < 77 * 6 * MIB / 51e9


def test_who_leaves_is_average_until_something_is_counted() -> None:
    unknown, ordered = reads(ordered=False), reads()
    for of in (unknown, ordered):
        of.step(0.0, 16)
    evenly = 1 - (1 - 10 / 512) ** 24  # steps of 16 to 31 tokens
    assert seconds(unknown)[128] == pytest.approx(128 * evenly * 6 * MIB / 51e9)
    assert seconds(ordered)[128] < 0.7 * seconds(unknown)[128]
    for of in (unknown, ordered):
        of.counted([0.1 * level for level in range(129)], steps=50)
    assert seconds(unknown) == seconds(ordered)


def test_what_a_layer_hides_is_free() -> None:
    of = reads()
    of.step(0.0, 16)
    assert seconds(of, hidden_s=1.0) == [0.0] * 129
    assert seconds(of, hidden_s=1e-3)[128] == pytest.approx(seconds(of)[128] - 1e-3)


def test_counts_take_over_from_the_prior() -> None:
    of = reads(max_level=4)
    of.step(0.0, 16)
    prior = seconds(of)
    of.counted([0.0] * 5, steps=100)
    assert seconds(of) == pytest.approx([price / 2 for price in prior])
    for _ in range(200):
        of.counted([0.0, 1.0, 2.0, 3.0, 4.0], steps=10_000)
    most = [level * 6 * MIB / 51e9 for level in range(5)]
    assert seconds(of) == pytest.approx(most, rel=0.05)
    assert all(price <= bound for price, bound in zip(seconds(of), most, strict=True))


def test_an_idle_engine_takes_no_long_steps() -> None:
    of = reads()
    for start in (0.0, 1000.0, 2000.0):
        for step in range(10):
            of.step(start + step * 0.02, 16)
    assert of.steps_per_s == pytest.approx(50)
    of.step(2001.0, 0)
    of.step(2001.0 + LONGEST_STEP_S / 2, 16)
    assert of.steps_per_s == pytest.approx(50), "an empty step ends the count"


def test_groups_are_read_by_any_of_their_experts() -> None:
    single = prior_by_level(512, 1, 8, 10, 0.6, 16.0)
    paired = prior_by_level(512, 2, 4, 10, 0.6, 16.0)
    assert paired == pytest.approx(single[::2])


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 20_000), max_size=40),
    st.lists(st.tuples(st.floats(0, 600), st.integers(1, 512)), max_size=10),
)
def test_prices_stay_between_nothing_and_everything(
    tokens: list[int], counts: list[tuple[float, int]]
) -> None:
    of = reads(max_level=8)
    for now, size in enumerate(tokens):
        of.step(now * 0.01, size)
    for read, steps in counts:
        of.counted([min(read, float(level)) for level in range(9)], steps)
    price = seconds(of)
    assert all(0 <= at <= level * 6 * MIB / 51e9 * (1 + 1e-9) for level, at in enumerate(price))
