"""More at once than the highest level holds: vLLM preempts while levels come and go."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.engine import run_scenario

pytestmark = pytest.mark.vllm

PROBE = {"seed": 31, "count": 1, "length": 300, "max_tokens": 24}
LOAD = {"seed": 32, "count": 10, "length": 400, "max_tokens": 150}
# Prompts are prefilled in several chunks, beside those that decode.
ENGINE: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 1024}


@pytest.mark.parametrize("caching", [False, True], ids=["no prefix cache", "prefix cache"])
def test_preemptions_amid_moves_lose_no_request_no_invariant_and_no_token(
    tiny_model: Path, caching: bool
) -> None:
    spec = {"probe": PROBE, "load": LOAD, "kv_mib": 3, "ratio": 0.1, "enable_prefix_caching": caching}
    run = run_scenario("preempting.preempting", tiny_model, **spec, **ENGINE)
    assert [len(result["tokens"]) for result in run["results"]] == [LOAD["max_tokens"]] * LOAD["count"]
    levels, preemptions = zip(*run["seen"], strict=True)
    assert max(levels) == run["max_level"] > 1 and preemptions[-1] > 0
    grown = next(step for step, level in enumerate(levels) if level)
    assert preemptions[grown] == 0, "it preempted before it grew"
    back = [before for (was, before), (now, _) in pairwise(run["seen"]) if now < was]
    assert back and max(back) > 0, "no level went back after a preemption, while requests ran"
    assert run["failed_moves"] == 0 and run["level"] == 0
    before, *after = run["probes"]
    assert len(before[0]) == PROBE["max_tokens"] and after == [before, before]
