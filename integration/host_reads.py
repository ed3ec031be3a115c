"""How many expert bytes the MoE layers have read from home pages, estimated from the hit counters."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.slab import ExpertSlab


def expected_reads(hits: int, steps: int) -> float:
    """Steps, of ``steps``, in which an expert with ``hits`` routed tokens was read at least once.

    Exact for no hit and for one step. In between, hits are taken to fall evenly on the steps: the hits of one
    step are Poisson distributed, and it reads the expert with probability ``1 - exp(-hits / steps)``. That is
    too high where a few prefill steps have most of the tokens, and never above ``min(hits, steps)``.
    """
    assert hits >= 0 and steps > 0
    return min(hits, 1) if steps == 1 else -steps * math.expm1(-hits / steps)


class HostReads:
    """Adds up bytes read in place from home pages of one tier, an expert at most once a layer and step.

    Args:
        expert_bytes: of one expert of one layer on this rank.
    """

    def __init__(self, expert_bytes: int) -> None:
        self._expert_bytes = expert_bytes
        self._before: list[list[int]] | None = None
        self._steps = 0
        self.nbytes = 0

    def look(
        self, hits: Sequence[Sequence[int]] | None, steps: int, hosted: Sequence[Collection[int]]
    ) -> None:
        """Count what was read since the last look.

        Args:
            hits: ``[layers][experts]``, counted since start; one that has fallen was set to 0 meanwhile.
                ``None`` where they have not arrived: the next look counts these steps too.
            steps: since the last look, 1 or more.
            hosted: per layer, the experts that are read from there.
        """
        self._steps += steps
        if hits is None:
            return
        before, reads = self._before or [[0] * len(row) for row in hits], 0.0
        for row, row_before, experts in zip(hits, before, hosted, strict=True):
            grown = ((row[expert], row_before[expert]) for expert in experts)
            reads += sum(
                expected_reads(now - (then if now >= then else 0), self._steps) for now, then in grown
            )
        self.nbytes += round(reads * self._expert_bytes)
        self._before, self._steps = [list(row) for row in hits], 0


def experts_in(slab: ExpertSlab, tier: Tier) -> list[list[int]]:
    """Per layer, the experts that the slot table reads from home pages of ``tier``."""
    geometry = slab.geometry
    slots = range(geometry.home_slot_base, geometry.host_slot_base)
    if tier is Tier.HOST:
        slots = range(geometry.host_slot_base, geometry.slots)
    return [[expert for expert, slot in enumerate(row) if slot in slots] for row in slab.slot_table]
