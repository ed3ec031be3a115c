"""Moves must not change a token. The oracle proves first that wrong bytes would.

One sequence at a time and no prefix cache, so that both engines compute exactly the same batches.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.engine import run_scenario

pytestmark = pytest.mark.vllm

WORK = {"seed": 1, "count": 4, "length": 700, "max_tokens": 112, "enable_prefix_caching": False}


def test_hundreds_of_moves_leave_every_token(tiny_model: Path) -> None:
    """The pool is small enough that the requests use blocks that were expert pages a moment ago."""
    expected = run_scenario("plain", tiny_model, kv_mib=64, **WORK)
    moved = run_scenario("exercised", tiny_model, kv_mib=5, **WORK)
    assert moved["moves"] >= 300 and moved["failed_moves"] == 0
    assert min(moved["moves_by_kind"].values()) >= 100 and set(moved["moves_by_kind"]) == {
        "offload",
        "restore",
    }
    assert moved["bytes_moved"] > 0 and moved["highest_id"] >= moved["initial"]
    assert moved["results"] == expected["results"]


@pytest.mark.parametrize("what", ["expert", "block"])
def test_the_oracle_notices_corruption(tiny_model: Path, what: str) -> None:
    """One spoilt offloaded expert, and one spoilt KV block on a moved page, change tokens."""
    work = {"seed": 2, "length": 900, "max_tokens": 64, "kv_mib": 5, "enable_prefix_caching": False}
    sound = run_scenario("corrupted", tiny_model, what="nothing", **work)
    assert sound["level"] == sound["max_level"] > 0 and sound["highest_id"] >= sound["initial"]
    spoilt = run_scenario("corrupted", tiny_model, what=what, **work)
    assert spoilt["results"][0]["tokens"] != sound["results"][0]["tokens"]
    plain = run_scenario(
        "plain",
        tiny_model,
        seed=2,
        count=1,
        length=900,
        max_tokens=64,
        kv_mib=64,
        enable_prefix_caching=False,
    )
    assert sound["results"] == plain["results"]


def test_refused_driver_calls_leave_every_token(tiny_model: Path) -> None:
    """Every other move fails at a later driver call each time; serving goes on at the old size."""
    expected = run_scenario("plain", tiny_model, kv_mib=64, **WORK)
    moved = run_scenario("faulty", tiny_model, kv_mib=5, **WORK)
    assert moved["failed_moves"] >= 50 and moved["moves"] >= 50
    assert moved["results"] == expected["results"]


def test_record_order_leaves_every_token(tiny_model: Path, tmp_path: Path) -> None:
    draw = random.Random(3)
    order = tmp_path / "order.json"
    order.write_text(json.dumps({"order": [draw.sample(range(32), 32) for _ in range(4)]}))
    work = {"seed": 4, "length": 700, "max_tokens": 64}
    plain = run_scenario("plain", tiny_model, kv_mib=64, count=1, enable_prefix_caching=False, **work)
    moved = run_scenario("ordered", tiny_model, kv_mib=5, order=str(order), **work)
    assert moved["moves"] >= 50 and moved["results"] == plain["results"]
