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
    steady_order,
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
    ("before", "resident", "coldest", "order"),
    [
        ([0, 1, 2, 3, 4, 5], {0, 1, 2, 3, 4, 5}, [2, 1, 3, 0, 4, 5], [0, 1, 2, 3, 4, 5]),  # all near
        ([0, 1, 2, 3, 4, 5], {0, 1, 2, 3, 4, 5}, [2, 3, 1, 4, 0, 5], [2, 1, 3, 4, 0, 5]),  # 0 is not
        ([0, 1, 2, 3, 4, 5], {0, 1, 2, 3, 4, 5}, [5, 4, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0]),  # none is
        ([0, 1, 2, 3, 4, 5], {1, 3, 4, 5}, [2, 3, 1, 4, 0, 5], [2, 1, 3, 4, 0, 5]),  # 0 and 2 are out
        ([0, 1, 2, 3, 4, 5], {5}, [5, 4, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0]),
        ([0, 1], set(), [1, 0], [1, 0]),
    ],
)
def test_who_is_to_leave_next_stays_so_while_it_is_about_coldest(
    before: list[int], resident: set[int], coldest: list[int], order: list[int]
) -> None:
    assert steady_order(before, resident, coldest, front=2) == order
    assert steady_order(before, resident, coldest, front=0) == coldest


@given(st.permutations(range(9)), st.permutations(range(9)), st.sets(st.integers(0, 8)), st.integers(0, 9))
def test_a_steady_order_leaves_whoever_is_out_and_does_not_change_twice(
    before: list[int], coldest: list[int], resident: set[int], front: int
) -> None:
    order = steady_order(before, resident, coldest, front)
    assert sorted(order) == sorted(coldest)
    assert [g if g not in resident else -1 for g in order] == [
        g if g not in resident else -1 for g in coldest
    ]
    present = [group for group in coldest if group in resident]
    ordered = [group for group in order if group in resident]
    assert set(ordered[:front]) <= set(present[: 2 * front])
    assert steady_order(order, resident, coldest, front) == order


def test_chance_seldom_changes_who_is_to_leave_next() -> None:
    """512 groups, those that leave next chosen at each look of 80,000 selections."""
    draw, front = np.random.default_rng(7), 8
    popularity = np.exp(1.06 * draw.standard_normal(512))
    use, hits = DecayedUse([list(range(512))], groups=512), np.zeros(512, dtype=np.int64)
    everyone = steady = plain = list(range(512))
    changed = {"steady": 0, "plain": 0}
    for look in range(30):
        hits = hits + draw.multinomial(80_000, popularity / popularity.sum())
        (row,) = use.update([[int(count) for count in hits]])
        coldest = coldest_first(row, 512)
        order = steady_order(steady, everyone, coldest, front)
        if look >= 10:
            changed["steady"] += sum(a != b for a, b in zip(order[:front], steady[:front], strict=True))
            changed["plain"] += sum(a != b for a, b in zip(coldest[:front], plain[:front], strict=True))
        steady, plain = order, coldest
    assert changed["steady"] * 10 < changed["plain"]
    assert popularity[steady[:front]].sum() < 1.2 * np.sort(popularity)[:front].sum()


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
