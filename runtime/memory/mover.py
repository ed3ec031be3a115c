"""Carries out moves, beside running steps where the kernel reads experts through the slot table."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from contextlib import contextmanager

from vamp_kernels.ranges import ranged
from vamp_runtime.errors import DriverError
from vamp_runtime.memory.boundary import Boundary, Move, MoveKind, Outcome

# A move whose pages are not mapped where they go yet gives the interpreter lock away in hundreds of driver
# calls. With the usual 5 ms it could wait so long each time that the thread of the steps is busy.
SWITCH_INTERVAL_S = 1e-4
# Covered ahead of the next growth, as many levels as hold this: more than a growth takes at a time.
AHEAD_BYTES = 1 << 30
# Between two slices of that. A slice holds up whoever calls the driver meanwhile: steps get most of the time.
PAUSE_S = 2e-3


class Mover:
    """One move at a time: request and redirect on the caller's thread, the rest on one of its own.

    Until ``finish`` has returned the outcome, slab, region and driver belong to that thread. After it the
    thread covers the KV tail ahead of the next growth, in slices with pauses, until it is done or a move is
    started; whoever else changes more than claims and coldness does so while ``paused``. Used by one thread,
    the one that launches steps.

    Args:
        slots_changed: brings the slot table to the device, ordered before the steps that are launched next.
        end_process: called where a move cannot be finished or undone; does not return.
        beside: the kernel reads every expert where the slot table says. Otherwise ``start`` does all of a
            move, since own addresses must not change under a step, and nothing is covered ahead.

    Attributes:
        ahead_levels: levels that are covered ahead, where there are so many.
        rested_at: when covering ended last, done or not, by ``time.monotonic``.
    """

    def __init__(
        self,
        boundary: Boundary,
        slots_changed: Callable[[], None],
        end_process: Callable[[], None],
        thread_begins: Callable[[], None] | None = None,
        beside: bool = True,
    ) -> None:
        self._boundary = boundary
        self._slots_changed = ranged("slot table")(slots_changed)
        self._end_process = end_process
        self._beside = beside
        self._thread = ThreadPoolExecutor(1, "vamp-mover", initializer=thread_begins)
        self._agreed: Future[bool] | None = None
        self._done: Outcome | None = None
        self._kind = MoveKind.OFFLOAD
        geometry = boundary.slab.geometry
        level_bytes = geometry.pages_per_level * geometry.page_bytes
        self.ahead_levels = -(-AHEAD_BYTES // level_bytes) if beside else 0
        self._covering: Future[None] | None = None
        self._stop = threading.Event()
        self._refused = False
        self.rested_at = time.monotonic()
        self._usual_switch_s = sys.getswitchinterval()

    @property
    def busy(self) -> bool:
        """Whether a move has been started whose outcome has not been taken."""
        return self._agreed is not None or self._done is not None

    @property
    def covering(self) -> bool:
        """Whether the thread covers the tail, or is about to."""
        return self._covering is not None and not self._covering.done()

    def start(self, move: Move) -> None:
        """Begin a move. Beside steps it is under way when this returns, else done."""
        assert not self.busy
        if not self._beside:
            self._done = self._boundary.run(move)
            self._slots_changed()
            return
        self._pause()
        self._refused = False
        self._kind = move.kind
        self._boundary.request(move)
        self._boundary.redirect()
        if move.kind is not MoveKind.RESTORE:
            self._slots_changed()
        # Here, not there: a thread that waits for the lock already waits as long as was usual when it began.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._agreed = self._thread.submit(self._prepare)

    def finish(self, wait: bool = False) -> Outcome | None:
        """The outcome, once; ``None`` where no move has ended. Publishes, or undoes what was refused."""
        if self._agreed is not None and (wait or self._agreed.done()):
            agreed, self._agreed = self._agreed.result(), None
            self._done = self._boundary.publish() if agreed else self._boundary.abandon()
            if not (agreed and self._kind is MoveKind.OFFLOAD):
                self._slots_changed()
        outcome, self._done = self._done, None
        if outcome is not None:
            self.cover()
        return outcome

    def cover(self) -> None:
        """Begin to cover the tail with what would leave next, unless a move is under way.

        Not before the driver has accepted all of the last time's, or another move.
        """
        self._pause()
        if self._beside and not self.busy and not self._refused:
            try:
                self._covering = self._thread.submit(self._cover)
            except BrokenExecutor:
                raise
            except RuntimeError:
                # At the interpreter's end nothing can be queued any more, and nobody needs the addresses.
                return

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, slab, region and driver are the caller's; then what would leave next is covered anew."""
        assert not self.busy
        self._pause()
        yield
        self.cover()

    def rest(self) -> None:
        """Wait for what the thread has left to do."""
        assert not self.busy
        if self._covering is not None:
            self._covering.result()

    def close(self) -> None:
        """Leave that undone, and end the thread."""
        assert not self.busy
        self._pause()
        self._thread.shutdown()

    def _pause(self) -> None:
        """End covering, after the slice that is under way."""
        if self._covering is None:
            return
        self._stop.set()
        covering, self._covering = self._covering, None
        try:
            covering.result()
        finally:
            self._stop.clear()

    def _prepare(self) -> bool:
        """The pages, and the other ranks' consent; then the interpreter's interval is as usual again."""
        with self._or_end():
            try:
                self._boundary.prepare()
                return self._boundary.agree()
            finally:
                sys.setswitchinterval(self._usual_switch_s)

    def _cover(self) -> None:
        """Strict boundaries clear in the place of covering. A refusal costs the next growth time, no more."""
        with self._or_end():
            try:
                if self._boundary.strict:
                    self._boundary.clear()
                slices = self._boundary.cover_ahead(self.ahead_levels)
                while not self._stop.is_set() and next(slices, 0):
                    self._stop.wait(PAUSE_S)
            except DriverError:
                traceback.print_exc()
                self._refused = True
            self.rested_at = time.monotonic()

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # No step may notice this for long: the engine can be idle.
            traceback.print_exc()
            self._end_process()
            raise
