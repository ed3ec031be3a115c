"""VAMP's figures, as they are exported, against those of scheduler and worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine import run_scenario

from vamp_integration import metrics

pytestmark = pytest.mark.vllm


def test_the_figures_are_those_of_scheduler_and_worker(tiny_model: Path) -> None:
    run = run_scenario("exported", tiny_model)
    values = {
        (name, *(v for label, v in labels.items() if label not in ("model_name", "engine"))): value
        for name, labels, value in run["samples"]
    }
    assert min(run["moves_by_kind"].values()) > 5
    for kind in metrics.MOVES:
        assert values["vamp:moves_total", kind] == run["moves_by_kind"].get(kind, 0)
    moved = [values["vamp:moved_bytes_total", way] for way in metrics.DIRECTIONS.values()]
    assert sum(moved) == run["bytes_moved"]
    assert values["vamp:copied_bytes_total", "from_host"] == run["copied_bytes"] > 0
    assert sum(values["vamp:move_seconds_total", kind] for kind in metrics.MOVES) == pytest.approx(
        run["move_seconds"], abs=1e-4
    )
    assert {owner: values["vamp:pages", owner] for owner in metrics.OWNERS} == run["counted"]
    assert values["vamp:level",] == run["level"]
