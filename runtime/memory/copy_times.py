"""How long staging copies take, and how much of that a step waits for: from events in one step of several."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# One step of so many is timed: the events of a step are some hundred calls of the driver.
SAMPLED = 16


@dataclass(frozen=True)
class StagingSeconds:
    """Seconds of copies ahead of layers; sums since start. Each timed step stands for those before it.

    Attributes:
        hidden: in which the layers computed meanwhile.
        exposed: in which a layer waited for its copies.
    """

    hidden: float = 0.0
    exposed: float = 0.0


class CopyTimes:
    """Times the copies of a sampled step, and reads the times when the step is long over: it never waits.

    Args:
        layers: that a step enters, each once and in order.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._events = [[_event() for _ in range(layers)] for _ in range(4)]
        self._steps = self._folded = 0
        self._seconds = StagingSeconds()
        self._sampling = self._pending = False

    def begin_step(self) -> None:
        """Before the first copy of a step is queued."""
        self._fold()
        self._sampling = not self._pending and self._steps % SAMPLED == 0
        self._steps += 1

    def copying(self, layer: int, stream: torch.cuda.Stream, done: bool) -> None:
        """The stream begins, or has done, the layer's copies."""
        if self._sampling:
            self._events[done][layer].record(stream)

    def waiting(self, layer: int, stream: torch.cuda.Stream, done: bool) -> None:
        """The computing stream begins, or ends, waiting for them."""
        if self._sampling:
            self._events[2 + done][layer].record(stream)
            self._pending = self._pending or (done and layer == self._layers - 1)

    @property
    def seconds(self) -> StagingSeconds:
        """As of the last timed step; neither sum ever falls."""
        return self._seconds

    def _fold(self) -> None:
        """Take over the times of the last sampled step, if it is over."""
        if not self._pending or not self._events[3][-1].query():  # type: ignore[no-untyped-call]
            return
        begun, copied, waiting, entered = self._events
        copied_s = sum(a.elapsed_time(b) for a, b in zip(begun, copied, strict=True)) / 1e3
        exposed_s = sum(a.elapsed_time(b) for a, b in zip(waiting, entered, strict=True)) / 1e3
        steps, before = self._steps - self._folded, self._seconds
        hidden_s = before.hidden + max(0.0, copied_s - exposed_s) * steps
        self._seconds = StagingSeconds(hidden_s, before.exposed + exposed_s * steps)
        self._folded = self._steps
        self._pending = False


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
