"""The measured policy on the GPU engine: asynchronous scheduling, graphs, moves beside steps."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from unittest import mock

import pytest
from support.engine import run_scenario

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_sessions_in_turn_are_served_to_the_end(model: Path) -> None:
    """More sessions than the pool holds; ``rounds`` checks pool, pages and ranks after every turn."""
    work = {"seed": 8, "count": 16, "length": 1200, "growth": 130, "turns": 3, "max_tokens": 4, "kv_mib": 192}
    engine = {"enforce_eager": False, "max_num_batched_tokens": 1024, "gdn_prefill_backend": "triton"}
    with mock.patch.dict(os.environ, {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}):
        run = run_scenario("rounds", model, vamp={"policy": "measured"}, **work, **engine)
    assert len(run["results"]) == 48 and all(len(result["tokens"]) == 4 for result in run["results"])
    assert run["failed_moves"] == 0
