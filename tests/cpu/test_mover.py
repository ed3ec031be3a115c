"""Moves beside running steps: what each half does on which thread, and what becomes of failures."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.boundary_suite import EVERY_CALL, OFFLOAD, RESTORE, SWAP, move
from support.faulty import FaultyDriver
from support.rigs import BARE, RECORDS, Rig, Shape, build_rig

from vamp_runtime.errors import StateLost
from vamp_runtime.memory.boundary import MoveKind, MoveState
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.mover import Mover

PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class GatedDriver(FaultyDriver):
    """Lets the work before a mark end when ``gate`` opens."""

    def __init__(self, inner: HostDriver) -> None:
        super().__init__(inner, calls=())
        self.gate = threading.Event()
        self.gate.set()
        self.may_unmap = threading.Event()
        self.may_unmap.set()
        self.moved_on: set[int] = set()

    def wait(self, mark: object) -> None:
        assert self.gate.wait(20.0)
        self.inner.wait(mark)

    def unmap(self, address: int, nbytes: int) -> None:
        self.moved_on.add(threading.get_ident())
        assert self.may_unmap.wait(20.0)
        self._counting("unmap", self.inner.unmap)(address, nbytes)


@contextmanager
def open_mover(
    beside: bool = True, shape: Shape = RECORDS
) -> Iterator[tuple[Rig, GatedDriver, Mover, list[list[list[int]]]]]:
    """A mover over a small rig; the list gets a copy of the slot table each time it goes to the device."""
    inner = HostDriver(4096)
    driver = GatedDriver(inner)
    rig = build_rig(driver, shape)
    tables: list[list[list[int]]] = []

    def keep() -> None:
        tables.append(rig.table)

    mover = Mover(rig.boundary, keep, lambda: tables.append([]), driver.bind_thread, beside)
    yield rig, driver, mover, tables
    if not mover.busy:  # one that has lost the state stays so
        mover.close()
    rig.close()
    inner.close()


def test_steps_go_on_between_redirect_and_publish() -> None:
    with open_mover() as (rig, driver, mover, tables):
        before = rig.table
        driver.gate.clear()
        mover.start(move(rig.boundary, OFFLOAD, 2))
        assert mover.busy and mover.finish() is None
        assert rig.boundary.state is not MoveState.IDLE and not driver.moved_on
        assert len(tables) == 1 and tables[0] != before, "the device must read homes before pages move"
        driver.gate.set()
        outcome = mover.finish(wait=True)
        assert outcome is not None and outcome.ok and outcome.level == 2
        assert driver.moved_on and threading.get_ident() not in driver.moved_on
        assert len(tables) == 1 and not mover.busy and mover.finish() is None
        rig.moved(outcome)
        rig.check()


def test_experts_are_read_at_home_until_a_restore_is_published() -> None:
    with open_mover() as (rig, _, mover, tables):
        mover.start(move(rig.boundary, OFFLOAD, 1))
        rig.moved(mover.finish(wait=True))
        out = rig.table
        tables.clear()
        mover.start(move(rig.boundary, RESTORE, 1, rig.region.claimed))
        assert not tables and rig.table == out
        outcome = mover.finish(wait=True)
        assert outcome is not None and outcome.ok and outcome.level == 0
        assert len(tables) == 1 and tables[0] != out
        rig.moved(outcome)
        rig.check()


def test_a_swap_changes_the_table_before_pages_move_and_when_it_is_published() -> None:
    with open_mover() as (rig, driver, mover, tables):
        mover.start(move(rig.boundary, OFFLOAD, 1))
        rig.moved(mover.finish(wait=True))
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
        rig.moved(mover.finish(wait=True))
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
        rig.moved(mover.finish(wait=True))
        before, calls = rig.snapshot(), 0
        driver.counted = EVERY_CALL - {"mark", "wait"}
        while True:
            calls += 1
            driver.arm(calls)
            mover.start(move(rig.boundary, kind, 1))
            outcome = mover.finish(wait=True)
            driver.arm(0)
            assert outcome is not None
            if outcome.ok:
                break
            assert "refused on purpose" in outcome.reason and rig.snapshot() == before
            assert tables[-1] == rig.table
        assert calls > 5
        rig.moved(outcome)
        rig.check()


def test_a_growth_is_over_before_its_pages_are_unmapped_where_they_were() -> None:
    with open_mover(shape=BARE) as (rig, driver, mover, _):
        driver.may_unmap.clear()
        mover.start(move(rig.boundary, OFFLOAD, 1))
        outcome = mover.finish(wait=True)
        assert outcome is not None and outcome.ok and outcome.level == 1 and not mover.busy
        mover.start(move(rig.boundary, SWAP, 0))
        assert mover.busy and mover.finish() is None, "the next move lays pages behind those addresses"
        driver.may_unmap.set()
        outcome = mover.finish(wait=True)
        mover.rest()
        rig.moved(outcome)
        rig.check()


def test_pages_left_where_they_were_by_a_refusal_go_before_the_next_move(capsys: Any) -> None:
    with open_mover(shape=BARE) as (rig, driver, mover, _):
        driver.counted = frozenset({"unmap"})
        driver.arm(2)
        for kind in (OFFLOAD, RESTORE):
            mover.start(move(rig.boundary, kind, 1))
            outcome = mover.finish(wait=True)
            mover.rest()
            rig.moved(outcome)
        assert "refused on purpose" in capsys.readouterr().err
        rig.check()


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
        outcome = mover.finish(wait=True)
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
