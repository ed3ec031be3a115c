"""The load of the serving benchmark: recorded sessions in a closed loop, and the window that counts.

The figures are those of turns that end between two moments: when the last session has ended its first turn,
and so many seconds later. Before, caches fill; first turns are in no figure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from serve_engine import PointFailed, ServeEngine

from vamp_integration.replay.figures import ArmRun, figures
from vamp_integration.replay.load import load_trace
from vamp_integration.replay.loop import ClosedLoop, TurnRecord
from vamp_integration.replay.scale import Scaling, scale
from vamp_integration.replay.trace import Trace
from vamp_integration.replay.workload import Prompts
from vamp_runtime.errors import ConfigError

SAMPLE_S = 0.5
REPORT_S = 10.0


@dataclass(frozen=True)
class Workload:
    """A trace and what is replayed of it.

    Attributes:
        file: stem of the trace's file.
        scaling: see ``Scaling``.
        max_model_len: as in vLLM.
    """

    file: str
    scaling: Scaling
    max_model_len: int


WORKLOADS = {
    "peak140k": Workload(
        "weka_long_peak140k",
        Scaling(think_cap_s=5.0, skip_turns=30, min_turns=21, max_prompt=148_000, max_output=48),
        150_000,
    ),
    "matched": Workload("weka_matched_2103turns_half", Scaling(think_cap_s=5.0, skip_turns=60), 68_000),
    "demo": Workload("miniswe_demo", Scaling(think_cap_s=0.2, turns=6, max_output=8), 4096),
}


def workload(name: str) -> Workload:
    """The workload called ``name``; ``ConfigError`` where there is none."""
    if name not in WORKLOADS:
        raise ConfigError(f"--workload {name}: unknown; give one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def read(workload: Workload, folder: Path) -> Trace:
    """The workload's trace from ``folder``, plain or compressed; ``ConfigError`` where it is not there."""
    names = [folder / f"{workload.file}{suffix}" for suffix in (".jsonl", ".jsonl.zst")]
    found = next((name for name in names if name.exists()), None)
    if found is None:
        raise ConfigError(f"--traces {folder}: no {names[0].name} or .zst in it; give the folder that has it")
    return scale(load_trace(found), workload.scaling)


def take(trace: Trace, sessions: int) -> Trace:
    """The first ``sessions`` sessions; beyond those recorded, each comes again with other tokens."""
    copies = [
        replace(session, session_id=session.session_id + (f"#{copy}" if copy else ""))
        for copy in range(-(-sessions // len(trace.sessions)))
        for session in trace.sessions
    ]
    repeated = (f"sessions repeated with other tokens: {len(trace.sessions)} recorded",)
    more = repeated if sessions > len(trace.sessions) else ()
    return replace(trace, sessions=tuple(copies[:sessions]), notes=trace.notes + more)


def slim(original: Path, workload: Workload, turns: int, out: Path) -> tuple[int, int]:
    """Write what a replay of ``turns`` turns a session can reach as plain JSON lines; sessions and turns.

    Turns that the workload skips stay as empty rows, so that the same settings fit both files.
    """
    trace, skip = load_trace(original), workload.scaling.skip_turns
    lines = []
    for session in trace.sessions:
        for number, turn in enumerate(session.turns[: skip + turns]):
            left_out = number < skip
            row = {
                "session_id": session.session_id,
                "turn": number,
                "input_length": 1 if left_out else turn.input_length,
                "output_length": turn.output_length,
                "hash_ids": [] if left_out else list(turn.hash_ids),
                **({"delay": round(turn.delay_s * 1000)} if number else {"timestamp": 0}),
            }
            lines.append(json.dumps(row, separators=(",", ":")))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(trace.sessions), len(lines)


class Stopped(Exception):
    """The run is to end; what it has measured so far of this point is dropped."""


@dataclass
class Recording:
    """What a replay has seen; times in seconds since its start.

    Attributes:
        window_from: when the last session had ended its first turn; ``None`` before.
        counts: preemptions and evictions by then.
    """

    sessions: int
    turns: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    window_from: float | None = None
    counts: tuple[int, int] = (0, 0)
    first_turns: set[int] = field(default_factory=set)

    def add(self, turn: TurnRecord, end: float) -> None:
        values = asdict(turn)
        tokens = values.pop("tokens")
        self.turns.append({**values, "output_tokens": len(tokens), "end_s": end})
        if turn.turn == 0:
            self.first_turns.add(turn.session)


def windowed(
    arm: str, ratio: float, recording: Recording, end: dict[str, Any], ready: dict[str, Any]
) -> ArmRun:
    """The run as if it had begun with the window. What VAMP reports is of the whole replay."""
    begin = recording.window_from or 0.0
    turns = [turn for turn in recording.turns if turn["end_s"] >= begin]
    before = [sample for sample in recording.samples if sample["t"] < begin][-1:]
    samples = [{**sample, "t": max(0.0, sample["t"] - begin)} for sample in before]
    samples += [{**s, "t": s["t"] - begin} for s in recording.samples if s["t"] >= begin]
    shifted = {**end, "seconds": end["seconds"] - begin, "start": end["start"] + begin}
    shifted["preemptions"] -= recording.counts[0]
    shifted["evictions"] -= recording.counts[1]
    return ArmRun(arm, ratio, ready, turns, samples, shifted)


def since(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    """VAMP's report with its sums counted from ``before``, another one of the same engine."""
    if before is None or after is None:
        return None
    sums = ("bytes_moved", "copied_bytes", "move_seconds", "moves", "failed_moves", "not_this_step")
    earlier = before["decisions"]
    kinds = {kind: count - earlier.get(kind, 0) for kind, count in after["decisions"].items()}
    return after | {name: after[name] - before[name] for name in sums} | {"decisions": kinds}


def replay(
    engine: ServeEngine,
    trace: Trace,
    seed: int,
    measure_s: float,
    fill_s: float,
    event: Callable[..., None],
    stop: Callable[[], bool],
) -> tuple[Recording, dict[str, Any]]:
    """Replay ``trace`` with all its sessions at once, until ``measure_s`` after their first turns.

    Args:
        fill_s: longest time to wait for the first turns.
        event: called with a name and values every few seconds.
        stop: asked after every step.

    Raises:
        Stopped: ``stop`` said so.
        PointFailed: the first turns took too long.
    """
    prompts = Prompts(trace, engine.engine.vllm_config.model_config.get_vocab_size(), seed)
    for session in range(len(trace.sessions)):
        prompts.prompt(session, 0)  # what blocks hold is drawn now, and not while the clock runs
    recording = Recording(len(trace.sessions))
    watch, said = engine.watch, 0.0
    before = watch.vamp_report()

    def on_turn(turn: TurnRecord) -> None:
        now = time.monotonic() - start
        recording.add(turn, now)
        if recording.window_from is None and len(recording.first_turns) == recording.sessions:
            recording.window_from = now
            recording.counts = (watch.preemptions, watch.evictions)
            loop.max_seconds = now + measure_s

    def on_step(now: float) -> None:
        nonlocal said
        if not recording.samples or now - recording.samples[-1]["t"] >= SAMPLE_S:
            recording.samples.append({"t": now, **engine.sample()})
        if now - said >= REPORT_S:
            said = now
            event("replaying", seconds=round(now, 1), turns=len(recording.turns), **recording.samples[-1])
        if stop():
            raise Stopped

    sessions = len(trace.sessions)
    loop = ClosedLoop(
        trace, engine, prompts.prompt, sessions, time.monotonic, time.sleep, on_turn, on_step, fill_s
    )
    start = time.monotonic()
    last = {session: len(s.turns) - 1 for session, s in enumerate(trace.sessions)}
    try:
        seconds = loop.run()
        recording.samples.append({"t": seconds, **engine.sample()})
        end = {
            "seconds": seconds,
            "start": start,
            "preemptions": watch.preemptions,
            "evictions": watch.evictions,
            "vamp": since(before, watch.vamp_report()),
            "sessions_ended": sum(turn["turn"] == last[turn["session"]] for turn in recording.turns),
            "in_flight": len(loop.in_flight),
        }
    finally:
        engine.abort(loop.in_flight)
    if recording.window_from is None:
        raise PointFailed(f"{len(recording.first_turns)} of {sessions} first turns in {fill_s:g} s")
    return recording, end


def row_figures(run: ArmRun, recording: Recording, end: dict[str, Any]) -> dict[str, Any]:
    """The figures of a row: those of the window, then of the whole replay as far as they differ."""
    result = figures(run, 1)
    result |= {f"decisions_{kind}": count for kind, count in result.pop("decisions").items()}
    counted = [turn for turn in recording.turns if turn["turn"] >= 1]
    return result | {
        "fill_s": recording.window_from,
        "turns_per_s_with_fill": len(counted) / end["seconds"],
        "turns_in_flight_at_end": end["in_flight"],
        "sessions_ended": end["sessions_ended"],
        "level_end": run.samples[-1]["level"],
        "move_seconds": (end["vamp"] or {}).get("move_seconds", 0.0),
    }
