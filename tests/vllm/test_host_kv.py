"""KV offloading to host and VAMP in one engine: the CPU engine, with copies that come late."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine import run_scenario

pytestmark = pytest.mark.vllm

WORK = {"seed": 21, "count": 6, "length": 600, "turns": 2}


def test_tails_go_back_while_blocks_are_copied_and_every_token_stays(tiny_model: Path) -> None:
    done = run_scenario("host_copies", tiny_model, kv_mib=3, host_mib=64, reserve=0, **WORK)
    assert done["decisions"].keys() & {"expand", "combined", "wait"} and done["moves_by_kind"]["offload"] > 0
    assert done["restored"] > 0 and done["moves_by_kind"]["restore"] > 0 and done["failed_moves"] == 0
    assert done["steps_waited_for_copies"] > 0, "no tail was free before its copies were made: proves nothing"
    assert done["left"] == 0
    plain = run_scenario("rounds", tiny_model, kv_mib=64, max_model_len=1024, growth=0, max_tokens=4, **WORK)
    tokens = [result["tokens"] for result in done["results"]]
    assert tokens == [result["tokens"] for result in plain["results"]]


@pytest.mark.parametrize("policy", ["eager", "measured"])
def test_blocks_that_host_memory_holds_are_spilled_and_come_back(tiny_model: Path, policy: str) -> None:
    """With no level to give, sessions that do not fit are served from host memory."""
    chosen = {"policy": policy} if policy == "measured" else {}
    spilled = run_scenario("host_copies", tiny_model, kv_mib=3, host_mib=64, most=0, **chosen, **WORK)
    assert spilled["decisions"]["spill"] > 0 and spilled["spilled_blocks"] > 0
    assert spilled["loaded_blocks"] > 0 and spilled["moves"] == 0
