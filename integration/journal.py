"""What has happened, for reports and logs: capacity over time, decisions and moves. Bounded, plain data."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from typing import Any

from vamp_integration.commands import MemoryFigures
from vamp_runtime.controller import CapacityController
from vamp_runtime.memory.boundary import Move, Outcome
from vamp_runtime.policy.decide import Decision

KEPT = 20_000


class Journal:
    """Counters since start, the last ``KEPT`` entries of each log; times are ``time.monotonic()`` seconds."""

    def __init__(self) -> None:
        self.decisions: Counter[str] = Counter()
        self.predicted_s: defaultdict[str, float] = defaultdict(float)
        self.decision_log: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.timeline: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.moves: Counter[str] = Counter()
        self.bytes_by_kind: Counter[str] = Counter()
        self.seconds_by_kind: defaultdict[str, float] = defaultdict(float)
        self.copied_bytes = 0
        self.failed_moves = 0
        self.preemptions = 0
        self.not_this_step = 0
        self.cordons_given_up = 0
        self.steps_waited_for_copies = 0
        self.spilled_blocks = 0
        self.evicted_tokens_missed = 0
        self.preempted_tokens_lost = 0
        self.memory = MemoryFigures()

    def capacity(self, controller: CapacityController) -> None:
        self.timeline.append(
            {
                "t": time.monotonic(),
                "level": controller.level,
                "blocks": controller.mapped_blocks,
                "pool_blocks": controller.pool_blocks,
            }
        )

    def decided(self, decision: Decision) -> None:
        self.decisions[decision.action.value] += 1
        self.predicted_s[decision.action.value] += decision.cost_s
        self.decision_log.append(
            {
                "t": time.monotonic(),
                "action": decision.action.value,
                "levels": decision.levels,
                "take_blocks": decision.take_blocks,
                "evict_blocks": decision.evict_blocks,
                "cost_s": decision.cost_s,
                "rejected": {r.action.value: r.cost_s for r in decision.rejected},
                "infeasible": {r.action.value: r.infeasible for r in decision.rejected if r.infeasible},
                "bound": decision.bound.value if decision.bound else None,
            }
        )

    def moved(self, controller: CapacityController, move: Move, outcome: Outcome) -> None:
        if outcome.ok:
            self.moves[move.kind.value] += 1
        else:
            self.failed_moves += 1
        self.bytes_by_kind[move.kind.value] += outcome.bytes_moved
        self.copied_bytes += outcome.copied_bytes
        self.seconds_by_kind[move.kind.value] += outcome.seconds
        self.capacity(controller)

    def report(self, controller: CapacityController) -> dict[str, Any]:
        """Plain data for the trace replay and the log."""
        return {
            "level": controller.level,
            "max_level": controller.max_level,
            "blocks": controller.mapped_blocks,
            "pool_blocks": controller.pool_blocks,
            "bytes_moved": sum(self.bytes_by_kind.values()),
            "copied_bytes": self.copied_bytes,
            "move_seconds": sum(self.seconds_by_kind.values()),
            "moves": sum(self.moves.values()),
            "moves_by_kind": dict(self.moves),
            "failed_moves": self.failed_moves,
            "preemptions": self.preemptions,
            "not_this_step": self.not_this_step,
            "cordons_given_up": self.cordons_given_up,
            "steps_waited_for_copies": self.steps_waited_for_copies,
            "spilled_blocks": self.spilled_blocks,
            "decisions": dict(self.decisions),
            "decision_log": list(self.decision_log),
            "timeline": list(self.timeline),
        }
