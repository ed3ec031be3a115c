"""Marks on the compute stream: events that are used again and again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from vamp_runtime.errors import DriverError
from vamp_runtime.memory.cuda_api import CudaApi


class CudaMark:
    """An event on the compute stream; ``None`` once it has been seen to pass."""

    def __init__(self, event: Any, idle: list[Any]) -> None:
        self.event = event
        self._give_back = weakref.finalize(self, idle.append, event)

    def retire(self) -> None:
        self._give_back()
        self.event = None


class CudaMarks:
    """``mark``, ``passed`` and ``wait`` of a ``MemoryDriver``. Events of marks that nobody holds are reused.

    Args:
        compute_stream: the CUDA stream handle to record on. Default: the legacy default stream.
    """

    def __init__(self, api: CudaApi, compute_stream: Callable[[], int] | None) -> None:
        self._api = api
        self._compute_stream = compute_stream
        self._events: list[Any] = []
        self._idle: list[Any] = []

    def mark(self) -> CudaMark:
        event = self._idle.pop() if self._idle else self._create()
        try:
            self._api.call("cuEventRecord", event, self._compute_stream() if self._compute_stream else 0)
        except DriverError:
            self._idle.append(event)
            raise
        return CudaMark(event, self._idle)

    def passed(self, mark: object) -> bool:
        assert isinstance(mark, CudaMark)
        if mark.event is None:
            return True
        try:
            self._api.call("cuEventQuery", mark.event)
        except DriverError as error:
            if error.detail == "CUDA_ERROR_NOT_READY":
                return False
            raise
        mark.retire()
        return True

    def wait(self, mark: object) -> None:
        assert isinstance(mark, CudaMark)
        if mark.event is not None:
            self._api.call("cuEventSynchronize", mark.event)
            mark.retire()

    def close(self) -> None:
        """Destroy every event, passed or not."""
        for event in self._events:
            self._api.call("cuEventDestroy", event)
        self._events.clear()
        self._idle.clear()

    def _create(self) -> Any:
        flags = self._api.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        event = self._api.call("cuEventCreate", flags)
        self._events.append(event)
        return event
