"""Moves beside running steps: what each half does on which thread, and what becomes of failures."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.boundary_suite import EVERY_CALL, MAPPING, OFFLOAD, RESTORE, SWAP, move, reverse_coldness
from support.faulty import FaultyDriver
from support.rigs import BARE, RECORDS, STRICT, Rig, Shape, build_rig

from vamp_runtime.errors import StateLost
from vamp_runtime.memory import mover as mover_module
from vamp_runtime.memory.boundary import MoveKind, MoveState, Outcome
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.mover import Mover

PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class GatedDriver(FaultyDriver):
    """Lets the work before a mark end when ``gate`` opens."""

    def __init__(self, inner: HostDriver) -> None:
        super().__init__(inner, calls=())
        self.gate = threading.Event()
        self.gate.set()
        self.moved_on: set[int] = set()
        self.may_map = threading.Event()
        self.may_map.set()
        self.mapping = threading.Event()

    def wait(self, mark: object) -> None:
        assert self.gate.wait(20.0)
        self.inner.wait(mark)

    def unmap(self, address: int, nbytes: int) -> None:
        self.moved_on.add(threading.get_ident())
        self.called("unmap")(address, nbytes)

    def map(self, address: int, *handles: int) -> None:
        self.mapping.set()
        assert self.may_map.wait(20.0)
        self.called("map")(address, *handles)

    def called(self, name: str) -> Callable[..., Any]:
        found = getattr(self.inner, name)
        return self._counting(name, found) if name in self.counted else found


@contextmanager
def open_mover(
    beside: bool = True, shape: Shape = RECORDS
) -> Iterator[tuple[Rig, GatedDriver, Mover, list[list[list[int]]]]]:
    """A mover over a small rig; the list gets a copy of the slot table each time it goes to the device."""
    inner = HostDriver(4096)
    driver = GatedDriver(inner)
    rig = build_rig(driver, shape)
    driver.moved_on.clear()
    driver.mapping.clear()
    tables: list[list[list[int]]] = []

    def keep() -> None:
        tables.append(rig.table)

    mover = Mover(rig.boundary, keep, lambda: tables.append([]), driver.bind_thread, beside)
    yield rig, driver, mover, tables
    if not mover.busy:  # one that has lost the state stays so
        mover.close()
    rig.close()
    inner.close()


def done(mover: Mover) -> Outcome | None:
    """The outcome of the move under way, and nothing else under way."""
    outcome = mover.finish(wait=True)
    mover.rest()
    return outcome


def test_steps_go_on_between_redirect_and_publish() -> None:
    with open_mover() as (rig, driver, mover, tables):
        before = rig.table
        driver.gate.clear()
        mover.start(move(rig.boundary, OFFLOAD, 2))
        assert mover.busy and mover.finish() is None
        assert rig.boundary.state is not MoveState.IDLE and not driver.moved_on
        assert len(tables) == 1 and tables[0] != before, "the device must read homes before pages move"
        driver.gate.set()
        outcome = done(mover)
        assert outcome is not None and outcome.ok and outcome.level == 2
        assert driver.moved_on and threading.get_ident() not in driver.moved_on
        assert len(tables) == 1 and not mover.busy and mover.finish() is None
        rig.moved(outcome)
        rig.check()


def test_experts_are_read_at_home_until_a_restore_is_published() -> None:
    with open_mover() as (rig, _, mover, tables):
        mover.start(move(rig.boundary, OFFLOAD, 1))
        rig.moved(done(mover))
        out = rig.table
        tables.clear()
        mover.start(move(rig.boundary, RESTORE, 1, rig.region.claimed))
        assert not tables and rig.table == out
        outcome = done(mover)
        assert outcome is not None and outcome.ok and outcome.level == 0
        assert len(tables) == 1 and tables[0] != out
        rig.moved(outcome)
        rig.check()


def test_a_swap_changes_the_table_before_pages_move_and_when_it_is_published() -> None:
    with open_mover() as (rig, driver, mover, tables):
        mover.start(move(rig.boundary, OFFLOAD, 1))
        rig.moved(done(mover))
        tables.clear()
        driver.gate.clear()
        asked = move(rig.boundary, SWAP, 0)
        mover.start(asked)
        (redirected,) = tables
        for swap in asked.swaps:
            both = rig.slab.experts_of(swap.layer, swap.leaving) + rig.slab.experts_of(
                swap.layer, swap.returning
            )
            assert min(redirected[swap.layer][expert] for expert in both) >= rig.geometry.home_slot_base
        driver.gate.set()
        rig.moved(done(mover))
        assert len(tables) == 2 and tables[1] == rig.table
        for swap in asked.swaps:
            back = rig.slab.experts_of(swap.layer, swap.returning)
            assert all(tables[1][swap.layer][e] == rig.slab.record(swap.layer, e) for e in back)
        rig.check()


def test_without_a_slot_table_the_move_is_done_at_once() -> None:
    with open_mover(beside=False) as (rig, driver, mover, tables):
        mover.start(move(rig.boundary, OFFLOAD, 1))
        assert driver.moved_on == {threading.get_ident()} and mover.busy
        outcome = mover.finish()
        assert outcome is not None and outcome.ok and not mover.busy and tables == [rig.table]
        rig.moved(outcome)
        rig.check()


@pytest.mark.parametrize("kind", list(MoveKind), ids=lambda kind: kind.value)
def test_every_refused_call_is_undone_and_the_next_move_works(kind: MoveKind) -> None:
    with open_mover() as (rig, driver, mover, tables):
        mover.start(move(rig.boundary, OFFLOAD, 1))
        rig.moved(done(mover))
        before, calls = rig.snapshot(), 0
        driver.counted = EVERY_CALL - {"mark", "wait"}
        while True:
            calls += 1
            driver.arm(calls)
            mover.start(move(rig.boundary, kind, 1))
            outcome = done(mover)
            driver.arm(0)
            assert outcome is not None
            if outcome.ok:
                break
            assert "refused on purpose" in outcome.reason and rig.snapshot() == before
            assert tables[-1] == rig.table
        assert calls > 5
        rig.moved(outcome)
        rig.check()


def test_what_would_leave_next_is_covered_beside_the_steps() -> None:
    with open_mover(shape=BARE) as (rig, driver, mover, _):
        driver.counted = MAPPING
        for kind in (OFFLOAD, RESTORE, OFFLOAD, OFFLOAD):
            driver.arm(0)
            mover.start(move(rig.boundary, kind, 1))
            outcome = mover.finish(wait=True)
            mover.rest()
            assert not mover.covering
            rig.moved(outcome)
            levels = rig.geometry.max_level - rig.slab.level
            assert len(rig.region.covered) == levels * rig.geometry.pages_per_level
            # The first growth, which nothing was covered for, and its covering; after it no call.
            assert bool(driver.log) is (rig.boundary.epoch == 1)


def test_only_as_much_is_covered_as_a_growth_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "AHEAD_BYTES", 1)
    with open_mover(shape=BARE) as (rig, _, mover, _):
        mover.cover()
        mover.rest()
        assert len(rig.region.covered) == rig.geometry.pages_per_level
        rig.check()


def test_coldness_that_changes_is_followed() -> None:
    with open_mover(shape=BARE) as (rig, driver, mover, _):
        mover.cover()
        mover.rest()
        before = rig.region.covered
        with mover.paused():
            assert not mover.covering
            reverse_coldness(rig)
            rig.slab.refresh_homes(1 << 40)
        mover.rest()
        assert rig.region.covered.keys() == before.keys() and rig.region.covered != before
        driver.counted = MAPPING
        driver.arm(0)
        mover.start(move(rig.boundary, OFFLOAD, 3))
        assert mover.finish(wait=True).ok and not driver.log
        mover.rest()
        rig.check()


def test_a_move_waits_for_no_more_than_the_slice_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "PAUSE_S", 20.0)
    with open_mover(shape=BARE) as (rig, driver, mover, _):
        driver.may_map.clear()
        mover.cover()
        assert driver.mapping.wait(20.0) and mover.covering
        threading.Timer(0.05, driver.may_map.set).start()
        begin = time.monotonic()
        mover.start(move(rig.boundary, OFFLOAD, 1))
        assert driver.may_map.is_set(), "the driver was the thread's until its slice was done"
        outcome = mover.finish(wait=True)
        assert time.monotonic() - begin < 10.0, "nobody waits for the pauses between slices"
        assert outcome is not None and outcome.ok
        with mover.paused():
            assert len(rig.region.covered) < 2 * rig.geometry.pages_per_level
            rig.moved(outcome)


def test_a_refusal_ends_covering_until_the_next_move(capsys: Any) -> None:
    with open_mover(shape=BARE) as (rig, driver, mover, _):
        driver.counted = frozenset({"map"})
        driver.arm(2)
        mover.cover()
        mover.rest()
        assert capsys.readouterr().err.count("DriverError: map: refused on purpose") == 1
        covered = rig.region.covered
        assert 0 < len(covered) < rig.geometry.max_level * rig.geometry.pages_per_level
        for _ in range(2):
            mover.cover()
            with mover.paused():
                rig.check()
        mover.rest()
        assert rig.region.covered == covered and not mover.covering and not capsys.readouterr().err
        mover.start(move(rig.boundary, OFFLOAD, 1))
        outcome = mover.finish(wait=True)
        mover.rest()
        rig.moved(outcome)
        assert len(rig.region.covered) == 2 * rig.geometry.pages_per_level


def test_state_lost_while_covering_ends_the_process(capsys: Any) -> None:
    with open_mover(shape=BARE) as (_, driver, mover, tables):

        def lost(*args: Any) -> None:
            raise StateLost("on purpose")

        driver.map = lost
        mover.cover()
        with pytest.raises(StateLost, match="on purpose"):
            mover.rest()
        assert tables == [[]], "the process was to be ended"
        assert "StateLost: on purpose" in capsys.readouterr().err
        mover._covering = None


def test_a_strict_boundary_is_cleared_instead() -> None:
    with open_mover(shape=STRICT) as (rig, _, mover, _):
        for kind in (OFFLOAD, RESTORE):
            mover.start(move(rig.boundary, kind, 1))
            outcome = mover.finish(wait=True)
            mover.rest()
            assert not rig.strays()
            rig.moved(outcome)


def test_nothing_is_covered_where_moves_hold_steps_up() -> None:
    with open_mover(beside=False) as (rig, _, mover, _):
        mover.start(move(rig.boundary, OFFLOAD, 1))
        assert mover.finish().ok
        with mover.paused():
            assert not mover.covering
        mover.cover()
        assert not mover.covering and not rig.region.covered
        mover.rest()


ENDS_IN_A_MOVE = """
import concurrent.futures.thread as pools, time
from support.boundary_suite import OFFLOAD, move
from support.rigs import BARE, build_rig
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.mover import Mover

driver = HostDriver(4096)
rig = build_rig(driver, BARE)


def until_the_end(mark):
    while not pools._shutdown:
        time.sleep(0.01)


driver.wait = until_the_end
Mover(rig.boundary, lambda: None, lambda: print("lost")).start(move(rig.boundary, OFFLOAD, 1))
"""


def test_a_program_may_end_while_pages_move() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_IN_A_MOVE], capture_output=True, text=True, env=PATHS, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_refusal_is_an_outcome() -> None:
    with open_mover() as (rig, _, mover, tables):
        mover.start(move(rig.boundary, RESTORE, 1))
        outcome = done(mover)
        assert outcome is not None and not outcome.ok and "from level 0" in outcome.reason
        assert tables[-1] == rig.table
        rig.check()


def test_what_cannot_be_undone_ends_the_process_from_the_thread(capsys: Any) -> None:
    with open_mover() as (rig, driver, mover, tables):

        def lost() -> bool:
            raise StateLost("on purpose")

        rig.boundary.agree = lost  # type: ignore[method-assign]
        mover.start(move(rig.boundary, OFFLOAD, 1))
        with pytest.raises(StateLost, match="on purpose"):
            mover.finish(wait=True)
        assert tables[-1] == [], "the process was to be ended"
        assert "StateLost: on purpose" in capsys.readouterr().err
        rig.boundary.abandon()
        assert driver.inner.usage().handles
