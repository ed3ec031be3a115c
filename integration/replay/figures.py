"""From the events of an arm to the figures of the recorded results: pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple


@dataclass(frozen=True)
class ArmRun:
    """All that an arm's process reported.

    Attributes:
        name: the arm.
        max_offload_ratio: as in ``Arm``.
        ready, end: the events of these names.
        turns, samples: the events of these names, in order of time.
    """

    name: str
    max_offload_ratio: float
    ready: dict[str, Any]
    turns: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    end: dict[str, Any]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between ranks; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def counted(run: ArmRun, warmup_turns: int) -> list[dict[str, Any]]:
    """Turns that enter the figures: all but the first ``warmup_turns`` of each session."""
    return [t for t in run.turns if t["turn"] >= warmup_turns]


class Capacity(NamedTuple):
    """Size of the KV pool from a time on (seconds since the start of the replay)."""

    t: float
    blocks: int
    level: int


def capacity(run: ArmRun) -> list[Capacity]:
    """The samples and, between them, every change that VAMP has noted, in order of time."""
    points = [Capacity(s["t"], s["blocks"], s["level"]) for s in run.samples]
    for change in (run.end["vamp"] or {}).get("timeline", []):
        t = change["t"] - run.end["start"]
        if 0 <= t <= run.end["seconds"]:
            points.append(Capacity(t, change["pool_blocks"], change["level"]))
    return sorted(points)


def mean_level(points: list[Capacity]) -> float:
    """Mean over time, each level holding until the next point."""
    total = sum(now.level * (following.t - now.t) for now, following in pairwise(points))
    span = points[-1].t - points[0].t
    return total / span if span > 0 else 0.0


def figures(run: ArmRun, warmup_turns: int) -> dict[str, Any]:
    """The figures of one row of ``replay`` in the recorded results; None where nothing was counted."""
    turns = counted(run, warmup_turns)
    ttft = [t["ttft_s"] for t in turns]
    tpot = [t["tpot_s"] for t in turns if t["output_tokens"] > 1]
    prompt = sum(t["prompt_tokens"] for t in turns)
    points = capacity(run)
    report = run.end["vamp"] or {}
    return {
        "ttft_s_p50": percentile(ttft, 0.5),
        "ttft_s_p90": percentile(ttft, 0.9),
        "ttft_s_p99": percentile(ttft, 0.99),
        "tpot_s_p50": percentile(tpot, 0.5),
        "tpot_s_p90": percentile(tpot, 0.9),
        "turns_per_s": len(turns) / run.end["seconds"] if run.end["seconds"] > 0 else None,
        "prefix_hit_rate": sum(t["cached_tokens"] for t in turns) / prompt if prompt else None,
        "preemptions": run.end["preemptions"],
        "evicted_blocks": run.end["evictions"],
        "level_max": max(p.level for p in points),
        "level_mean": mean_level(points),
        "blocks_min": min(p.blocks for p in points),
        "blocks_max": max(p.blocks for p in points),
        "bytes_moved": int(report.get("bytes_moved", 0)),
        "moves": int(report.get("moves", 0)),
        "failed_moves": int(report.get("failed_moves", 0)),
        "decisions": dict(report.get("decisions", {})),
        "seconds": run.end["seconds"],
        "turns": len(turns),
    }


@dataclass(frozen=True)
class TokenCheck:
    """Output tokens of one arm against another's.

    Attributes:
        arm, against: names of the arms.
        turns: turns that both finished.
        equal: turns whose tokens are identical.
        first_difference: (session, turn, position) of the earliest different token, or None.
    """

    arm: str
    against: str
    turns: int
    equal: int
    first_difference: tuple[int, int, int] | None


def compare_tokens(run: ArmRun, reference: ArmRun) -> TokenCheck:
    """Compare the turns that both arms finished; ``first_difference`` is the first in session order."""
    known = {(t["session"], t["turn"]): t["tokens"] for t in reference.turns}
    both = sorted(
        (t["session"], t["turn"], t["tokens"]) for t in run.turns if (t["session"], t["turn"]) in known
    )
    equal, first = 0, None
    for session, turn, tokens in both:
        expected = known[session, turn]
        if tokens == expected:
            equal += 1
        elif first is None:
            pairs = enumerate(zip(tokens, expected, strict=False))
            position = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(expected)))
            first = (session, turn, position)
    return TokenCheck(run.name, reference.name, len(both), equal, first)
