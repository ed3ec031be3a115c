"""The estimate of expert bytes read from host memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_integration.host_reads import HostReads, StagedAhead, expected_reads


@given(st.integers(0, 10_000), st.integers(1, 1000))
def test_an_expert_is_read_at_most_once_a_step_and_a_hit(hits: int, steps: int) -> None:
    assert 0 <= expected_reads(hits, steps) <= min(hits, steps) + 1e-6


def test_the_estimate_is_the_mean_of_even_routing() -> None:
    draw, steps, hits, rounds = random.Random(1), 50, 40, 2000
    touched = sum(len({draw.randrange(steps) for _ in range(hits)}) for _ in range(rounds)) / rounds
    assert expected_reads(hits, steps) == pytest.approx(touched, rel=0.02)


def test_one_step_is_exact() -> None:
    assert [expected_reads(hits, 1) for hits in (0, 1, 7)] == [0, 1, 1]


def test_only_experts_in_host_memory_count_and_only_what_is_new() -> None:
    reads = HostReads(expert_bytes=1000)
    reads.look([[5, 0, 3], [2, 2, 2]], steps=1, hosted=[[0, 1], []])
    assert reads.nbytes == 1000
    reads.look([[5, 1, 9], [2, 2, 3]], steps=1, hosted=[[0, 1], [2]])
    assert reads.nbytes == 3000


def test_counts_that_have_not_arrived_are_made_up_for() -> None:
    late, prompt = HostReads(expert_bytes=10**6), HostReads(expert_bytes=10**6)
    late.look(None, steps=30, hosted=[[0]])
    late.look([[50]], steps=70, hosted=[[0]])
    prompt.look([[50]], steps=100, hosted=[[0]])
    assert late.nbytes == prompt.nbytes > 0


def test_counters_that_were_set_to_zero_start_again() -> None:
    reads = HostReads(expert_bytes=10)
    reads.look([[100]], steps=64, hosted=[[]])
    reads.look([[5]], steps=1, hosted=[[0]])
    assert reads.nbytes == 10


def lagging(expert_bytes: int, staged: StagedAhead, hits: list[list[int]], steps: int) -> HostReads:
    """After ``steps`` steps, whose counts arrive a look later; the last expert of a layer is in HBM."""
    reads = HostReads(expert_bytes, lambda: staged)
    hosted = [range(len(row) - 1) for row in hits]
    reads.look(None, steps - 1, hosted)
    assert reads.nbytes == 0
    reads.look(hits, 1, hosted)
    return reads


def test_what_is_staged_in_every_step_is_not_read_in_place() -> None:
    hits = [[70, 2, 900], [0, 60, 912]]
    assert lagging(1000, StagedAhead(100, 972), hits, 100).nbytes == 0
    assert lagging(1000, StagedAhead(), hits, 100).nbytes > 90_000
    # A step or a token too many in either counter is no read that never was.
    assert lagging(1000, StagedAhead(101, 980), hits, 100).nbytes == 0


def test_hits_of_staged_steps_are_taken_off() -> None:
    draw, hits, touched = random.Random(2), [[0] * 32], 0
    weights = [*range(1, 32), 500]
    for step in range(3000):
        routed = draw.choices(range(32), weights, k=60 if step % 3 else 500)
        touched += len({*routed} - {31}) if step % 3 else 0
        for expert in routed:
            hits[0][expert] += 1
    staged = StagedAhead(steps=1000, hits=1000 * 500)
    assert lagging(1000, staged, hits, 3000).nbytes == pytest.approx(1000 * touched, rel=0.03)
    assert lagging(1000, StagedAhead(), hits, 3000).nbytes > 1.2 * 1000 * touched


def test_experts_without_room_are_read_in_place_in_every_step() -> None:
    hits = [[50, 50, 900]]
    some = lagging(1000, StagedAhead(100, 1000, [{1}]), hits, 100).nbytes
    assert some == round(1000 * expected_reads(50, 100)) > 0


def test_only_steps_since_the_last_look_are_taken_off() -> None:
    sums = iter([StagedAhead(10, 100), StagedAhead(10, 100), StagedAhead(10, 100)])
    reads = HostReads(1000, lambda: next(sums))
    reads.look(None, steps=9, hosted=[[0]])
    reads.look([[20, 80]], steps=1, hosted=[[0]])
    assert reads.nbytes == 0
    reads.look([[40, 160]], steps=10, hosted=[[0]])
    assert reads.nbytes == round(1000 * expected_reads(20, 10)) > 0
