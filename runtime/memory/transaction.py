"""Steps that are undone in reverse unless all of them succeed."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from vamp_runtime.errors import StateLost

T = TypeVar("T")


class Transaction:
    """A ``with`` block whose steps register how to undo them; ``commit`` makes them final.

    Leaving the block without ``commit``, by an exception or not, runs the undos in reverse order. Every undo
    is attempted; if any raises, ``StateLost`` follows, chained to the first failure.
    """

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []

    def do(self, action: Callable[[], T], undo: Callable[[], object]) -> T:
        """Run ``action``, then register ``undo``. An action that raises registers nothing."""
        result = action()
        self._undos.append(undo)
        return result

    def on_undo(self, undo: Callable[[], object]) -> None:
        """Register an undo for a step that has been taken already."""
        self._undos.append(undo)

    def commit(self) -> None:
        """Make every step so far final."""
        self._undos.clear()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failures: list[BaseException] = []
        while self._undos:
            undo = self._undos.pop()
            try:
                undo()
            except BaseException as failure:  # raised below, after the remaining undos
                failures.append(failure)
        if failures:
            raise StateLost(f"{len(failures)} undo step(s) failed, first: {failures[0]!r}") from failures[0]
