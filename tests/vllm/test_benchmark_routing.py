"""Simulated routing in real engines, unmodified and with VAMP."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from support.engine import WORKS, run_scenario

pytestmark = pytest.mark.vllm

WORK = WORKS["order"]
SIGMA = "vamp_lognormal:sigma=1.06,tilt=0,seed=3"


def spread(hits: list[int]) -> float:
    return statistics.pstdev(math.log(max(count, 0.5)) for count in hits)


def correlation(a: list[int], b: list[int]) -> float:
    return statistics.correlation(*([math.log(max(count, 0.5)) for count in row] for row in (a, b)))


def unmodified(model: Path, routing: str) -> list[dict[str, Any]]:
    done = run_scenario("oracle", model, works=[WORK], enable_prefix_caching=False, routing=routing)
    tokens: list[dict[str, Any]] = done["works"][0]
    return tokens


def test_both_engines_are_routed_alike_and_every_layer_in_its_own_way(tiny_model: Path) -> None:
    """Equal tokens across hundreds of moves; the counters show the spread asked for, layer by layer."""
    plain = unmodified(tiny_model, SIGMA)
    options = {"kv_mib": 3, "enable_prefix_caching": False, **WORK}
    run = run_scenario("exercised", tiny_model, routing=SIGMA, **options)
    assert run["moves"] >= 50 and run["results"] == plain
    assert all(abs(spread(hits) - 1.06) < 0.2 for hits in run["hits"]), [*map(spread, run["hits"])]
    first, *others = run["hits"]
    assert all(abs(correlation(first, other)) < 0.6 for other in others)
    assert unmodified(tiny_model, SIGMA.replace("seed=3", "seed=4")) != plain


def test_the_domain_changes_while_the_engine_runs(tiny_model: Path) -> None:
    done = run_scenario("new_domain", tiny_model, routing=SIGMA + ",shared=0", kv_mib=8, **WORK)
    for before, after in zip(*done["halves"], strict=True):
        assert sum(after) > 1000 and abs(correlation(before, after)) < 0.6
