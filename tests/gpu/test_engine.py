"""vLLM's GPU engine with VAMP: moves must not change a token, with graphs and asynchronous scheduling on."""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.engine import WORKS, run_scenario

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

# One expert is 1.5 MiB, as Qwen3-Next's at four ranks: four of them share the three granules of a group.
ENGINE = {"enforce_eager": False, "max_num_batched_tokens": 1024, "gdn_prefill_backend": "triton"}
# A quarter goes to staging.
KV_MIB = 128
VLLM_KERNEL = {"vamp": {"moe_kernel": "vllm"}}
OWN_KERNEL = {"vamp": {"moe_kernel": "vamp"}}


@pytest.fixture(scope="module", autouse=True)
def one_layout() -> Any:
    """The unmodified engine lays its KV cache out as VAMP's does, so that both run the same kernels."""
    with mock.patch.dict(os.environ, {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}):
        yield


@pytest.fixture(scope="module")
def oracle(model: Path) -> dict[str, list[dict[str, Any]]]:
    options = {"enable_prefix_caching": False, "kv_mib": 1024, **ENGINE}
    done = run_scenario("oracle", model, works=list(WORKS.values()), **options)
    return dict(zip(WORKS, done["works"], strict=True))


def test_the_oracle_notices_corruption(model: Path, oracle: dict[str, Any]) -> None:
    run = run_scenario("corrupted", model, kv_mib=KV_MIB, **VLLM_KERNEL, **WORKS["corruption"], **ENGINE)
    assert run["level"] == run["max_level"] > 0 and run["bytes_moved"] > 0
    assert run["sound"] == run["again"] == oracle["corruption"]
    assert run["expert"][0]["tokens"] != run["sound"][0]["tokens"]
    assert run["block"][0]["tokens"] != run["sound"][0]["tokens"]


def test_hundreds_of_moves_leave_every_token(model: Path, oracle: dict[str, Any]) -> None:
    options = {"kv_mib": KV_MIB, "enable_prefix_caching": False, **WORKS["moves"], **ENGINE}
    run = run_scenario("exercised", model, **VLLM_KERNEL, **options)
    assert run["moves"] >= 100 and run["failed_moves"] == 0
    assert set(run["moves_by_kind"]) == {"offload", "restore"}
    assert run["bytes_moved"] > 0 and run["highest_id"] >= run["initial"]
    assert run["results"] == oracle["moves"]


@pytest.fixture(params=[("model", 0.5), ("wide_model", 0.06)], ids=["64 experts", "512 experts"])
def own(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """A model, and settings of our kernel under which it has eight or seven levels."""
    name, ratio = request.param
    return request.getfixturevalue(name), {"moe_kernel": "vamp", "max_offload_ratio": ratio}


def test_moves_leave_every_token_of_our_kernel(own: tuple[Path, dict[str, Any]]) -> None:
    """Our kernel rounds in another order than vLLM's, so it is held against itself without moves."""
    model, vamp = own
    options = {"kv_mib": KV_MIB, "enable_prefix_caching": False, **WORKS["moves"], **ENGINE}
    still = run_scenario("exercised", model, vamp={**vamp, "exercise_steps": 0}, **options)
    moved = run_scenario("exercised", model, vamp=vamp, **options)
    assert still["moves"] == 0 and moved["moves"] >= 100 and moved["failed_moves"] == 0
    assert moved["results"] == still["results"]


def test_the_oracle_notices_corruption_under_our_kernel(own: tuple[Path, dict[str, Any]]) -> None:
    model, vamp = own
    run = run_scenario("corrupted", model, kv_mib=KV_MIB, vamp=vamp, **WORKS["corruption"], **ENGINE)
    assert run["level"] == run["max_level"] > 0 and run["bytes_moved"] > 0
    assert run["sound"] == run["again"]
    assert run["expert"][0]["tokens"] != run["sound"][0]["tokens"]
    assert run["block"][0]["tokens"] != run["sound"][0]["tokens"]


@pytest.mark.parametrize("kernel", ["vllm", "vamp"])
def test_levels_go_back_while_running_and_idle(model: Path, kernel: str) -> None:
    """Sessions of more tokens together than the pool and a level hold."""
    sessions = {"kv_mib": 64, "count": 60, "length": 1200, "max_num_batched_tokens": 2048}
    sessions["vamp"] = {"moe_kernel": kernel}  # type: ignore[assignment]
    result = run_scenario("shrinking", model, **{**ENGINE, **sessions})
    assert result["level"] > 0 and result["grown"] > result["initial"]
    assert result["began"] and result["idle"] == 0 and result["pool_after"] == result["initial"]
    assert result["report_failed_moves"] == 0


ROUTING = "vamp_lognormal:sigma=1.06,tilt=0,shared=0,seed=3"


def test_simulated_routing_is_skewed_in_captured_graphs_and_alike_in_both_engines(model: Path) -> None:
    options = {"enable_prefix_caching": False, "routing": ROUTING, **ENGINE}
    plain = run_scenario("oracle", model, works=[WORKS["order"]], kv_mib=1024, **options)["works"][0]
    run = run_scenario("exercised", model, kv_mib=KV_MIB, **VLLM_KERNEL, **WORKS["order"], **options)
    assert run["moves"] >= 30 and run["results"] == plain
    for hits in run["hits"]:
        logs = [math.log(max(count, 0.5)) for count in hits]
        assert abs(statistics.pstdev(logs) - 1.06) < 0.25, statistics.pstdev(logs)


@pytest.mark.parametrize("kernel", ["vllm", "vamp"])
def test_groups_follow_the_traffic_and_no_token_changes(model: Path, kernel: str) -> None:
    """The domain changes under captured graphs; each kernel is held against itself without swaps."""
    work = {"seed": 4, "count": 4, "length": 400, "max_tokens": 64}
    vamp = {"max_offload_ratio": 0.34, "restore": False, "moe_kernel": kernel}
    still, run = (
        run_scenario(
            "reselecting",
            model,
            routing=ROUTING,
            work=work,
            vamp={**vamp, "reselect_mib_per_s": rate},
            kv_mib=KV_MIB,
            **ENGINE,
        )
        for rate in (0, 10_000)
    )
    assert run["results"] == still["results"]
    assert run["moves_by_kind"]["swap"] >= 3 and run["failed_moves"] == 0
    assert run["level"] == run["max_level"] > 0 and run["last_share"] < run["first_share"] - 0.05
