"""What steps would have read at every level, from hit counters."""

from __future__ import annotations

import math

import pytest

from vamp_integration.cold_reads import ColdReads

# Two layers of four experts in groups of two; the second layer's records are the other way round.
GROUP_OF = [[0, 0, 1, 1], [1, 1, 0, 0]]
COLDEST = [[0, 1], [1, 0]]


def test_one_step_reads_an_expert_once() -> None:
    reads = ColdReads(GROUP_OF, groups=2, max_level=2).look([[5, 0, 1, 1], [0, 0, 9, 0]], 1, COLDEST)
    # Coldest first: layer 0 reads one of its group 0 and both of group 1; layer 1 none and one.
    assert reads.steps == 1
    assert reads.reads == (0.0, 0.5, 2.0)


def test_hits_fall_evenly_on_steps() -> None:
    counts = ColdReads(GROUP_OF, groups=2, max_level=1).look([[8, 0, 0, 0], [4, 4, 0, 0]], 4, COLDEST)
    first, second = 1 - math.exp(-2), 2 * (1 - math.exp(-1))
    assert counts.reads == pytest.approx((0.0, (first + second) / 2))


def test_counts_are_those_since_the_last_look() -> None:
    reads = ColdReads(GROUP_OF, groups=2, max_level=1)
    reads.look([[8, 0, 0, 0]] * 2, 4, COLDEST)
    counts = reads.look([[8, 0, 0, 0]] * 2, 8, COLDEST)
    assert counts.reads == (0.0, 0.0) and counts.steps == 8
    anew = reads.look([[1, 0, 0, 0]] * 2, 1, COLDEST)
    assert anew.reads == (0.0, 1.0), "the counters were set to 0 meanwhile"


def test_nothing_can_leave() -> None:
    counts = ColdReads(GROUP_OF, groups=2, max_level=0).look([[1] * 4] * 2, 2, COLDEST)
    assert counts.reads == (0.0,)
