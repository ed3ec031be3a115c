"""``vamp profile-routing`` on a real engine."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.engine import run_scenario

from vamp_integration.record_order import read_order
from vamp_integration.routing_profile import record_order

pytestmark = pytest.mark.vllm


def test_the_order_comes_from_what_the_engine_counted(tiny_model: Path, tmp_path: Path) -> None:
    draw, prompts, path = random.Random(5), tmp_path / "prompts.jsonl", tmp_path / "order.json"
    rows = [{"prompt": [draw.randrange(2048) for _ in range(100)]} for _ in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_scenario("profiled", tiny_model, prompts=str(prompts), output=str(path), max_tokens=8)
    profile = json.loads(path.read_text())
    # The last token that is generated is not routed any more.
    assert [sum(row) for row in profile["hits"]] == [4 * (100 + 8 - 1) * 4] * 4
    assert read_order(str(path), 4, 32) == profile["order"] == record_order(profile["hits"])
    assert (profile["model"], profile["prompts"]) == (str(tiny_model), 4)
