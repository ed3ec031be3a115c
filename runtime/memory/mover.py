"""Carries out moves, beside running steps where the kernel reads experts through the slot table."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from vamp_runtime.memory.boundary import Boundary, Move, MoveKind, Outcome

# The thread gives the interpreter lock away in every driver call, a thousand times a move. With the usual
# 5 ms it could wait so long each time that the thread of the steps is busy.
SWITCH_INTERVAL_S = 1e-4


class Mover:
    """One move at a time: request and redirect on the caller's thread, the rest on one of its own.

    Until ``finish`` has returned the outcome, slab, region and driver belong to that thread, and after it
    ``Boundary.clear`` may still run there. Used by one thread, the one that launches steps.

    Args:
        slots_changed: brings the slot table to the device, ordered before the steps that are launched next.
        end_process: called where a move cannot be finished or undone; does not return.
        beside: the kernel reads every expert where the slot table says. Otherwise ``start`` does all of a
            move, since own addresses must not change under a step.
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
        self._slots_changed = slots_changed
        self._end_process = end_process
        self._beside = beside
        self._thread = ThreadPoolExecutor(1, "vamp-mover", initializer=thread_begins)
        self._agreed: Future[bool] | None = None
        self._done: Outcome | None = None
        self._kind = MoveKind.OFFLOAD

    @property
    def busy(self) -> bool:
        """Whether a move has been started whose outcome has not been taken."""
        return self._agreed is not None or self._done is not None

    def start(self, move: Move) -> None:
        """Begin a move. Beside steps it is under way when this returns, else done."""
        assert not self.busy
        if not self._beside:
            self._done = self._boundary.run(move)
            self._slots_changed()
            return
        self._kind = move.kind
        self._boundary.request(move)
        self._boundary.redirect()
        if move.kind is not MoveKind.RESTORE:
            self._slots_changed()
        self._agreed = self._thread.submit(self._prepare)

    def finish(self, wait: bool = False) -> Outcome | None:
        """The outcome, once; ``None`` where no move has ended. Publishes, or undoes what was refused."""
        if self._agreed is not None and (wait or self._agreed.done()):
            agreed, self._agreed = self._agreed.result(), None
            self._done = self._boundary.publish() if agreed else self._boundary.abandon()
            if not (agreed and self._kind is MoveKind.OFFLOAD):
                self._slots_changed()
        outcome, self._done = self._done, None
        return outcome

    def rest(self) -> None:
        """Wait for what the last move has left to do."""
        assert not self.busy
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """The same, and end the thread."""
        assert not self.busy
        self._thread.shutdown()

    def _prepare(self) -> bool:
        with self._in_thread():
            self._boundary.prepare()
            agreed = self._boundary.agree()
            if agreed:
                # At the interpreter's end nothing can be queued any more, and nobody needs the addresses.
                with suppress(RuntimeError):
                    self._thread.submit(self._clear)
            return agreed

    def _clear(self) -> None:
        """Beside the steps that publish the move, and before the pages of the next one."""
        with self._in_thread():
            self._boundary.clear()

    @contextmanager
    def _in_thread(self) -> Iterator[None]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            yield
        except BaseException:
            # No step may notice this for long: the engine can be idle.
            traceback.print_exc()
            self._end_process()
            raise
        finally:
            sys.setswitchinterval(before)
