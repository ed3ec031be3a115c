"""Moves must not change a token. The oracle proves first that wrong bytes would.

One sequence at a time and no prefix cache, so that both engines compute exactly the same batches.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.engine import WORKS, run_scenario

pytestmark = pytest.mark.vllm

Oracle = dict[str, list[dict[str, Any]]]


def test_the_oracle_notices_corruption(tiny_model: Path, oracle: Oracle) -> None:
    """One spoilt offloaded expert, and one spoilt KV block on a moved page, change tokens."""
    run = run_scenario("corrupted", tiny_model, kv_mib=3, **WORKS["corruption"])
    assert run["level"] == run["max_level"] > 0 and run["bytes_moved"] > 0
    assert run["sound"] == run["again"] == oracle["corruption"]
    assert run["expert"][0]["tokens"] != run["sound"][0]["tokens"]
    assert run["block"][0]["tokens"] != run["sound"][0]["tokens"]


def test_hundreds_of_moves_leave_every_token(tiny_model: Path, oracle: Oracle) -> None:
    """Growth and restore in every step, on blocks that were expert pages a moment ago."""
    run = run_scenario("exercised", tiny_model, kv_mib=3, enable_prefix_caching=False, **WORKS["moves"])
    assert run["moves"] >= 300 and run["failed_moves"] == 0
    assert set(run["moves_by_kind"]) == {"offload", "restore"} and min(run["moves_by_kind"].values()) >= 100
    assert run["bytes_moved"] > 0 and run["highest_id"] >= run["initial"]
    assert run["results"] == oracle["moves"]


def test_refused_driver_calls_leave_every_token(tiny_model: Path, oracle: Oracle) -> None:
    """Every other move fails at a later driver call each time; serving goes on at the old size."""
    run = run_scenario("faulty", tiny_model, kv_mib=3, enable_prefix_caching=False, **WORKS["moves"])
    assert run["failed_moves"] >= 30 and run["moves"] >= 30
    assert run["results"] == oracle["moves"]


def test_record_order_leaves_every_token(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    draw = random.Random(3)
    order = tmp_path / "order.json"
    order.write_text(json.dumps({"order": [draw.sample(range(32), 32) for _ in range(4)]}))
    run = run_scenario(
        "exercised",
        tiny_model,
        kv_mib=3,
        vamp={"record_order": str(order)},
        enable_prefix_caching=False,
        **WORKS["order"],
    )
    assert run["moves"] >= 50 and run["results"] == oracle["order"]
