"""What a worker does at the top of a step: a failure there ends the process, homes follow between moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vamp_integration import worker as module
from vamp_integration.worker import FIRST_LOOK_STEPS, MOST_STEPS_IN_FLIGHT, VampWorkerMixin, look_after
from vamp_runtime.errors import StateLost

pytestmark = pytest.mark.vllm


class _Engine:
    def execute_model(self, scheduler_output: Any) -> str:
        return "forward"


class _Worker(VampWorkerMixin, _Engine):  # type: ignore[misc]
    """Two ranks; looks at the counters every ``every`` steps, and notes when homes follow."""

    def __init__(self, mover: Any, every: int) -> None:
        self.parallel_config = SimpleNamespace(tensor_parallel_size=2)
        self.home_refresh_steps = every
        self._mover = mover
        self.followed: list[int] = []

    def _order_by_use(self) -> None:
        self._homes_due = True

    def _follow_coldest(self) -> None:
        self._homes_due = False
        self.followed.append(self._steps)

    def step(self) -> Any:
        return self.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))


class _Mover:
    def __init__(self) -> None:
        self.busy = False

    def finish(self, wait: bool) -> None:
        return None

    def paused(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()


class _Lost(_Mover):
    def finish(self, wait: bool) -> None:
        if wait:
            raise StateLost("an undo failed")


class _Ended(Exception):
    pass


def test_a_move_that_cannot_be_undone_ends_the_process_at_a_look_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        raise _Ended

    monkeypatch.setattr(module, "end_process", end)
    worker = _Worker(_Lost(), every=2)
    assert worker.step() == "forward"
    with pytest.raises(_Ended):
        worker.step()
    assert "an undo failed" in capsys.readouterr().err


def test_looks_come_early_at_first() -> None:
    looks = [0]
    while looks[-1] < 1500:
        looks.append(looks[-1] + look_after(looks[-1], 512))
    assert looks == [0, FIRST_LOOK_STEPS, 64, 128, 256, 512, 1024, 1536]
    assert look_after(0, 8) == look_after(8, 8) == look_after(1000, 8) == 8


def test_homes_follow_once_a_look_after_the_move_under_way_and_never_soon_after_each_other() -> None:
    worker = _Worker(_Mover(), every=32)
    for step in range(1, 100):
        worker._mover.busy = 32 <= step < 62  # type: ignore[misc]
        worker.step()
    assert worker.followed == [62, 62 + MOST_STEPS_IN_FLIGHT, 96]
