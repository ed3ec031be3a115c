"""When a prefill step may follow another while experts are out of HBM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_runtime.policy.pace import LEAST_READ_S, MOST_TOGETHER, PrefillPace, longest_prompt


def test_as_long_again_passes_between_two_prefill_steps() -> None:
    pace = PrefillPace(0.5)
    assert not pace.hold(10.0, read_s=0.3, waiting=True), "the first one need not wait"
    pace.prefilled(10.0)
    assert pace.hold(10.01, read_s=0.3, waiting=True) and pace.hold(10.59, read_s=0.3, waiting=True)
    assert not pace.hold(10.61, read_s=0.3, waiting=True)
    assert pace.held_steps == 2


@pytest.mark.parametrize(
    ("share", "read_s", "waiting"),
    [(1.0, 0.3, True), (0.5, 0.9 * LEAST_READ_S, True), (0.5, 0.0, True), (0.5, 0.3, False)],
    ids=["share 1", "a short read", "level 0", "nobody waits"],
)
def test_nothing_is_held_for_nothing(share: float, read_s: float, waiting: bool) -> None:
    pace = PrefillPace(share)
    pace.prefilled(10.0)
    assert not pace.hold(10.0, read_s, waiting) and pace.held_steps == 0


@given(
    st.floats(0.05, 0.99), st.lists(st.floats(0.001, 0.2), min_size=50, max_size=200), st.floats(0.02, 0.4)
)
def test_prefill_steps_keep_to_their_share(share: float, steps: list[float], read_s: float) -> None:
    """Whatever lies between: a step with prefills takes ``read_s``, any other its own time."""
    pace, now, reading = PrefillPace(share), 0.0, 0.0
    for other_s in steps:
        if pace.hold(now, read_s, waiting=True):
            now += other_s
        else:
            pace.prefilled(now)
            now, reading = now + read_s, reading + read_s
    assert reading <= share * now + read_s + 1e-9


def test_a_long_prompt_leaves_room_for_the_others() -> None:
    assert longest_prompt(8192, 1, 544) == longest_prompt(8192, 0, 544) == 0, "nobody to leave room for"
    assert longest_prompt(8192, 2, 544) == 7 * 544
    assert longest_prompt(8192, 4, 544) == longest_prompt(8192, 100, 544) == 3 * 544
    assert longest_prompt(1024, 9, 544) == 544, "a hybrid model's chunk is a block at least"


@given(st.integers(1, 1 << 16), st.integers(2, 300), st.integers(1, 2048))
def test_what_is_left_is_enough_for_as_many(budget: int, prompts: int, block: int) -> None:
    most, share = longest_prompt(budget, prompts, block), budget // min(prompts, MOST_TOGETHER)
    assert most % block == 0 and most > 0
    assert most <= share < most + block or most == block > share
