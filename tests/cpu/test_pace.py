"""When a prefill step may follow another while experts are out of HBM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_runtime.policy.pace import LEAST_READ_S, MOST_TOGETHER, PATIENCE, PrefillPace, longest_prompt


def test_time_passes_between_two_prefill_steps() -> None:
    pace, others = PrefillPace(0.5), {"read_s": 0.3, "waiting": 2, "waited_s": 0.1, "decoding": 4}
    assert not pace.hold(10.0, **others), "the first one need not wait"
    pace.prefilled(10.0)
    assert pace.hold(10.01, **others) and pace.hold(10.59, **others)
    assert not pace.hold(10.61, **others)
    assert pace.held_steps == 2 and pace.since(10.5) == pytest.approx(0.5)


def test_who_has_waited_for_long_is_not_held() -> None:
    """Long: as the prefill would stop those who decode, several times over."""
    pace = PrefillPace(0.1)
    pace.prefilled(10.0)
    bound = PATIENCE * 4**2 * 0.3
    assert pace.hold(10.1, 0.3, waiting=3, waited_s=0.99 * bound, decoding=4)
    assert not pace.hold(10.1, 0.3, waiting=3, waited_s=bound, decoding=4)
    assert not pace.hold(10.1, 0.3, waiting=1, waited_s=0.0, decoding=0), "nobody would be stopped"


@pytest.mark.parametrize(
    ("share", "read_s", "waiting"),
    [(1.0, 0.3, 1), (0.5, 0.9 * LEAST_READ_S, 1), (0.5, 0.0, 1), (0.5, 0.3, 0)],
    ids=["share 1", "a short read", "level 0", "nobody waits"],
)
def test_nothing_is_held_for_nothing(share: float, read_s: float, waiting: int) -> None:
    pace = PrefillPace(share)
    pace.prefilled(10.0)
    assert not pace.hold(10.0, read_s, waiting, waited_s=0.0, decoding=9) and pace.held_steps == 0


@given(
    st.floats(0.05, 0.99), st.lists(st.floats(0.001, 0.2), min_size=50, max_size=200), st.floats(0.02, 0.4)
)
def test_prefill_steps_keep_to_their_share(share: float, steps: list[float], read_s: float) -> None:
    """Whatever lies between: a step with prefills takes ``read_s``, any other its own time."""
    pace, now, reading = PrefillPace(share), 0.0, 0.0
    for other_s in steps:
        if pace.hold(now, read_s, waiting=1, waited_s=0.0, decoding=1):
            now += other_s
        else:
            pace.prefilled(now)
            now, reading = now + read_s, reading + read_s
    assert reading <= share * now + read_s + 1e-9


def test_a_long_prompt_leaves_room_for_the_others() -> None:
    assert longest_prompt(8192, [9000], 544) == longest_prompt(8192, [], 544) == 0, "nobody to leave room for"
    assert longest_prompt(8192, [4000, 4000], 544) == 0, "there is room for all"
    assert longest_prompt(8192, [9000, 9000], 544) == 7 * 544
    assert longest_prompt(8192, [9000, 600, 600], 544) == 12 * 544, "what the short ones leave"
    assert longest_prompt(8192, [9000] * 4, 544) == 3 * 544
    assert longest_prompt(8192, [9000] * 8, 544) == longest_prompt(8192, [9000] * 100, 544) == 544
    assert longest_prompt(1024, [900] * 9, 544) == 544, "a hybrid model's chunk is a block at least"


@given(
    st.integers(1, 1 << 16),
    st.lists(st.integers(1, 1 << 16), min_size=2, max_size=300),
    st.integers(1, 2048),
)
def test_all_fit_and_fill_the_step(budget: int, lengths: list[int], block: int) -> None:
    most = longest_prompt(budget, lengths, block)
    if not most:
        assert sum(lengths) <= budget
        return
    assert most % block == 0
    least = max(budget // MOST_TOGETHER // block, 1) * block
    assert most >= least > 0
    if most > least:
        assert sum(min(length, most) for length in lengths) <= budget
    if most + block <= budget:
        assert sum(min(length, most + block) for length in lengths) > budget - len(lengths)
