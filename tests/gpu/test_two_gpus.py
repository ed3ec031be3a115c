"""Tensor parallel over two GPUs: one level on both, and no rank goes on alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import run_scenario

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

OPTIONS: dict[str, Any] = {
    "kv_mib": 96,
    "enable_prefix_caching": False,
    "enforce_eager": False,
    "max_num_batched_tokens": 1024,
    "gdn_prefill_backend": "triton",
    "work": {"seed": 1, "count": 8, "length": 300, "max_tokens": 28},
}


@pytest.mark.parametrize("kernel", ["vamp", "vllm"])
def test_moves_and_refusals_on_two_gpus_leave_every_token(model: Path, kernel: str) -> None:
    """A level moves in every step; then the driver of one rank refuses calls, and both undo.

    Each kernel is held against itself at rest.
    """
    vamp = {"moe_kernel": kernel}
    still = run_scenario("two_gpus.ranks", model, vamp={**vamp, "exercise_steps": 0}, **OPTIONS)
    moved = run_scenario("two_gpus.ranks", model, vamp=vamp, **OPTIONS)
    refused = run_scenario("two_gpus.ranks", model, vamp=vamp, fault="refused", **OPTIONS)
    assert still["moves"] == 0 and moved["moves"] >= 50 and moved["failed_moves"] == 0
    assert moved["bytes_moved"] > 0 and len(set(moved["levels"])) == 1
    assert moved["results"] == still["results"]
    assert refused["moves"] >= 5 and refused["failed_moves"] >= 2 and len(set(refused["levels"])) == 1
    assert refused["results"] == still["results"]


def test_a_rank_that_has_lost_its_state_ends_the_engine_within_seconds(model: Path) -> None:
    run = run_scenario("two_gpus.ranks", model, vamp={"moe_kernel": "vamp"}, fault="lost", **OPTIONS)
    assert "error" in run and run["moves"] == 4
    assert run["seconds"] < 60
