"""Rows, runs and engines for the tests of the trace replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vamp_integration.replay.figures import ArmRun
from vamp_integration.replay.loop import Progress
from vamp_integration.replay.trace import Session, Trace, Turn


def row(session: str = "a", turn: int = 0, length: int = 200, **changes: Any) -> dict[str, Any]:
    """A row of the session form; a change to ``...`` takes the field out."""
    time = {"delay": 1500} if turn else {"timestamp": 0}
    base = {"session_id": session, "turn": turn, "input_length": length, "output_length": 7}
    whole = base | {"hash_ids": list(range(length // 64))} | time | changes
    return {key: value for key, value in whole.items() if value is not ...}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def small_trace(sessions: int = 3, turns: int = 3, delay_s: float = 1.0) -> Trace:
    of = tuple(Turn(100 + 64 * i, 4, tuple(range(1 + i)), delay_s if i else 0.0) for i in range(turns))
    return Trace("small", tuple(Session(f"s{i}", of) for i in range(sessions)), 64.0)


class SerialEngine:
    """Serves one request after the other in virtual time: ``prefill_s``, then ``step_s`` a token."""

    def __init__(self, prefill_s: float = 0.5, step_s: float = 0.25) -> None:
        self.now = 0.0
        self.prefill_s, self.step_s = prefill_s, step_s
        self.queue: list[tuple[str, int, int]] = []
        self.submitted: list[tuple[float, str]] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def submit(self, request_id: str, prompt: list[int], output_tokens: int) -> None:
        self.submitted.append((self.now, request_id))
        self.queue.append((request_id, output_tokens, 0))

    def busy(self) -> bool:
        return bool(self.queue)

    def step(self) -> list[Progress]:
        request_id, wanted, done = self.queue[0]
        self.now += self.step_s if done else self.prefill_s
        done += 1
        self.queue[0] = (request_id, wanted, done)
        if done == wanted:
            self.queue.pop(0)
        return [Progress(request_id, [done], 64, done == wanted)]


def turn_event(session: int, turn: int, ttft_s: float, tokens: list[int] | None = None) -> dict[str, Any]:
    return {
        "event": "turn",
        "session": session,
        "turn": turn,
        "submitted_s": float(turn),
        "ttft_s": ttft_s,
        "tpot_s": 0.01,
        "prompt_tokens": 1000,
        "cached_tokens": 750 if turn else 0,
        "output_tokens": 3,
        "tokens": tokens or [1, 2, 3],
    }


def sample(t: float, level: int = 0, blocks: int = 40) -> dict[str, Any]:
    counts = {"used": 10, "cached": 30, "running": 1, "waiting": 2}
    return {"event": "sample", "t": t, "blocks": blocks, "level": level, **counts}


REPORT = {
    "level": 1,
    "max_level": 4,
    "blocks": 52,
    "pool_blocks": 64,
    "bytes_moved": 3 << 20,
    "moves": 3,
    "failed_moves": 0,
    "decisions": {"expand": 2, "evict": 5},
    "decision_log": [
        {"t": 101.0, "action": "expand", "cost_s": 0.002, "rejected": {"evict": 0.5, "preempt": 1.0}},
        {"t": 102.5, "action": "evict", "cost_s": 0.001, "rejected": {"expand": float("inf")}},
    ],
    "timeline": [{"t": 90.0, "level": 4, "pool_blocks": 70}, {"t": 105.0, "level": 3, "pool_blocks": 64}],
}


def arm_run(name: str = "vllm", ttft_s: float = 2.0, vamp: dict[str, Any] | None = None) -> ArmRun:
    """Two sessions of three turns; the first turns take four times as long."""
    turns = [turn_event(s, t, ttft_s * (1 if t else 4)) for t in range(3) for s in range(2)]
    samples = [sample(0.0), sample(4.0, 2 if vamp else 0, 52 if vamp else 40), sample(8.0, 1 if vamp else 0)]
    ready = {
        "startup_s": 1.0,
        "kv_bytes": 1 << 20,
        "blocks": 40,
        "block_tokens": 256,
        "expert_bytes": 4 << 20,
        "simulated_routing": "",
    }
    about = {"layers": 4, "tp": 1, "device": "a <CPU>", "versions": {"python": "3.11", "vllm": "0.32.0"}}
    end = {"seconds": 8.0, "start": 100.0, "preemptions": 1, "evictions": 9, "vamp": vamp}
    return ArmRun(name, 0.25 if vamp else 0.0, ready | about, turns, samples, end)
