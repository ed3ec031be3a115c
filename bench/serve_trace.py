"""Every step and turn of a replay, for whoever wants to know where its time went."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS = ("scheduled_s", "ended_s", "prompt_tokens", "prompts", "decodes", "level", "waiting")


class StepLog:
    """The steps of one scheduler, unmodified or VAMP's; its methods are wrapped, nothing is changed."""

    def __init__(self, scheduler: Any) -> None:
        self.rows: list[list[float]] = []
        self._scheduler = scheduler
        self._open: dict[int, list[float]] = {}
        scheduler.schedule = self._scheduled(scheduler.schedule)
        scheduler.update_from_output = self._ended(scheduler.update_from_output)

    def write(self, path: Path, turns: list[dict[str, Any]], start_s: float) -> None:
        """The steps since ``start_s`` and the turns, as compressed JSON; times in seconds from then."""
        steps = [[round(row[0] - start_s, 4), round(row[1] - start_s, 4), *row[2:]] for row in self.rows]
        steps = [row for row in steps if row[0] >= 0]
        content = {"columns": COLUMNS, "steps": steps, "turns": turns}
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8") as out:
            json.dump(content, out)

    def _scheduled(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = method(*args, **kwargs)
            if output.total_num_scheduled_tokens:
                chunks = [count for count in output.num_scheduled_tokens.values() if count > 1]
                decodes = len(output.num_scheduled_tokens) - len(chunks)
                arbiter = getattr(self._scheduler, "arbiter", None)
                level = 0 if arbiter is None else arbiter.controller.level
                row = [time.monotonic(), 0.0, sum(chunks), len(chunks), decodes, level]
                self._open[id(output)] = [*row, len(self._scheduler.waiting)]
            return output

        return schedule

    def _ended(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            row = self._open.pop(id(scheduler_output), None)
            if row is not None:
                row[1] = time.monotonic()
                self.rows.append(row)
            return method(scheduler_output, *args, **kwargs)

        return update_from_output
