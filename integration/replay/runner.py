"""Run an arm's process and collect its events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vamp_runtime.errors import ConfigError

from .arms import Arm, child_environment
from .child import ChildSpec
from .figures import ArmRun

TAIL_LINES = 25


class ArmFailed(RuntimeError):
    """An arm's process ended without a result.

    Attributes:
        log: file with everything it printed.
        tail: the last lines of that file.
    """

    def __init__(self, arm: str, status: int, log: Path) -> None:
        lines = log.read_text(errors="replace").splitlines()
        self.log, self.tail = log, "\n".join(lines[-TAIL_LINES:])
        super().__init__(f"arm {arm} ended with status {status} before its replay was done; see {log}")


def run_arm(
    arm: Arm, spec: ChildSpec, log: Path, threads: int, on_event: Callable[[dict[str, Any]], None]
) -> ArmRun:
    """Start the arm's process, pass its events to ``on_event`` as they come, and return them all.

    The process is ended when this function is left early.

    Raises:
        ConfigError: the engine refused its options.
        ArmFailed: the process ended without an ``end`` event.
    """
    events: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("ready", "turn", "sample", "end", "refused")
    }
    read_end, write_end = os.pipe()
    with open(read_end, encoding="utf-8") as stream, open(log, "w", encoding="utf-8") as output:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "vamp_integration.replay.child", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[write_end],
                env=child_environment(dict(os.environ), arm, threads),
                text=True,
            )
        finally:
            os.close(write_end)
        try:
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(json.dumps(asdict(spec)))
            for line in stream:
                event = json.loads(line)
                events[event["event"]].append(event)
                if event["event"] != "refused":
                    on_event(event)
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if events["refused"]:
        raise ConfigError(f"arm {arm.name}: {events['refused'][0]['message']}")
    if not events["end"]:
        raise ArmFailed(arm.name, status, log)
    return ArmRun(
        arm.name,
        arm.max_offload_ratio,
        events["ready"][0],
        events["turn"],
        events["sample"],
        events["end"][0],
    )
