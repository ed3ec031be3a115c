"""The estimate of expert bytes read from host memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_integration.host_reads import HostReads, expected_reads


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
