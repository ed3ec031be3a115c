"""Show how far an arm is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_EVERY_S = 10.0


class ArmProgress:
    """Turns events of an arm into a progress display. Use as a context manager and call with each event.

    Args:
        console: where to show it.
        name: the arm.
        turns: turns that will be replayed.
    """

    def __init__(self, console: Console, name: str, turns: int) -> None:
        self.console, self.name, self.turns = console, name, turns
        self.done = 0
        self.blocks, self.level = 0, 0
        self._said = 0.0
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Progress(
                *columns, TextColumn("{task.fields[state]}"), console=console, transient=True
            )
            self._task = self._bar.add_task(name, total=turns, state="starting the engine")

    def __enter__(self) -> ArmProgress:
        if self._bar is not None:
            self._bar.start()
        else:
            self.console.print(f"{self.name}: starting the engine", highlight=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "turn":
            self.done += 1
        elif event["event"] == "sample":
            self.blocks, self.level = event["blocks"], event["level"]
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self.done, state=f"{self.blocks} KV blocks, level {self.level}"
            )
        else:
            self._plain(event)

    def _plain(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self.console.print(
                f"{self.name}: engine ready in {event['startup_s']:.1f} s, {event['blocks']} KV blocks",
                highlight=False,
            )
        elif kind == "sample" and event["t"] - self._said >= PLAIN_EVERY_S:
            self._said = event["t"]
            self.console.print(
                f"{self.name}: {self.done} of {self.turns} turns after {event['t']:.0f} s, "
                f"{self.blocks} KV blocks, level {self.level}",
                highlight=False,
            )
        elif kind == "end":
            self.console.print(f"{self.name}: {self.done} turns in {event['seconds']:.1f} s", highlight=False)
