"""The cost model against values worked out by hand, and what its parameters refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from vamp_runtime.errors import ConfigError
from vamp_runtime.policy.cost import (
    combined_cost,
    effective_reuse,
    evict_cost,
    offload_cost,
    overhead,
    preempt_cost,
    spill_cost,
)
from vamp_runtime.policy.parameters import CostParameters, RestoreParameters

# t_overhead = 0.01 + 0.09 = 0.1 s; one shard over the horizon = 0.002 x 50 = 0.1 s.
P = CostParameters(
    alpha=0.8,
    tau_s=10.0,
    t_prefill_s=0.001,
    t_sched_s=0.01,
    t_queue_s=0.09,
    c_eff_s=0.002,
    horizon_steps=50,
    max_offload_ratio=0.5,
)
TINY_TAU = replace(P, tau_s=1e-9)
E = 16
INF = math.inf


@pytest.mark.parametrize(
    ("age_s", "r_hit", "parameters", "expected"),
    [
        (0, 0.5, P, 0.4),  # 0.8 x 0.5 / 1
        (10, 0.5, P, 0.2),  # 0.4 / 2: half at age tau
        (30, 0.5, P, 0.1),  # 0.4 / 4
        (0, 1.0, P, 0.8),  # alpha itself
        (0, 0.0, P, 0.0),
        (INF, 1.0, P, 0.0),
        (0, 0.5, TINY_TAU, 0.4),  # age 0 does not see tau
        (1, 0.5, TINY_TAU, 3.999999996e-10),  # 0.4 / 1,000,000,001
        (1e308, 1.0, replace(P, tau_s=1e-308), 0.0),  # age / tau beyond the largest double
        (0, 1.0, replace(P, alpha=0.0), 0.0),
    ],
)
def test_effective_reuse(age_s: float, r_hit: float, parameters: CostParameters, expected: float) -> None:
    assert effective_reuse(age_s, r_hit, parameters) == pytest.approx(expected, rel=1e-12, abs=0)


def test_overhead() -> None:
    assert overhead(P) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("tokens", "age_s", "r_hit", "expected"),
    [
        (400, 0, 0.5, 0.2),  # 0.4 x (0.4 + 0.1)
        (400, 10, 0.5, 0.1),  # 0.2 x 0.5
        (900, 30, 0.5, 0.1),  # 0.1 x (0.9 + 0.1)
        (400, 0, 1.0, 0.4),  # 0.8 x 0.5
        (0, 0, 0.5, 0.04),  # 0.4 x (0 + 0.1): the overhead stays
        (400, 0, 0.0, 0.0),  # nothing is ever hit: free
        (400, INF, 1.0, 0.0),  # never used again: free
        (1_000_000, 0, 1.0, 800.08),  # 0.8 x (1000 + 0.1)
    ],
)
def test_evict_cost(tokens: int, age_s: float, r_hit: float, expected: float) -> None:
    assert evict_cost(tokens, age_s, r_hit, P) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("copied", "lost", "load_block_s", "expected"),
    [
        (25, 0, 0.004, 0.044),  # 0.4 x (25 x 0.004 + 0.01): nothing waits in the queue for the device
        (25, 0, 0.016, 0.2),  # as long as prefilling 16 tokens: evict_cost
        (25, 0, 1.0, 0.2),  # longer: prefilled
        (20, 5, 0.004, 0.104),  # 0.4 x (0.08 + 0.08 + 0.1)
        (0, 25, 0.004, 0.2),  # no copy: evict_cost of 400 tokens
        (0, 0, 0.004, 0.04),
        (25, 0, 0.0, 0.004),
    ],
)
def test_spill_cost(copied: int, lost: int, load_block_s: float, expected: float) -> None:
    assert spill_cost(copied, lost, 16, load_block_s, 0, 0.5, P) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        (0, 0.0),
        (1, 0.1),  # 1 x 0.002 x 50
        (4, 0.4),
        (16, 1.6),  # all E
        (17, 1.6),  # more than E cost what E cost
        (1000, 1.6),
    ],
)
def test_offload_cost(shards: int, expected: float) -> None:
    assert offload_cost(shards, E, P) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("blocks", "partial_tokens", "expected"),
    [
        (0, 100, 0.0),  # G = 0
        (1, 0, 0.1),  # the overhead alone
        (1, 50, 0.15),  # 0.1 + 50 x 0.001
        (8, 50, 1.2),  # 8 x 0.15
        (3, 500, 1.8),  # 3 x 0.6
    ],
)
def test_preempt_cost(blocks: int, partial_tokens: int, expected: float) -> None:
    assert preempt_cost(blocks, partial_tokens, P) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("shards", "tokens", "age_s", "r_hit", "expected"),
    [
        (4, 400, 10, 0.5, 0.5),  # 0.4 + 0.1
        (0, 400, 0, 0.5, 0.2),  # no level: evicting alone
        (20, 0, 0, 0.5, 1.64),  # 1.6 for E of 20 shards + 0.04
        (4, 400, 0, 0.0, 0.4),  # the remainder is free
        (4, 400, INF, 1.0, 0.4),
        (2, 900, 30, 0.5, 0.3),  # 0.2 + 0.1
    ],
)
def test_combined_cost(shards: int, tokens: int, age_s: float, r_hit: float, expected: float) -> None:
    assert combined_cost(shards, E, tokens, age_s, r_hit, P) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("ratio", "experts", "group", "levels"),
    [
        (0.15, 512, 1, 76),  # 76.8
        (0.29, 100, 1, 29),  # 0.29 x 100 is 28.999999999999996 as doubles
        (0.25, 512, 4, 32),
        (0.0, 512, 1, 0),
        (1.0, 10, 4, 2),  # 10 experts are two whole groups
    ],
)
def test_max_level(ratio: float, experts: int, group: int, levels: int) -> None:
    assert replace(P, max_offload_ratio=ratio).max_level(experts, group) == levels


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", -0.1),
        ("alpha", 1.1),
        ("alpha", math.nan),
        ("tau_s", 0.0),
        ("tau_s", INF),
        ("t_prefill_s", 0.0),
        ("t_sched_s", -1.0),
        ("t_queue_s", INF),
        ("c_eff_s", -1e-9),
        ("c_eff_s", math.nan),
        ("horizon_steps", 0),
        ("horizon_steps", 2.5),
        ("horizon_steps", True),
        ("max_offload_ratio", 1.5),
    ],
)
def test_cost_parameters_refuse(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} = {value!r}: must be .*such as [^\n]+$"):
        replace(P, **{field: value})


@pytest.mark.parametrize(("field", "value"), [("dead_zone", 0.5), ("dead_zone", INF), ("min_dwell_s", -1.0)])
def test_restore_parameters_refuse(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} = {value!r}: must be .*such as [^\n]+$"):
        replace(RestoreParameters(dead_zone=2.0, min_dwell_s=1.0), **{field: value})
