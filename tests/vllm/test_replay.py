"""The replay against real engines: VAMP and an unmodified one with as much KV memory as VAMP can reach."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from vamp_integration.cli.replay import run_replay
from vamp_integration.replay.arms import parse_arm
from vamp_integration.replay.progress import ArmProgress
from vamp_integration.replay.run import ReplayConfig, replay_trace
from vamp_integration.replay.runner import ArmFailed
from vamp_integration.replay.scale import Scaling
from vamp_runtime.errors import ConfigError

pytestmark = pytest.mark.vllm

DEMO = Path(__file__).parents[2] / "bench" / "traces" / "miniswe_demo.jsonl"
# A prefill step of one KV block makes tokens independent of which prefixes were found in the cache.
STEP_TOKENS = 256


def settings(model: Path) -> ReplayConfig:
    return ReplayConfig(
        trace=DEMO,
        model=str(model),
        arms=(parse_arm("vamp_paper_0.25"),),
        kv_cache_bytes=30 * (128 << 10),
        scaling=Scaling(sessions=4, turns=3, think_cap_s=0.05, max_output=4),
        concurrency=4,
        check_tokens=True,
        max_num_batched_tokens=STEP_TOKENS,
        engine_args={"enforce_eager": True},
    )


def test_vamp_and_an_unmodified_engine_replay_the_same_trace(tiny_model: Path, tmp_path: Path) -> None:
    console = Console(width=160, record=True, force_terminal=False)
    page = run_replay(settings(tiny_model), tmp_path / "out", "vamp replay", console)
    shown = console.export_text()
    result = json.loads(page.with_suffix(".json").read_text())
    vamp, upper = result["rows"]
    assert (vamp["arm"], upper["arm"]) == ("vamp_paper_0.25", "upper_bound")
    assert vamp["turns"] == upper["turns"] == 8
    assert vamp["kv_gib"] <= 30 * 128 / 2**20 < upper["kv_gib"]
    assert vamp["blocks_max"] > vamp["blocks_min"] and vamp["level_max"] >= 1 and vamp["bytes_moved"] > 0
    assert upper["prefix_hit_rate"] > 0.5 and upper["bytes_moved"] == 0
    assert "output tokens of vamp_paper_0.25 and upper_bound are identical in all 12 turns" in shown
    assert page.read_text().count("<svg") == 4


def test_an_engine_that_does_not_start_ends_the_replay_with_its_log(tiny_model: Path, tmp_path: Path) -> None:
    """The pool is too small for one request, which vLLM finds out when it starts."""
    config = replace(
        settings(tiny_model), arms=(parse_arm("vllm"),), check_tokens=False, kv_cache_bytes=1 << 17
    )
    console = Console(quiet=True)
    with pytest.raises(ArmFailed, match="arm vllm ended with status 1") as caught:
        replay_trace(config, tmp_path, lambda name, turns: ArmProgress(console, name, turns))
    assert "memory" in caught.value.tail


def test_an_option_that_vllm_refuses_is_one_line_and_leaves_no_log(tiny_model: Path, tmp_path: Path) -> None:
    config = settings(tiny_model)
    config = replace(config, arms=(parse_arm("vllm"),), check_tokens=False, engine_args={"no_such_option": 1})
    console = Console(quiet=True)
    with pytest.raises(ConfigError, match=r"arm vllm: .*no_such_option") as caught:
        replay_trace(config, tmp_path / "logs", lambda name, turns: ArmProgress(console, name, turns))
    assert "\n" not in str(caught.value) and not (tmp_path / "logs").exists()
