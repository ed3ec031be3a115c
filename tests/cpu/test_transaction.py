from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_runtime.errors import DriverError, StateLost
from vamp_runtime.memory.transaction import Transaction


def fail(name: str) -> None:
    raise DriverError(name, "refused")


def test_commit_keeps_every_step() -> None:
    undone: list[int] = []
    with Transaction() as tx:
        assert tx.do(lambda: "result", lambda: undone.append(0)) == "result"
        tx.on_undo(lambda: undone.append(1))
        tx.commit()
    assert undone == []


def test_leaving_without_commit_undoes_in_reverse() -> None:
    undone: list[int] = []
    with Transaction() as tx:
        for step in range(3):
            tx.do(lambda: None, lambda step=step: undone.append(step))
    assert undone == [2, 1, 0]


def test_steps_after_a_commit_are_undone_alone() -> None:
    undone: list[str] = []
    with pytest.raises(DriverError), Transaction() as tx:
        tx.on_undo(lambda: undone.append("before"))
        tx.commit()
        tx.on_undo(lambda: undone.append("after"))
        fail("map")
    assert undone == ["after"]


def test_an_action_that_raises_registers_nothing() -> None:
    undone: list[str] = []
    with pytest.raises(DriverError, match="map: refused"), Transaction() as tx:
        tx.do(lambda: None, lambda: undone.append("first"))
        tx.do(lambda: fail("map"), lambda: undone.append("second"))
    assert undone == ["first"]


@given(st.lists(st.booleans(), min_size=1), st.booleans())
def test_every_undo_is_attempted(fails: list[bool], by_exception: bool) -> None:
    tried: list[int] = []

    def undo(step: int) -> None:
        tried.append(step)
        if fails[step]:
            fail(f"undo {step}")

    expected = StateLost if any(fails) else DriverError if by_exception else None
    caught: BaseException | None = None
    try:
        with Transaction() as tx:
            for step in range(len(fails)):
                tx.on_undo(lambda step=step: undo(step))
            if by_exception:
                fail("map")
    except (DriverError, StateLost) as error:
        caught = error
    assert type(caught) is (expected or type(None))
    assert tried == list(reversed(range(len(fails))))
    if any(fails):
        first = max(step for step, failed in enumerate(fails) if failed)
        assert isinstance(caught, StateLost) and str(caught.__cause__) == f"undo {first}: refused"
        assert str(caught).startswith(f"{sum(fails)} undo")
