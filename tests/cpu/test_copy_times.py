"""Sampled times of staging copies: what is added up, and when it may be read."""

from __future__ import annotations

from typing import Any

import pytest

from vamp_runtime.memory import copy_times
from vamp_runtime.memory.copy_times import SAMPLED, CopyTimes, StagingSeconds


class Event:
    """An event of a device whose clock and progress the test sets; a stream is the time it has reached."""

    over = True

    def record(self, stream: Any) -> None:
        self.at = stream

    def query(self) -> bool:
        return Event.over

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> CopyTimes:
    monkeypatch.setattr(copy_times, "_event", Event)
    Event.over = True
    return CopyTimes(layers=2)


def step(times: CopyTimes, copy_ms: float, wait_ms: float) -> None:
    times.begin_step()
    for layer in range(2):
        start = 100.0 * layer
        times.copying(layer, start, done=False)  # type: ignore[arg-type]
        times.copying(layer, start + copy_ms, done=True)  # type: ignore[arg-type]
        times.waiting(layer, start, done=False)  # type: ignore[arg-type]
        times.waiting(layer, start + wait_ms, done=True)  # type: ignore[arg-type]


def test_one_step_of_several_stands_for_all(times: CopyTimes) -> None:
    assert times.seconds == StagingSeconds()
    for _ in range(SAMPLED + 1):
        step(times, 10.0, 4.0)
    times.begin_step()  # folds the second sample in
    hidden, exposed = times.seconds.hidden, times.seconds.exposed
    assert exposed == pytest.approx(2 * 4e-3 * (SAMPLED + 1))
    assert hidden == pytest.approx(2 * 6e-3 * (SAMPLED + 1))


def test_a_wait_beyond_the_copies_hides_nothing(times: CopyTimes) -> None:
    """The layer may wait for copies of other layers, which the stream takes in order."""
    step(times, 1.0, 5.0)
    times.begin_step()
    assert times.seconds.hidden == 0.0 and times.seconds.exposed == pytest.approx(2 * 5e-3)


def test_a_sample_still_on_its_way_is_not_read_and_not_overwritten(times: CopyTimes) -> None:
    step(times, 10.0, 4.0)
    Event.over = False
    for _ in range(2 * SAMPLED):
        step(times, 1000.0, 1000.0)
    assert times.seconds == StagingSeconds()
    Event.over = True
    times.begin_step()
    assert times.seconds.exposed == pytest.approx(2 * 4e-3 * (2 * SAMPLED + 1))


def test_sums_never_fall(times: CopyTimes) -> None:
    """They are counters: a cheap sample after a dear one must not take back what was counted."""
    before = times.seconds
    for index in range(10 * SAMPLED):
        step(times, *((10.0, 4.0) if index < 3 * SAMPLED else (1.0, 0.0)))
        now = times.seconds
        assert now.hidden >= before.hidden and now.exposed >= before.exposed
        before = now
    assert before.hidden > 0 and before.exposed > 0
