"""What can be changed about a running engine, on the real CPU engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine import run_scenario

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def run(tiny_model: Path) -> dict[str, Any]:
    return run_scenario("reconfigured", tiny_model, kv_mib=3)


def test_levels_bound_and_homes_of_a_running_engine(run: dict[str, Any]) -> None:
    first, *others = run["refused"]
    assert "let the engine make a step" in first
    assert [text.split(":")[0] for text in others] == ["level", "moe_kernel", "max_offload_ratio"]
    assert not any("\n" in text for text in run["refused"])

    assert run["held"] == 3 and run["pool_held"] > run["initial"]
    one, many = (sum(layers) for layers in run["host_bytes"])
    assert 0 < one < many and len(run["host_bytes"][0]) == 4
    assert run["held_at_0"] == 0 and run["pool_at_0"] == run["initial"]
    assert run["host_bytes_at_0"] == [0.0] * 4
    assert run["bounded"] == 2  # of 32 experts, where the eager policy would take all that it may
    assert run["report"]["failed_moves"] == 0


def test_homes_hold_the_experts_used_least(run: dict[str, Any]) -> None:
    assert run["copied"] > 0
    for hits, homed in zip(run["hits"], run["homed"], strict=True):
        assert sorted(homed) == sorted(hits)[: len(homed)] and len(homed) == 16
