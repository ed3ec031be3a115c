"""Which groups are swapped: worth it, within the budget, and never back and forth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_runtime.memory.move import Swap
from vamp_runtime.policy.reselect import (
    BURST_S,
    DECAY,
    MARGIN,
    Allowance,
    Candidate,
    DecayedUse,
    best_swap,
    choose_swaps,
    coldest_first,
)

GROUP = 6 << 20


def test_counts_become_use_of_groups_and_fade() -> None:
    use = DecayedUse([[0, 1, 0], [1, 1, 0]], groups=2)
    assert use.update([[1, 2, 3], [0, 0, 0]]) == [[4, 2], [0, 0]]
    assert use.update([[1, 2, 3], [5, 1, 0]]) == [[4 * DECAY, 2 * DECAY], [0, 6]]
    assert use.update([[0, 0, 1], [5, 1, 0]])[0] == pytest.approx([4 * DECAY**2 + 1, 2 * DECAY**2])


def test_the_coldest_come_first_and_ties_from_the_end() -> None:
    assert coldest_first([3.0, 1.0, 1.0, 0.0], movable=3) == [2, 1, 0]


@pytest.mark.parametrize(
    ("use", "swap"),
    [
        ([1000.0, 10.0, 500.0, 50.0], Swap(2, leaving=1, returning=2)),
        ([1000.0, 495.0, 500.0, 50.0], None),  # within the margin
        ([1000.0, 0.0, 9.0, 1.0], None),  # within what chance does
        ([1000.0, 0.0, 10.0, 1.0], Swap(2, leaving=1, returning=2)),
        ([0.0, 0.0, 0.0, 0.0], None),
    ],
)
def test_the_warmest_that_is_out_replaces_the_coldest_that_is_in(use: list[float], swap: Swap | None) -> None:
    found = best_swap(2, use, out=(2, 3), ready=(1, 0))
    assert (found and found.swap) == swap
    assert found is None or found.gain == use[2] - use[1]


def test_no_swap_without_a_group_on_either_side() -> None:
    assert best_swap(0, [0.0, 99.0], out=(), ready=(0, 1)) is None
    assert best_swap(0, [0.0, 99.0], out=(1,), ready=()) is None


@given(st.lists(st.floats(0, 1e6), min_size=6, max_size=6))
def test_a_swap_is_never_taken_back_on_the_same_counts(use: list[float]) -> None:
    out, ready = {0, 1, 2}, {3, 4, 5}
    for _ in range(6):
        found = best_swap(0, use, out, ready)
        if found is None:
            return
        swap = found.swap
        assert use[swap.returning] > (1 + MARGIN) * use[swap.leaving] and found.gain > 0
        out, ready = out ^ {swap.leaving, swap.returning}, ready ^ {swap.leaving, swap.returning}
    raise AssertionError("more swaps than groups that are out")


def test_chance_alone_swaps_about_nothing_and_a_new_domain_does() -> None:
    """64 groups of one layer, 16 out, a look every 2000 selections; then the popularity is another."""
    draw = np.random.default_rng(5)
    first, second = (np.exp(0.6 * draw.standard_normal(64)) for _ in range(2))
    use, hits = DecayedUse([list(range(64))], groups=64), np.zeros(64, dtype=np.int64)
    out, ready = set(coldest_first(list(first), 64)[:16]), set(coldest_first(list(first), 64)[16:])
    swaps = {"same": 0, "other": 0}
    for look in range(120):
        popularity = first if look < 60 else second
        hits = hits + draw.multinomial(2000, popularity / popularity.sum())
        (row,) = use.update([[int(count) for count in hits]])
        found = best_swap(0, row, out, ready)
        if found is not None and look >= 10:
            swap = found.swap
            out, ready = out ^ {swap.leaving, swap.returning}, ready ^ {swap.leaving, swap.returning}
            swaps["same" if look < 60 else "other"] += 1
    coldest = set(coldest_first(list(second), 64)[:16])
    assert swaps["same"] <= 2 and 6 <= swaps["other"] <= 25 and len(out & coldest) >= 11


def test_the_allowance_is_saved_up_to_a_burst_and_always_to_a_group() -> None:
    allowance = Allowance(2.0 * GROUP, at=100.0)
    assert allowance.later(100.25, GROUP).saved == GROUP / 2
    assert allowance.later(500.0, GROUP).saved == 2 * GROUP * BURST_S
    assert allowance.later(99.0, GROUP).saved == 0
    slow = Allowance(GROUP / 100, at=0.0)
    assert slow.later(50.0, GROUP).saved == GROUP / 2 and slow.later(1e6, GROUP).saved == GROUP
    assert allowance.later(101.0, GROUP).less(GROUP).saved == GROUP


def candidates(count: int) -> list[Candidate]:
    return [Candidate(Swap(layer, 0, 1), gain=float(layer)) for layer in range(count)]


@pytest.mark.parametrize(
    ("saved", "rate", "offered", "most", "taken"),
    [
        (9.0, 10, 3, 9, [2, 1, 0]),
        (9.0, 10, 3, 2, [2, 1]),
        (2.5, 10, 3, 9, []),  # soon there is enough for all three
        (2.5, 2.5, 3, 9, [2, 1]),  # never for more than two
        (0.5, 0.1, 3, 9, []),
        (1.0, 0.1, 3, 9, [2]),
        (9.0, 10, 0, 9, []),
    ],
)
def test_the_largest_gains_go_first_within_the_allowance(
    saved: float, rate: float, offered: int, most: int, taken: list[int]
) -> None:
    allowance = Allowance(rate * GROUP, saved * GROUP)
    assert [swap.layer for swap in choose_swaps(candidates(offered), allowance, GROUP, most)] == taken


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 8)), max_size=40), st.floats(0.01, 20))
def test_over_any_time_the_rate_is_kept(steps: list[tuple[float, int]], rate: float) -> None:
    """Bytes swapped from the first look on are at most the rate times the time, and one burst or group."""
    allowance, now, nbytes = Allowance(rate * GROUP), 0.0, 0
    for wait, offered in steps:
        now += wait
        allowance = allowance.later(now, GROUP)
        swaps = choose_swaps(candidates(offered), allowance, GROUP, 9)
        allowance = allowance.less(len(swaps) * GROUP)
        nbytes += len(swaps) * GROUP
        assert nbytes <= rate * GROUP * now * (1 + 1e-9)
