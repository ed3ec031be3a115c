"""Growth on demand, restore, and what must never be taken for pressure, on the real CPU engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine import run_scenario
from support.scenarios import EAGER

pytestmark = pytest.mark.vllm

GROWING = {"max_offload_ratio": 0.5, "policy": EAGER, "restore": False}


def test_growth_keeps_the_prefixes_that_eviction_would_lose(tiny_model: Path) -> None:
    """Sessions that take turns: with growth every token and every prefix hit is that of a large pool."""
    work = {"seed": 8, "count": 4, "length": 600, "growth": 130, "turns": 2, "max_tokens": 4}
    large = run_scenario("rounds", tiny_model, kv_mib=64, max_model_len=1024, **work)
    grown = run_scenario("rounds", tiny_model, kv_mib=3, max_model_len=1024, vamp=GROWING, **work)
    assert grown["moves"] > 0 and grown["bytes_moved"] > 0 and grown["decisions"]["expand"] > 0
    assert sum(result["cached"] for result in large["results"]) > 0
    assert grown["results"] == large["results"]


def test_growth_within_a_running_batch_spares_preemptions(tiny_model: Path) -> None:
    work = {"seed": 9, "count": 4, "length": 400, "max_tokens": 200, "kv_mib": 3, "max_num_seqs": 4}
    small = run_scenario("together", tiny_model, max_model_len=1024, **work)
    grown = run_scenario("together", tiny_model, max_model_len=1024, vamp=GROWING, **work)
    assert small["preempted"] > 0
    assert grown["preempted"] == 0 and grown["level"] > 0


def test_not_this_step_is_not_pressure(tiny_model: Path) -> None:
    result = run_scenario("not_this_step", tiny_model, kv_mib=22)
    assert result["not_this_step"] > 0
    assert result["moves"] == 0 and result["decisions"] == {}


def test_levels_go_back_while_running_and_idle(tiny_model: Path) -> None:
    result = run_scenario("shrinking", tiny_model, kv_mib=3)
    assert result["level"] > 2 and result["grown"] > result["initial"]
    assert result["began"] and result["after_running"] == result["level"] - 1
    assert result["idle"] == 0 and result["pool_after"] == result["initial"]
    assert result["report_failed_moves"] == 0
    assert all(len(answer["tokens"]) == 8 for answer in result["again"])
