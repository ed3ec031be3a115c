"""The serving benchmark on a modelled device: vLLM's scheduler and VAMP's policy, whole, in virtual time."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
BENCH = Path(__file__).parents[2] / "bench"
ARMS = ("vllm", "upper_bound", "vamp_measured_0.25", "vllm_host_kv", "vamp_spill_0.25")


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCH), *sys.path])}
    command = [sys.executable, str(BENCH / "serve_model.py"), "--out", str(out), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Eight short sessions whose prefixes outgrow a pool of 56 blocks, by arm."""
    from transformers import Qwen3NextConfig

    out = tmp_path_factory.mktemp("modelled")
    Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]).save_pretrained(out / "model")
    load = ["--workload", "demo", "--traces", str(BENCH / "traces"), "--sessions", "8", "--measure", "5"]
    pool = ["--kv-gib", "0.36", "--upper-gib", "2", "--host-kv-gib", "2", "--set", "blocks=56", "pages=62"]
    pool += ["staging_pages=0"]
    pool += ["--policy", "measured"]
    done = run(out, "--model", str(out / "model"), *load, *pool, "--arms", *ARMS)
    assert done.returncode == 0, done.stderr[-2000:]
    found = map(json.loads, (out / "modelled.jsonl").read_text().splitlines())
    read = {arm: gzip.decompress((out / f"trace-{arm}-8.json.gz").read_bytes()) for arm in ARMS}
    traces = {arm: json.loads(content) for arm, content in read.items()}
    return {row["arm"]: row | {"trace": traces[row["arm"]]} for row in found}


def test_vamp_hits_most_of_what_more_memory_would_where_vllm_hits_nothing(
    rows: dict[str, dict[str, Any]],
) -> None:
    plain, upper, vamp = (rows[arm] for arm in ARMS[:3])
    assert plain["prefix_hit_rate"] < 0.1 * upper["prefix_hit_rate"]
    assert vamp["prefix_hit_rate"] > 0.8 * upper["prefix_hit_rate"]
    assert vamp["turns_per_s"] > 1.2 * plain["turns_per_s"]
    assert vamp["ttft_s_p90"] < 0.6 * plain["ttft_s_p90"]
    assert 0 < vamp["level_max"] < vamp["model"]["max_level"] and vamp["failed_moves"] == 0
    assert plain["level_max"] == upper["level_max"] == 0


def test_copies_in_host_memory_bring_prefixes_back_with_and_without_vamp(
    rows: dict[str, dict[str, Any]],
) -> None:
    _, upper, few, copies, both = (rows[arm] for arm in ARMS)
    for row in (copies, both):
        assert row["prefix_hit_rate"] > 0.9 * upper["prefix_hit_rate"]
    assert both["level_mean"] < few["level_mean"], "what comes back is not worth reading experts for"
    assert both["decisions_spill"] > 0 and both["failed_moves"] == 0


def test_every_row_says_that_it_is_a_prediction(rows: dict[str, dict[str, Any]]) -> None:
    assert {row["what"] for row in rows.values()} == {"modelled: predictions, not measurements"}


@pytest.mark.parametrize("arm", ARMS)
def test_the_trace_accounts_for_every_token(rows: dict[str, dict[str, Any]], arm: str) -> None:
    """Steps come one after another, and computed at least what the turns that ended had not cached."""
    trace = rows[arm]["trace"]
    steps = [dict(zip(trace["columns"], row, strict=True)) for row in trace["steps"]]
    ends = [step["ended_s"] for step in steps]
    assert ends == sorted(ends) and all(step["scheduled_s"] < step["ended_s"] for step in steps)
    computed = sum(step["prompt_tokens"] + step["decodes"] for step in steps)
    missed = sum(turn["prompt_tokens"] - turn["cached_tokens"] for turn in trace["turns"])
    assert 0 < missed <= computed


def test_a_wrong_argument_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "--traces", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"serve_model.py: --traces {tmp_path}: no ")
