"""The metrics of an engine on a GPU, where figures come a step or two after the fact."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.engine import run_scenario

from vamp_integration import metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_figures_follow_the_moves(model: Path) -> None:
    """More than 1024 steps: the hit counters are looked at every 512, and arrive a look later."""
    work = {"kv_mib": 96, "count": 40, "max_tokens": 40}
    run = run_scenario("exported", model, **work, gdn_prefill_backend="triton")
    values = {
        (name, *(v for label, v in labels.items() if label not in ("model_name", "engine"))): value
        for name, labels, value in run["samples"]
    }
    for kind in ("offload", "restore"):
        assert run["moves_by_kind"][kind] > 20
        assert abs(values["vamp:moves_total", kind] - run["moves_by_kind"][kind]) <= 2
        assert values["vamp:move_seconds_total", kind] > 0
    assert values["vamp:moves_failed_total",] == 0
    in_hbm = [owner for owner in metrics.OWNERS if owner != "home"]
    assert sum(values["vamp:pages", owner] - run["counted"][owner] for owner in in_hbm) == 0
    assert values["vamp:pages", "home"] == run["counted"]["home"] > 0
    assert values["vamp:copied_bytes_total", "from_host"] > 0
    assert values["vamp:moe_host_read_bytes_total",] > 0
    assert values["vamp:realized_cost_seconds_total", "offload"] > 0
