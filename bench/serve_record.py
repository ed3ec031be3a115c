"""Results, progress and the process of the serving benchmark: what is kept when a run is cut short.

In the folder of a run lie ``progress.jsonl`` (one event a line), ``pid`` and ``log`` of a detached process,
and one results file per part and kind of row, rewritten after every point. A point that is in it is not
measured again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vamp_integration.replay.report import git_commit, write_atomically

Row = dict[str, Any]
#: Settings that tell the points of a kind apart.
KEYS = {
    "replay": ("arm", "workload", "sessions", "moe_kernel", "measure_s"),
    "decode_step": ("arm", "batch", "level_share", "pass"),
    "growth": ("arm", "host_kv_gib", "batch", "repeat"),
}


class Progress:
    """Appends events to ``progress.jsonl`` and prints them."""

    def __init__(self, folder: Path, part: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.part = folder / "progress.jsonl", part

    def __call__(self, event: str, **values: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"time": now, "part": self.part, "event": event, **values})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


class Results:
    """The results file of one part and kind of row.

    Args:
        about: everything of the record but its name, date and rows.
    """

    def __init__(self, folder: Path, kind: str, part: str, about: Row) -> None:
        earlier = sorted(folder.glob(f"*-{kind}-{part}.json"))
        today = datetime.now(UTC).date().isoformat()
        self.path = earlier[-1] if earlier else folder / f"{today}-{kind}-{part}.json"
        self.kind = kind
        self.record: Row = {"name": kind, "date": today, **about, "rows": []}
        if earlier:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            # A file that several commands have filled names them all.
            runs = [*kept.get("earlier", []), {name: kept[name] for name in ("date", "commit", "command")}]
            self.record |= {"earlier": runs, "rows": kept["rows"]}

    def has(self, row: Row) -> bool:
        names = KEYS[self.kind]
        return any(all(kept.get(name) == row.get(name) for name in names) for kept in self.record["rows"])

    def add(self, row: Row) -> None:
        self.record["rows"].append(row)
        write_atomically(self.path, json.dumps(self.record, indent=1) + "\n")


def about(arguments: list[str], commit: str | None, device: str, versions: Row, notes: list[str]) -> Row:
    """The fields that records of this benchmark share."""
    return {
        "commit": commit or git_commit(Path(__file__).resolve().parent),
        "command": " ".join(["python", "bench/serve_h200.py", *arguments]),
        "device": device,
        "versions": versions,
        "notes": notes,
    }


class Clock:
    """The time that a run may take, and the wish that it end.

    Args:
        budget_s: seconds from now; ``None`` for no limit.
    """

    def __init__(self, budget_s: float | None) -> None:
        self._until = None if budget_s is None else time.monotonic() + budget_s
        self.stopped = False
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._stop)

    def allows(self, seconds: float) -> bool:
        return not self.stopped and (self._until is None or time.monotonic() + seconds <= self._until)

    @property
    def left_s(self) -> float | None:
        return None if self._until is None else self._until - time.monotonic()

    def _stop(self, number: int, frame: object) -> None:
        self.stopped = True


def detach(folder: Path) -> int:
    """Go on in a session of its own that outlives the caller; in the caller, the process id, there 0."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child:
        (folder / "pid").write_text(str(child))
        return child
    os.setsid()
    with (folder / "log").open("a") as log, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return 0


def running(folder: Path) -> int | None:
    """Process id of the detached run in ``folder``, where it still runs."""
    try:
        process = int((folder / "pid").read_text())
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return None
    return None if state == "Z" else process


def wait(folder: Path, seconds: float, show: Callable[[str], None]) -> bool:
    """Show new events of the detached run until it ends or time is up; whether it has ended."""
    until, shown = time.monotonic() + seconds, 0
    while True:
        process = running(folder)
        path = folder / "progress.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines[shown:]:
            show(line)
        shown = len(lines)
        if process is None or time.monotonic() >= until:
            return process is None
        time.sleep(1.0)
