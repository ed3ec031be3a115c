"""How many expert bytes the MoE layers have read from home pages, estimated from the hit counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.slab import ExpertSlab


@dataclass(frozen=True)
class StagedAhead:
    """Steps whose layers read copies in HBM in the place of home pages; sums since start.

    Attributes:
        steps: how many.
        hits: tokens that they routed to the experts of one layer, each token once for each of its experts.
        left: per layer, the experts on the host that are not copied and read in place; empty where all are.
    """

    steps: int = 0
    hits: int = 0
    left: Sequence[Collection[int]] = ()


def expected_reads(hits: float, steps: int) -> float:
    """Steps, of ``steps``, in which an expert with ``hits`` routed tokens was read at least once.

    Exact for no hit and for one step; no step reads nothing. In between, hits are taken to fall evenly on the
    steps: the hits of one step are Poisson distributed, and it reads the expert with probability
    ``1 - exp(-hits / steps)``. That is too high where a few prefill steps have most of the tokens, and never
    above ``min(hits, steps)``.
    """
    assert hits >= 0 and steps >= 0
    return min(hits, steps) if steps < 2 else -steps * math.expm1(-hits / steps)


class HostReads:
    """Adds up bytes read in place from home pages of one tier, an expert at most once a layer and step.

    Hits of steps that were staged ahead are taken off where an expert was copied. Counters do not tell steps
    apart: an expert's share of those hits is taken to be the same in staged steps and in others.

    Args:
        expert_bytes: of one expert of one layer on this rank.
        staged: what was staged ahead until now. Only devices stage, and their counters arrive a look later:
            what is taken off is as of the look before, as they are.
    """

    def __init__(self, expert_bytes: int, staged: Callable[[], StagedAhead] = StagedAhead) -> None:
        self._expert_bytes = expert_bytes
        self._staged = staged
        self._staged_now = self._staged_before = StagedAhead()
        self._before: list[list[int]] | None = None
        self._steps = 0
        self.nbytes = 0

    def look(
        self, hits: Sequence[Sequence[int]] | None, steps: int, hosted: Sequence[Collection[int]]
    ) -> None:
        """Count what was read since the last look.

        Args:
            hits: ``[layers][experts]``, counted since start; one that has fallen was set to 0 meanwhile.
                ``None`` where they have not arrived.
            steps: in which the hits since the last look were counted; those of a look without hits are added.
            hosted: per layer, the experts that are read from there.
        """
        self._steps += steps
        staged, self._staged_now = self._staged_now, self._staged()
        if hits is None:
            return
        before, reads = self._before or [[0] * len(row) for row in hits], 0.0
        for layer, (row, row_before, experts) in enumerate(zip(hits, before, hosted, strict=True)):
            grown = {expert: _grown(row[expert], row_before[expert]) for expert in experts}
            left = staged.left[layer] if staged.left else ()
            reads += self._reads(grown, _grown(sum(row), sum(row_before)), staged, left)
        self.nbytes += round(reads * self._expert_bytes)
        self._before, self._steps, self._staged_before = [list(row) for row in hits], 0, staged

    def _reads(
        self, grown: Mapping[int, int], routed: int, staged: StagedAhead, left: Collection[int]
    ) -> float:
        """Reads of a layer's experts since the last look, by their hits and those of all the layer's."""
        steps = max(0, self._steps - (staged.steps - self._staged_before.steps))
        share = max(0.0, 1 - (staged.hits - self._staged_before.hits) / max(1, routed))
        return sum(
            expected_reads(hits, self._steps) if expert in left else expected_reads(share * hits, steps)
            for expert, hits in grown.items()
        )


def _grown(now: int, then: int) -> int:
    """What a counter has counted; one that has fallen was set to 0 meanwhile."""
    return now - then if now >= then else now


def experts_in(slab: ExpertSlab, tier: Tier) -> list[list[int]]:
    """Per layer, the experts that the slot table reads from home pages of ``tier``."""
    geometry = slab.geometry
    slots = range(geometry.home_slot_base, geometry.host_slot_base)
    if tier is Tier.HOST:
        slots = range(geometry.host_slot_base, geometry.slots)
    return [[expert for expert, slot in enumerate(row) if slot in slots] for row in slab.slot_table]
